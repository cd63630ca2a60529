"""Chooses the prefix registry and the hashes: compiled where it was built, else the reference.

Both forms give the same chains and the same answers; a chain goes only with the registry of
its own form. COMPILED says which one this is.
"""

from __future__ import annotations

from calinix.core.hashing import LIMIT_BLOCKS

try:
    from calinix.core._native import Chain, hash_bytes, hash_words, seed_of
    from calinix.core._native import NativePrefixRegistry as PrefixRegistry

    COMPILED = True
except ImportError:
    from calinix.core.hashing import Chain, hash_bytes, hash_words, seed_of
    from calinix.core.registry import PrefixRegistry

    COMPILED = False

__all__ = [
    "COMPILED",
    "LIMIT_BLOCKS",
    "Chain",
    "PrefixRegistry",
    "hash_bytes",
    "hash_words",
    "seed_of",
]
