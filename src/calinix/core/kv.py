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
        balanced,
        hash_bytes,
        hash_words,
        join,
        least_of_highest,
        look,
        only_highest,
        seed_of,
        slots_of,
        weigh,
    )
    from calinix.core._native import NativePrefixRegistry as PrefixRegistry

    COMPILED = True
except ImportError:
    from calinix.core.columns import (
        Loads,
        balanced,
        least_of_highest,
        look,
        only_highest,
        slots_of,
        weigh,
    )
    from calinix.core.hashing import Chain, hash_bytes, hash_words, join, seed_of
    from calinix.core.registry import PrefixRegistry

    COMPILED = False

__all__ = [
    "COMPILED",
    "LIMIT_BLOCKS",
    "Chain",
    "Loads",
    "PrefixRegistry",
    "balanced",
    "hash_bytes",
    "hash_words",
    "join",
    "least_of_highest",
    "look",
    "only_highest",
    "seed_of",
    "slots_of",
    "weigh",
]
