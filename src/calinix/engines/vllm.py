"""vLLM's NIXL prefill/decode protocol, the pods' end: handles.

The prefill leg asks for `do_remote_decode`; the prefill pod pins the prompt's blocks and answers
with a handle; the decode leg carries that handle in its exact bytes (plain.PrefillDecode). A handle
is issued, lasts for a lease, and can be redeemed once.
"""

from __future__ import annotations

import enum

import msgspec

from calinix.errors import CalinixError

LEASE_S = 30.0
"""How long a prefill pod pins blocks for a decode pod that does not come."""


class NixlHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefill pod says of the blocks that it pins: `kv_transfer_params` of its answer."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_block_ids: list[list[int]]
    """Per KV cache group (one here): the ids of the pinned blocks, in prompt order."""
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int = 1
    dcp_size: int = 1
    pp_size: int = 1
    remote_num_tokens: int
    """Tokens of the prompt whose KV is in those blocks."""
    remote_blocks_expiry_time: float | None = None
    transfer_mode: str = "pull"
    remote_prefill_cached_tokens: int = 0


class HandleError(CalinixError):
    """The handle is not one that can be redeemed: unknown, expired, used or altered."""


class Ask(enum.Enum):
    """What a request's `kv_transfer_params` asks of a pod."""

    NOTHING = "nothing"
    REMOTE_DECODE = "remote_decode"
    """Prefill here, keep the blocks, answer with a handle."""
    REMOTE_PREFILL = "remote_prefill"
    """Load the prompt's KV from the pod that the handle names."""
    INCOMPLETE = "incomplete"
    """Says that the prompt is prefilled elsewhere, and not where: a real engine waits for ever."""


def read_params(params: dict[str, object] | None) -> tuple[Ask, NixlHandle | None]:
    """What a request asks of the pod, with the handle when it carries a whole one."""
    if params is None:
        return Ask.NOTHING, None
    if params.get("do_remote_decode"):
        return Ask.REMOTE_DECODE, None
    if not params.get("do_remote_prefill"):
        return Ask.NOTHING, None
    try:
        return Ask.REMOTE_PREFILL, msgspec.convert(params, NixlHandle)
    except msgspec.ValidationError:
        return Ask.INCOMPLETE, None


class HandleTable:
    """The handles that one prefill pod has issued and that are not redeemed yet.

    `now` is in seconds on any monotonic clock. The caller holds the blocks and frees those of
    the requests that `redeem` and `expire` name.
    """

    def __init__(self, engine_id: str, host: str, port: int, lease_s: float = LEASE_S):
        self.engine_id = engine_id
        self.host = host
        self.port = port
        self.lease_s = lease_s
        self._issued: dict[str, tuple[float, NixlHandle]] = {}

    def __len__(self) -> int:
        return len(self._issued)

    def issue(
        self, request_id: str, block_ids: list[int], prompt_tokens: int, cached: int, now: float
    ) -> NixlHandle:
        """A handle for the pinned blocks of `request_id`, good until `now + lease_s`."""
        handle = NixlHandle(
            remote_block_ids=[block_ids],
            remote_engine_id=self.engine_id,
            remote_request_id=request_id,
            remote_host=self.host,
            remote_port=self.port,
            remote_num_tokens=prompt_tokens,
            remote_prefill_cached_tokens=cached,
        )
        self._issued[request_id] = (now + self.lease_s, handle)
        return handle

    def redeem(self, handle: NixlHandle, now: float) -> int:
        """Uses the handle up; returns how many prompt tokens it covers. Raises HandleError."""
        if handle.remote_engine_id != self.engine_id:
            raise HandleError(f"no engine {handle.remote_engine_id} here")
        until, issued = self._issued.get(handle.remote_request_id, (0.0, None))
        if issued is None:
            raise HandleError(f"no blocks are kept for {handle.remote_request_id}")
        if until <= now:
            raise HandleError(f"the lease of {handle.remote_request_id} has ended")
        if issued != handle:
            raise HandleError(f"the handle of {handle.remote_request_id} was altered")
        del self._issued[handle.remote_request_id]
        return issued.remote_num_tokens

    def expire(self, now: float) -> list[str]:
        """Forgets the handles whose lease has ended; returns their request ids."""
        # Leases are of one length, so the oldest handle is always the first of the dict.
        ended: list[str] = []
        for request_id, (until, _) in self._issued.items():
            if until > now:
                break
            ended.append(request_id)
        for request_id in ended:
            del self._issued[request_id]
        return ended

    def next_expiry_s(self) -> float | None:
        """When the next lease ends, on the clock of `now`; None when none is open."""
        return next((until for until, _ in self._issued.values()), None)
