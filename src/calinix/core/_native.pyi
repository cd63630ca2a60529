"""Types of the compiled part: those of the reference."""  # noqa: PYI021

from calinix.core.hashing import Chain as Chain
from calinix.core.hashing import hash_bytes as hash_bytes
from calinix.core.hashing import hash_words as hash_words
from calinix.core.hashing import seed_of as seed_of
from calinix.core.registry import PrefixRegistry as NativePrefixRegistry

__all__ = ["Chain", "NativePrefixRegistry", "hash_bytes", "hash_words", "seed_of"]
