"""All that routing knows, in a few tables: owned by the Router, read by the stages."""

from __future__ import annotations

from typing import Protocol

from calinix.config import Config, Mode, Strategy
from calinix.core.choice import Recipe
from calinix.core.health import HealthTable
from calinix.core.kv import PrefixRegistry
from calinix.core.ledger import Ledger
from calinix.core.pods import ROLES, PodTable, Role
from calinix.core.prepare import Preparer
from calinix.core.rates import PrefillRates
from calinix.core.sessions import Pins, Sessions


class Rng(Protocol):
    """Seeded random numbers, handed in by the host. `random.Random` is one."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...

    def randrange(self, stop: int, /) -> int:
        """Uniform in 0..stop - 1."""
        ...


class State:
    """The tables. Only the Router writes to them; pickers advance `turns`."""

    def __init__(self, config: Config, rng: Rng):
        gateway, cache = config.gateway, config.cache_registry
        strategy = gateway.strategy
        self.rng = rng
        self.deterministic = gateway.deterministic
        self.default_mode: Mode | None = gateway.default_mode
        self.strategy = strategy if isinstance(strategy, Strategy) else Strategy(name=strategy)
        self.recipes: dict[Role, Recipe] = {}
        self.own_recipes: dict[Role, Recipe] = {}
        """Of the host: they stay whatever the strategy."""
        self.modes: dict[str, Mode] = {}
        """Model -> mode of requests that leave it open; `modes_version` says of which table."""
        self.modes_version = -1
        self.turns = dict.fromkeys(ROLES, -1)
        """Per role, the slot that round robin picked last."""
        self.table = PodTable(cache.max_pods)
        self.ledger = Ledger(self.table)
        self.rates = PrefillRates(cache.max_pods)
        self.health = HealthTable(cache.max_pods, config.health, cache.stale_ttl_ms / 1e3)
        ttl_s = config.sessions.ttl_ms / 1e3
        self.sessions = Sessions(self.table, config.sessions.max_sessions, ttl_s)
        self.pins = Pins(self.table, config.sessions.max_sessions, ttl_s)
        self.caching = cache.enabled
        """Whether anything is remembered of what pods cache."""
        self.preparer = Preparer(
            gateway.tokenizer, gateway.block_size, cache.enabled, cache.token_block_size
        )
        self.registry = PrefixRegistry(cache.max_pods, cache.shards_count)
        self.kv_capacity_tokens = cache.kv_capacity_tokens
