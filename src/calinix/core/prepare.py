"""The prepare stage: a prompt's namespace, its chain of block hashes, its size in engine tokens.

Sizes are estimates from units (bytes, words or token ids) per engine token, learned per model
from the usage that engines report.
"""

from __future__ import annotations

from typing import Final, Literal

from calinix.core.kv import Chain, hash_bytes, hash_words, seed_of
from calinix.core.requests import RouteRequest, Work

Tokenizer = Literal["bytes", "words"]

BLOCK_UNITS: dict[Tokenizer, int] = {"bytes": 128, "words": 32}
"""Default units per block."""
STEADY_BLOCKS: Final = 64
"""Blocks of a text before they grow with depth: none is wider than 1/32 of what it ends.

A long prompt then costs few blocks (32 KB are 128 instead of 256, 128 KB 192 instead of 1024),
and the part of a hit that is lost to the last, partial block stays below 3 %.
"""
TOKEN_BLOCK: Final = 16
"""Default token ids per block."""
START_UNITS = {"bytes": 4.0, "words": 0.75}
"""Units per engine token before anything is learned."""

_KEEP: Final = 0.97
_PRIOR_TOKENS: Final = 512.0
_MIN_WORD_BLOCKS: Final = 4
"""Shorter ones are not learned from: their words are only known to half a block."""
TEMPLATE_TOKENS: Final = 2048
"""So many tokens an engine's own template may add to a prompt."""
_MOST_UNITS: Final = 64.0
"""No tokenizer's tokens are longer than this on average."""
_MAX_NAMESPACES: Final = 4096
_MAX_RATIOS: Final = 1024
_EMPTY = Chain.of(())
# An enum's member is slow to get at through its class.
_GENERATE, _POOLING = Work.GENERATE, Work.POOLING
_NO_NAMESPACE = "0" * 16


class Ratio:
    """Units per token, weighted by size, with forgetting."""

    __slots__ = ("_tokens", "_units", "value")

    def __init__(self, start: float):
        self._tokens = _PRIOR_TOKENS
        self._units = start * _PRIOR_TOKENS
        self.value = start

    def learn(self, units: float, tokens: float) -> None:
        """So many units were so many tokens."""
        self._units = units = _KEEP * self._units + units
        self._tokens = tokens = _KEEP * self._tokens + tokens
        self.value = units / tokens


class Namespace:
    """What keeps prompts of different models, tenants and tokenizers apart."""

    __slots__ = ("name", "ratio", "seed")

    def __init__(
        self,
        seed: int,
        name: str,
        ratio: Ratio | None,
    ):
        self.seed = seed
        self.name = name
        """The seed in 16 hex digits."""
        self.ratio = ratio
        """Units per engine token; None: units are engine tokens."""


class Prompt:
    """A prompt, prepared."""

    __slots__ = (
        "block_tokens",
        "blocks",
        "cap_blocks",
        "chain",
        "most_tokens",
        "namespace",
        "ratio",
        "spare",
        "tokens",
        "units",
    )  # fmt: skip

    def __init__(
        self,
        chain: Chain,
        blocks: int,
        namespace: str,
        tokens: float,
        block_tokens: float = 0.0,
        cap_blocks: int = 0,
        units: float = 0.0,
        ratio: Ratio | None = None,
        spare: Chain | None = None,
        most_tokens: float = 0.0,
    ):
        self.chain = chain
        self.blocks = blocks
        """What the chain covers, in blocks of the first size (`Chain.depth`)."""
        self.namespace = namespace
        self.tokens = tokens
        """Engine tokens, estimated."""
        self.block_tokens = block_tokens
        """Engine tokens per block, estimated."""
        self.cap_blocks = cap_blocks
        """Most blocks that can help: engines always recompute the last token."""
        self.units = units
        """Bytes, words or token ids; 0 where nothing can be learned."""
        self.ratio = ratio
        self.spare = spare
        """Another chain that the prompt is to be found by (`RouteRequest.spare`)."""
        self.most_tokens = most_tokens
        """More engine tokens than that cannot be made of it: no token is shorter than a byte."""

    def may_have(self, tokens: int) -> bool:
        """Whether an engine can have made so many tokens of it. What cannot be is not learned."""
        return 0 < tokens <= self.most_tokens and self.units <= _MOST_UNITS * tokens


_NO_PROMPT = Prompt(_EMPTY, 0, _NO_NAMESPACE, 0.0)


def token_seed(model: str, tenant: bytes, token_block: int) -> int:
    """First state of chains over token ids, `token_block` of them per block.

    Whoever hashes token ids (prompts that are some, exact tokenizers, the pods' KV events) has
    to begin here to meet the same blocks. `tenant` is the cache salt.
    """
    return _seed(model, tenant, b"tokens:%d" % token_block)


def _seed(model: str, tenant: bytes, tag: bytes) -> int:
    # Lengths first, so that no two namespaces give the same bytes.
    name = model.encode("utf-8", "surrogatepass")
    return seed_of(b"%d:%b%d:%b%b" % (len(name), name, len(tenant), tenant, tag))


