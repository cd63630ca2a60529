"""Which paths the inference port serves, and how each counts as load."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from calinix.core.prompt import Endpoint


class Route(msgspec.Struct, frozen=True):
    """One path of the inference port."""

    endpoints: dict[str, Endpoint]
    """Per method, what the request is; other methods are refused with 405."""
    label: str
    """The metrics label: from this table only, never from a client."""

    @property
    def allow(self) -> bytes:
        """The methods as an `allow` header line."""
        return b"allow: " + ", ".join(sorted(self.endpoints)).encode() + b"\r\n"


_POSTS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/messages": Endpoint.MESSAGES,
    "/v1/embeddings": Endpoint.EMBEDDINGS,
    "/score": Endpoint.POOLING_LIKE,
    "/v1/score": Endpoint.POOLING_LIKE,
    "/rerank": Endpoint.POOLING_LIKE,
    "/v1/rerank": Endpoint.POOLING_LIKE,
    "/v2/rerank": Endpoint.POOLING_LIKE,
    "/classify": Endpoint.POOLING_LIKE,
    "/pooling": Endpoint.POOLING_LIKE,
    "/tokenize": Endpoint.OTHER_POST,
    "/detokenize": Endpoint.OTHER_POST,
    "/v1/messages/count_tokens": Endpoint.OTHER_POST,
    "/v1/audio/transcriptions": Endpoint.OTHER_POST,
    "/v1/audio/translations": Endpoint.OTHER_POST,
    "/v1/audio/speech": Endpoint.OTHER_POST,
}

_RESPONSE_BY_ID = Route(
    endpoints={"GET": Endpoint.GET, "DELETE": Endpoint.GET}, label="/v1/responses/{id}"
)
_RESPONSE_CANCEL = Route(endpoints={"POST": Endpoint.GET}, label="/v1/responses/{id}/cancel")
_RESPONSES_PREFIX = "/v1/responses/"
# Nothing that a pod, or a proxy before it, could take for another path.
_is_response_path = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,256})(/cancel)?").fullmatch


class RouteTable:
    """Path -> Route: OpenAI's and Anthropic's paths, the allow list, and the config's own."""

    def __init__(self, passthrough_paths: Iterable[str]):
        self._routes = {
            path: Route(endpoints={"POST": endpoint}, label=path)
            for path, endpoint in _POSTS.items()
        }
        for path in passthrough_paths:
            self._routes.setdefault(
                path,
                Route(
                    endpoints={
                        "GET": Endpoint.GET,
                        "HEAD": Endpoint.GET,
                        "POST": Endpoint.OTHER_POST,
                    },
                    label=path,
                ),
            )

    def find(self, path: str) -> Route | None:
        """The route of a path; None: not served."""
        route = self._routes.get(path)
        if route is None and path.startswith(_RESPONSES_PREFIX):
            found = _is_response_path(path)
            if found is not None:
                return _RESPONSE_CANCEL if found[2] else _RESPONSE_BY_ID
        return route


def response_id_of(path: str) -> str | None:
    """The response id in /v1/responses/{id}[/cancel]."""
    if not path.startswith(_RESPONSES_PREFIX):
        return None
    found = _is_response_path(path)
    return found[1] if found is not None else None
