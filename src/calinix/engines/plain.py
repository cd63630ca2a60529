"""Exchanges without a transfer protocol: one leg, or prefill then decode over shared storage."""

from __future__ import annotations

from typing import Final

import msgspec

from calinix.core.prompt import Endpoint
from calinix.engines.base import ExchangeError, Leg, LegAnswer, LegRole, PrefillAnswer
from calinix.engines.json_edits import JsonObject
from calinix.engines.members import Changes

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
_ONE: Final = b"1"
_FALSE: Final = b"false"
_NOT_FOR_PREFILL = (
    "stream_options", "best_of", "use_beam_search", "background", "logprobs", "top_logprobs", "echo"
)  # fmt: skip
"""Nobody reads what they ask for, or a prefill's one token refuses them. Whatever may shape the
prompt stays: tools, tool_choice and response_format go into some models' templates, and a prefill
of another prompt would be none."""


def _changes_at(endpoint: Endpoint) -> Changes:
    changes: Changes = dict.fromkeys(OUTPUT_LIMITS[endpoint], _ONE)
    changes["stream"] = _FALSE
    if endpoint is Endpoint.RESPONSES:
        changes["store"] = _FALSE
    return changes | dict.fromkeys(_NOT_FOR_PREFILL)


PREFILL = {endpoint: _changes_at(endpoint) for endpoint in OUTPUT_LIMITS}
"""What makes a request of each endpoint its own prefill: one token, one whole answer."""
NIXL_PREFILL = {at: changes | {PARAMS_FIELD: ASK_REMOTE_DECODE} for at, changes in PREFILL.items()}


class OneLeg:
    """One request to the one pod that answers it: `role` single, or decode when not split."""

    __slots__ = ("_leg",)

    def __init__(self, body: bytes, role: LegRole):
        self._leg = Leg(role, body, True)

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
    decode leg. `changes` are those of PREFILL or NIXL_PREFILL.
    """

    __slots__ = ("_prefill", "_request")

    def __init__(self, request: JsonObject, changes: Changes):
        self._request = request
        self._prefill = Leg("prefill", request.edited(prefill_changes(request, changes)), False)

    def start(self) -> tuple[Leg, ...]:
        """The prefill leg."""
        return (self._prefill,)

    def after(self, leg: Leg, answer: LegAnswer) -> tuple[Leg, ...]:
        """The decode leg. Raises ExchangeError when the answer is not a prefill's."""
        if leg.role != "prefill":
            raise ExchangeError(f"nothing follows the {leg.role} leg")
        params = transfer_params(answer)
        request = self._request
        body = request.body if params is None else request.edited({PARAMS_FIELD: params})
        return (Leg("decode", body, True),)


def can_split(request: JsonObject, endpoint: Endpoint, *, budget_allowed: bool = False) -> bool:
    """Whether a prefill pod could answer the prefill leg of a request to one of OUTPUT_LIMITS.

    `budget_allowed`: the protocol's marker lets vLLM take a thinking budget over `max_tokens`.
    """
    if not request.said:
        return True
    if wants_prompt_logprobs(request):
        # They come of computing the whole prompt, so the pod that answers has to.
        return False
    if endpoint is Endpoint.RESPONSES:
        # The earlier response is kept by the pod that made it, never by a prefill pod.
        return request.value("previous_response_id") == b""
    if endpoint is Endpoint.MESSAGES and not budget_allowed:
        return b"budget_tokens" not in request.value("thinking")
    return True


def is_one_sequence(request: JsonObject) -> bool:
    """Whether a body asks for one sequence of one prompt: a handle covers exactly one."""
    if request.said and (
        request.value("use_beam_search") == b"true" or request.value("n") not in (b"", b"1")
    ):
        return False
    return request.prompts() in (None, 1)


def wants_prompt_logprobs(request: JsonObject) -> bool:
    """Whether a body asks for the logprobs of its prompt's tokens, in either way."""
    if request.value("prompt_logprobs"):
        return True
    return request.value("echo") == b"true" and request.value("logprobs") != b""


def prefill_changes(request: JsonObject, changes: Changes) -> Changes:
    """`changes`, and those that make it one sequence, where the request has a say in that."""
    said = request.said
    if not said:
        return changes
    if "n" in said:
        changes = changes | {"n": _ONE}
    least = request.value("min_tokens")
    # A value of another type is left for the engine to refuse.
    if least.isdigit() and least not in (b"0", b"1"):
        changes = changes | {"min_tokens": _ONE}
    return changes


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
