"""Chooses what is compiled where it was built, else the reference form of the same behaviour.

Both forms give the same chains and the same answers; a chain goes only with the registry of
its own form. COMPILED says which one this is.
"""

from __future__ import annotations

from calinix.core.hashing import LIMIT_BLOCKS

try:
    from calinix.core._native import (
        Chain,
        Loads,
        backlog_s,
        balanced,
        drawn,
        hash_bytes,
        hash_words,
        join,
        least_of_highest,
        lift,
        look,
        near_highest,
        only_highest,
        prefill_s,
        seed_of,
        slots_of,
        smooth_turn,
        token_s,
        weigh,
    )
    from calinix.core._native import NativePrefixRegistry as PrefixRegistry

    COMPILED = True
except ImportError:
    from calinix.core.columns import (
        Loads,
        backlog_s,
        balanced,
        drawn,
        least_of_highest,
        look,
        near_highest,
        only_highest,
        prefill_s,
        slots_of,
        smooth_turn,
        token_s,
        weigh,
    )
    from calinix.core.hashing import Chain, hash_bytes, hash_words, join, lift, seed_of
    from calinix.core.registry import PrefixRegistry

    COMPILED = False

__all__ = [
    "COMPILED",
    "LIMIT_BLOCKS",
    "Chain",
    "Loads",
    "PrefixRegistry",
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
