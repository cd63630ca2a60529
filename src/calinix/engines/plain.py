"""Exchanges without a transfer protocol: one leg, or prefill then decode over shared storage."""

from __future__ import annotations

import msgspec

from calinix.core.prompt import Endpoint
from calinix.engines.base import ExchangeError, Leg, LegAnswer, LegRole, PrefillAnswer
from calinix.engines.json_edits import (
    JsonMembers,
    batch_of,
    drop_transfer_fields,
    encode_members,
    raw_member,
    with_members,
)

PARAMS_FIELD = "kv_transfer_params"
ASK_REMOTE_DECODE = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
"""What vLLM's NIXL prefill leg asks for: the prompt's blocks kept, and a handle to them."""

OUTPUT_LIMITS: dict[Endpoint, tuple[str, ...]] = {
    Endpoint.CHAT: ("max_tokens", "max_completion_tokens"),
    Endpoint.COMPLETIONS: ("max_tokens",),
    Endpoint.RESPONSES: ("max_output_tokens",),
    Endpoint.MESSAGES: ("max_tokens",),
}
"""The fields that bound an answer's length, of every endpoint that can be split."""

_prefill_answer = msgspec.json.Decoder(PrefillAnswer)
_ONE = msgspec.Raw(b"1")
_FALSE = msgspec.Raw(b"false")
_NOT_FOR_PREFILL = (
    "stream_options", "best_of", "use_beam_search", "background", "logprobs", "top_logprobs", "echo"
)  # fmt: skip
"""Nobody reads what they ask for, or a prefill's one token refuses them. Whatever may shape the
prompt stays: tools, tool_choice and response_format go into some models' templates, and a prefill
of another prompt would be none."""


class OneLeg:
    """One request to the one pod that answers it: `role` single, or decode when not split."""

    __slots__ = ("_leg",)

    def __init__(self, body: bytes, role: LegRole):
        self._leg = Leg(role, body, answers_client=True)

    def start(self) -> tuple[Leg, ...]:
        """The one leg."""
        return (self._leg,)

    def after(self, leg: Leg, answer: LegAnswer) -> tuple[Leg, ...]:  # noqa: ARG002
        """Never called: the only leg answers the client."""
        raise ExchangeError(f"nothing follows the {leg.role} leg")


class PrefillDecode:
    """Prefill first, with one token to generate; then the original body to the decode pod.

    What the prefill pod says in `kv_transfer_params` goes to the decode pod in its exact bytes;
    a prefill pod that says nothing (shared storage, or nothing to transfer) leaves a plain
    decode leg. `members` are the members of `body`; transfer fields of its own are dropped.
    """

    __slots__ = ("_body", "_prefill")

    def __init__(
        self, body: bytes, members: JsonMembers, endpoint: Endpoint, params: bytes | None = None
    ):
        self._body = encode_members(members) if drop_transfer_fields(members) else body
        make_prefill(members, endpoint)
        if params is not None:
            members[PARAMS_FIELD] = msgspec.Raw(params)
        self._prefill = Leg("prefill", encode_members(members), answers_client=False)

    def start(self) -> tuple[Leg, ...]:
        """The prefill leg."""
        return (self._prefill,)

    def after(self, leg: Leg, answer: LegAnswer) -> tuple[Leg, ...]:
        """The decode leg. Raises ExchangeError when the answer is not a prefill's."""
        if leg.role != "prefill":
            raise ExchangeError(f"nothing follows the {leg.role} leg")
        params = transfer_params(answer)
        body = self._body if params is None else with_members(self._body, {PARAMS_FIELD: params})
        return (Leg("decode", body, answers_client=True),)


def can_split(members: JsonMembers, endpoint: Endpoint, *, budget_allowed: bool = False) -> bool:
    """Whether a prefill pod could answer this request's prefill leg.

    `budget_allowed`: the protocol's marker lets vLLM take a thinking budget over `max_tokens`.
    """
    if wants_prompt_logprobs(members):
        # They come of computing the whole prompt, so the pod that answers has to.
        return False
    if endpoint is Endpoint.RESPONSES:
        # The earlier response is kept by the pod that made it, never by a prefill pod.
        return raw_member(members, "previous_response_id") == b""
    if endpoint is Endpoint.MESSAGES and not budget_allowed:
        return b"budget_tokens" not in raw_member(members, "thinking")
    return endpoint in OUTPUT_LIMITS


def is_one_sequence(members: JsonMembers) -> bool:
    """Whether a body asks for one sequence of one prompt: a handle covers exactly one."""
    if raw_member(members, "use_beam_search") == b"true":
        return False
    return raw_member(members, "n") in (b"", b"1") and batch_of(members) in (None, 1)


def wants_prompt_logprobs(members: JsonMembers) -> bool:
    """Whether a body asks for the logprobs of its prompt's tokens, in either way."""
    if raw_member(members, "prompt_logprobs"):
        return True
    return raw_member(members, "echo") == b"true" and raw_member(members, "logprobs") != b""


def make_prefill(members: JsonMembers, endpoint: Endpoint) -> None:
    """Turns a client's request into its prefill: one sequence, one token, one whole answer."""
    for name in OUTPUT_LIMITS[endpoint]:
        members[name] = _ONE
    members["stream"] = _FALSE
    if endpoint is Endpoint.RESPONSES:
        members["store"] = _FALSE
    for name in _NOT_FOR_PREFILL:
        members.pop(name, None)
    if "n" in members:
        members["n"] = _ONE
    least = raw_member(members, "min_tokens")
    # A value of another type is left for the engine to refuse.
    if least.isdigit() and least not in (b"0", b"1"):
        members["min_tokens"] = _ONE


def transfer_params(answer: LegAnswer) -> bytes | None:
    """The exact bytes of a prefill answer's `kv_transfer_params`; None when there are none.

    Raises ExchangeError when the answer is not a 2xx JSON object or the field is not an object.
    """
    if not 200 <= answer.status < 300:
        raise ExchangeError(f"the prefill pod answered {answer.status}")
    try:
        params = _prefill_answer.decode(answer.body).kv_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ExchangeError("the prefill pod's answer is not a JSON object") from error
    text = b"" if params is msgspec.UNSET else bytes(params)
    if not text or text == b"null":
        return None
    if not text.startswith(b"{"):
        raise ExchangeError("the prefill pod's kv_transfer_params is not an object")
    return text
