"""Names of the headers that Calinix reads, sets and strips. All lower case, as bytes."""

REQUEST_ID = b"x-request-id"
TRACEPARENT = b"traceparent"
AUTHORIZATION = b"authorization"

CALINIX_PREFIX = b"x-calinix-"
CALINIX_REQUEST_ID = b"x-calinix-request-id"
MODE = b"x-calinix-mode"
SESSION_KEY = b"x-calinix-session-key"
PREFILL_USAGE = b"x-calinix-prefill-usage"
"""`true` asks for the prefill pod's own token counts, in two headers of the answer."""
TARGET_POD_ID = b"x-calinix-target-pod-id"
PREFILL_POD_ID = b"x-calinix-prefill-pod-id"
DECODE_POD_ID = b"x-calinix-decode-pod-id"
CACHE_HIT = b"x-calinix-cache-hit"
CACHE_PREFIX_DEPTH = b"x-calinix-cache-prefix-depth"
CACHE_NAMESPACE = b"x-calinix-cache-namespace"
ROUTE_POLICY = b"x-calinix-route-policy"

DATA_PARALLEL_RANK = b"x-data-parallel-rank"
"""vLLM's rank selector. A client that sets it would steer an engine past the router."""
OVERRIDE_PREFIX = b"x-override-"
"""SGLang lets these replace fields of the body: the KV transfer's room, host and port, the rank."""

HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110 section 7.6.1: these speak of one connection and are never passed on."""