class Preparer:
    """Prepares prompts, and learns how large they really were. Its tables are bounded."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        block_size: int | None,
        enabled: bool,
        token_block: int = TOKEN_BLOCK,
        exact: bool = False,
    ):
        """`exact`: most prompts come as their engine's token ids."""
        self._enabled = enabled
        self._token_block = token_block
        self._words = tokenizer == "words"
        self._block = block_size or BLOCK_UNITS[tokenizer]
        self._start = START_UNITS[tokenizer]
        self._tag = f"{tokenizer}:{self._block}".encode()
        self._namespaces: dict[tuple[str, bytes, bool], Namespace] = {}
        self._ratios: dict[str, Ratio] = {}
        self._bytes = Ratio(START_UNITS["bytes"])
        # Of the prompts that were routed: how many engine tokens a block stands for.
        self._per_block = Ratio(float(token_block) if exact else self._block / self._start)

    @property
    def tokens_per_block(self) -> float:
        """Engine tokens that one block of the mirrors stands for."""
        return self._per_block.value

    def prepare(self, request: RouteRequest) -> Prompt:
        """The prompt of a request. Only prompts that leave cache entries are hashed."""
        if request.work is not _GENERATE or not self._enabled:
            return self._unhashed(request)
        key = (request.model, request.tenant, request.prompt_is_tokens)
        namespace = self._namespaces.get(key) or self._namespace(key)
        data = request.prompt
        size = len(data)
        ratio = namespace.ratio
        spare: Chain | None = None
        if ratio is None:
            block, per_token = self._token_block, 1.0
            chain = hash_bytes(namespace.seed, data, 4 * block)
            if request.spare:
                spare = self.chain_of(request.model, request.tenant, request.spare, False)
            units = size / 4
            cap_blocks = (size // 4 - 1) // block
        elif self._words:
            block, per_token = self._block, ratio.value
            chain = hash_words(namespace.seed, data, block)
            # The words behind the last full block are not counted: half a block on average.
            units = (len(chain) + 0.5) * block if size else 0.0
            cap_blocks = len(chain)
        else:
            block, per_token = self._block, ratio.value
            chain = hash_bytes(namespace.seed, data, block, steady=STEADY_BLOCKS)
            units = float(size)
            cap_blocks = (size - 1) // block
        tokens = units / per_token
        own = size / 4 if ratio is None else float(size)
        most_tokens = own + request.other_bytes + TEMPLATE_TOKENS
        if request.other_bytes:
            # What usage will count is more than the prompt: nothing can be learned from it.
            units = 0.0
            tokens += request.other_bytes / (4.0 if ratio is None else self._bytes.value)
        return Prompt(
            chain,
            chain.depth(),
            namespace.name,
            tokens,
            block / per_token,
            cap_blocks if size else 0,
            units,
            ratio,
            spare,
            most_tokens,
        )

    def chain_of(self, model: str, tenant: bytes, data: bytes, is_tokens: bool) -> Chain:
        """The chain of a prompt by its token ids, or by its bytes (or words)."""
        key = (model, tenant, is_tokens)
        namespace = self._namespaces.get(key) or self._namespace(key)
        if is_tokens:
            return hash_bytes(namespace.seed, data, 4 * self._token_block)
        if self._words:
            return hash_words(namespace.seed, data, self._block)
        return hash_bytes(namespace.seed, data, self._block, steady=STEADY_BLOCKS)

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """The engine says that the prompt has so many tokens."""
        ratio, units, blocks = prompt.ratio, prompt.units, prompt.blocks
        if tokens <= 0 or units <= 0.0:
            return
        if self._words and ratio is not self._bytes and blocks < _MIN_WORD_BLOCKS:
            return
        if ratio is not None:
            ratio.learn(units, tokens)
            if ratio is not self._bytes and not self._words:
                self._bytes.learn(units, tokens)
        if blocks:
            covered = blocks * (self._token_block if ratio is None else self._block)
            share = covered / units if covered < units else 1.0
            if prompt.spare is not None:
                blocks += prompt.spare.depth()
            self._per_block.learn(tokens * share, blocks)

    def _unhashed(self, request: RouteRequest) -> Prompt:
        if request.work is not _GENERATE and request.work is not _POOLING:
            return _NO_PROMPT
        size, others = len(request.prompt), request.other_bytes
        if request.prompt_is_tokens:
            return Prompt(_EMPTY, 0, _NO_NAMESPACE, (size + others) / 4.0)
        return Prompt(
            _EMPTY,
            0,
            _NO_NAMESPACE,
            (size + others) / self._bytes.value,
            units=0.0 if others else float(size),
            ratio=self._bytes,
            most_tokens=float(size + others + TEMPLATE_TOKENS),
        )

    def _namespace(self, key: tuple[str, bytes, bool]) -> Namespace:
        model, tenant, is_tokens = key
        if len(self._namespaces) >= _MAX_NAMESPACES:
            self._namespaces.clear()
        if is_tokens:
            seed = token_seed(model, tenant, self._token_block)
        else:
            seed = _seed(model, tenant, self._tag)
        ratio = None if is_tokens else self.ratio(model)
        found = self._namespaces[key] = Namespace(seed, f"{seed:016x}", ratio)
        return found

    def ratio(self, model: str) -> Ratio:
        """What is learned of the model's prompts by their text."""
        if len(self._ratios) >= _MAX_RATIOS:
            self._ratios.clear()
        return self._ratios.setdefault(model, Ratio(self._start))
