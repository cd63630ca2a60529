"""How blocks are named: the engine's hashes as keys, its extra keys as salt, tokens as bytes.

Namespaces are those of prompts (core/prepare.py): model or adapter, cache salt, tokens per block.
"""

from __future__ import annotations

import sys
from array import array

from calinix.core.prepare import token_seed
from calinix.engines.kv_events import EngineHash, StoredBlocks

_MAX_NAMESPACES = 4096
_MAX_SALT_BYTES = 128


class Namespaces:
    """First states of token chains by model and cache salt. Bounded."""

    __slots__ = ("_seeds", "block_tokens")

    def __init__(self, block_tokens: int):
        self.block_tokens = block_tokens
        """Token ids of one block of the index."""
        self._seeds: dict[tuple[str, bytes], int] = {}

    def seed(self, model: str, salt: bytes) -> int:
        """As core/prepare.py has it for token ids."""
        found = self._seeds.get((model, salt))
        if found is None:
            if len(self._seeds) >= _MAX_NAMESPACES:
                self._seeds.clear()
            found = self._seeds[model, salt] = token_seed(model, salt, self.block_tokens)
        return found


def key_of(name: EngineHash) -> int:
    """A block's name as a number: of a digest its last 8 bytes, as vLLM makes integers of them."""
    return name if isinstance(name, int) else int.from_bytes(name[-8:], "big")


def salt_of(event: StoredBlocks) -> tuple[bytes, int]:
    """(cache salt, how many leading blocks have a key that prompts can have)."""
    salt = b""
    count = len(event.block_hashes)
    for at, keys in enumerate((event.extra_keys or [])[:count]):
        rest = list(keys or ())
        if rest and rest[0] is not None and rest[0] in (event.lora_name, event.lora_id):
            del rest[0]
        if not rest:
            continue
        given = rest[0]
        if at or event.parent_block_hash is not None or len(rest) > 1 or not isinstance(given, str):
            return salt, at
        salt = given.encode("utf-8", "surrogatepass")
        if len(salt) > _MAX_SALT_BYTES:
            return b"", 0
    return salt, count


def token_bytes(tokens: list[int]) -> bytes | None:
    """Token ids as little-endian u32; None: some are none."""
    try:
        ids = array("I", tokens)
    except (OverflowError, TypeError):
        return None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()
