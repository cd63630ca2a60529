"""vLLM's Mooncake prefill/decode protocol, both ends: the router's exchange, the pods' transfers.

Router: asks the prefill pod's bootstrap server once for the engine's ids, invents a transfer id,
and sends both legs at once. The prefill pod answers without a handle; the decode pod asks it for
the blocks of the transfer, and waits until they are computed. Pods: a transfer is announced by the
prefill leg, computed, and pulled once.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from calinix.core.prompt import Endpoint
from calinix.engines.base import Draw, ExchangeError, Leg, LegAnswer, Prefiller
from calinix.engines.json_edits import JsonObject
from calinix.engines.members import Changes
from calinix.engines.plain import PARAMS_FIELD, PREFILL, prefill_changes, transfer_params
from calinix.errors import CalinixError

DEFAULT_BOOTSTRAP_PORT = 8998
"""vLLM's, and SGLang's as well."""
QUERY_PATH = "/query"
TRANSFER_ID_BITS = 128
_RANK_BITS = 32
_MAX_RANKS = 4096

# The blocks are kept only after an end by length, which an end token as the first one is not.
_TO_THE_END: Changes = {"stop": None, "stop_token_ids": None, "ignore_eos": b"true"}

_query = Leg("prefill", b"", answers_client=False, bootstrap_path=QUERY_PATH)


class _Entry(msgspec.Struct):
    """One data-parallel rank in the bootstrap server's answer."""

    engine_id: str


_entries = msgspec.json.Decoder(dict[int, _Entry], strict=False)


def engine_ids(answer: LegAnswer) -> dict[int, str]:
    """Data-parallel rank -> engine id, out of the bootstrap server's answer.

    Raises ExchangeError when there are none in it.
    """
    try:
        found = _entries.decode(answer.body) if answer.status == 200 else {}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ExchangeError(f"the bootstrap server's answer names no engines: {error}") from error
    if not found or len(found) > _MAX_RANKS:
        raise ExchangeError(
            f"the bootstrap server names {len(found)} engines (status {answer.status})"
        )
    return {rank: entry.engine_id for rank, entry in found.items()}


class MooncakeExchange:
    """`start` -> the query where the engine's ids are not known yet, else both legs at once."""

    __slots__ = ("_changes", "_draw", "_prefiller", "_request")

    def __init__(self, request: JsonObject, endpoint: Endpoint, prefiller: Prefiller, draw: Draw):
        self._changes = prefill_changes(request, PREFILL[endpoint]) | _TO_THE_END
        self._request = request
        self._prefiller = prefiller
        self._draw = draw

    def start(self) -> tuple[Leg, ...]:
        """The query, or both legs."""
        return self._legs() if self._prefiller.engine_ids else (_query,)

    def after(self, leg: Leg, answer: LegAnswer) -> tuple[Leg, ...]:
        """After the query both legs; nothing after the prefill leg. Raises ExchangeError."""
        if leg.bootstrap_path:
            self._prefiller.engine_ids = engine_ids(answer)
            return self._legs()
        if leg.role != "prefill":
            raise ExchangeError(f"nothing follows the {leg.role} leg")
        # Nothing in it is needed. But a pod that says something else has prefilled nothing, and
        # its decode pod would wait for long.
        transfer_params(answer)
        return ()

    def _legs(self) -> tuple[Leg, Leg]:
        prefiller, ids = self._prefiller, self._prefiller.engine_ids
        ranks = sorted(ids)
        rank = ranks[self._draw(_RANK_BITS) % len(ranks)] if len(ranks) > 1 else ranks[0]
        transfer_id = f"{self._draw(TRANSFER_ID_BITS):032x}"
        announced = self._changes | {
            PARAMS_FIELD: b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":"%b"}'
            % transfer_id.encode()
        }
        asked = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": bootstrap_url(prefiller),
            "remote_engine_id": ids[rank],
            "transfer_id": transfer_id,
        }
        # With several ranks the prefill has to run where the decode pod will look for it.
        lines = b"x-data-parallel-rank: %d\r\n" % rank if len(ranks) > 1 else b""
        edited = self._request.edited
        return (
            Leg("prefill", edited(announced), answers_client=False, lines=lines),
            Leg("decode", edited({PARAMS_FIELD: msgspec.json.encode(asked)}), answers_client=True),
        )


def bootstrap_url(prefiller: Prefiller) -> str:
    """Where the bootstrap server listens."""
    host = f"[{prefiller.host}]" if ":" in prefiller.host else prefiller.host
    return f"http://{host}:{prefiller.port or DEFAULT_BOOTSTRAP_PORT}"


# --- the pods' side --------------------------------------------------------------------------


def query_answer(engines: Mapping[int, tuple[str, str]]) -> bytes:
    """A bootstrap server's answer: data-parallel rank -> (engine id, where its worker listens)."""
    return msgspec.json.encode(
        {
            str(rank): {"engine_id": engine_id, "worker_addr": {"0": {"0": address}}}
            for rank, (engine_id, address) in engines.items()
        }
    )


class Workers(msgspec.Struct):
    """One rank's entry as a decode pod reads it."""

    engine_id: str
    worker_addr: dict[int, dict[int, str]]


_workers = msgspec.json.Decoder(dict[int, Workers], strict=False)


def worker_of(answer: bytes, engine_id: str) -> str | None:
    """Where the first worker of an engine listens; None when the answer does not name it.

    Raises msgspec.MsgspecError for an answer of another shape.
    """
    for entry in _workers.decode(answer).values():
        if entry.engine_id == engine_id:
            return entry.worker_addr[0][0]
    return None


class Pull(msgspec.Struct, frozen=True):
    """What a decode leg says of the blocks that it needs."""

    remote_bootstrap_addr: str
    remote_engine_id: str
    transfer_id: str


class TransferError(CalinixError):
    """The blocks of a transfer are not to be had."""


class TransferTable:
    """The transfers of one prefill pod: announced, computed, pulled. `now` in seconds.

    The caller holds the blocks and frees those of the requests that `pull` and `expire` name.
    """

    def __init__(self, lease_s: float):
        self._lease_s = lease_s
        self._computed: dict[str, tuple[float, str, int]] = {}

    def __len__(self) -> int:
        return len(self._computed)

    def computed(self, transfer_id: str, request_id: str, tokens: int, now: float) -> None:
        """The prompt's blocks are there, kept until they are pulled or the lease ends."""
        self._computed[transfer_id] = (now + self._lease_s, request_id, tokens)

    def pull(self, transfer_id: str) -> tuple[str, int] | None:
        """(request id, tokens) of computed blocks, which are then used up; None: not computed."""
        found = self._computed.pop(transfer_id, None)
        return None if found is None else found[1:]

    def expire(self, now: float) -> list[str]:
        """Forgets the transfers whose lease has ended; returns their request ids."""
        ended = [
            transfer_id for transfer_id, (until, _, _) in self._computed.items() if until <= now
        ]
        return [self._computed.pop(transfer_id)[1] for transfer_id in ended]

    def next_expiry_s(self) -> float | None:
        """When the next lease ends; None when none is open."""
        return min((until for until, _, _ in self._computed.values()), default=None)
