"""Types of the compiled part: those of the reference."""  # noqa: PYI021

from calinix.core.columns import Loads as Loads
from calinix.core.columns import backlog_s as backlog_s
from calinix.core.columns import balanced as balanced
from calinix.core.columns import drawn as drawn
from calinix.core.columns import least_of_highest as least_of_highest
from calinix.core.columns import look as look
from calinix.core.columns import near_highest as near_highest
from calinix.core.columns import only_highest as only_highest
from calinix.core.columns import prefill_s as prefill_s
from calinix.core.columns import slots_of as slots_of
from calinix.core.columns import smooth_turn as smooth_turn
from calinix.core.columns import token_s as token_s
from calinix.core.columns import weigh as weigh
from calinix.core.hashing import Chain as Chain
from calinix.core.hashing import hash_bytes as hash_bytes
from calinix.core.hashing import hash_words as hash_words
from calinix.core.hashing import join as join
from calinix.core.hashing import lift as lift
from calinix.core.hashing import seed_of as seed_of
from calinix.core.registry import PrefixRegistry as NativePrefixRegistry

__all__ = [
    "Chain",
    "Loads",
    "NativePrefixRegistry",
    "backlog_s",
    "balanced",
    "drawn",
    "hash_bytes",
    "hash_words",
    "join",
    "least_of_highest",
    "lift",
    "look",
    "near_highest",
    "only_highest",
    "prefill_s",
    "seed_of",
    "slots_of",
    "smooth_turn",
    "token_s",
    "weigh",
]
