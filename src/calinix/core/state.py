"""All that routing knows, in a few tables: owned by the Router, read by the stages."""

from __future__ import annotations

from typing import Protocol

from calinix.config import Config, Mode, Strategy
from calinix.config.kv_events import say_blocks
from calinix.config.tokens import hf_path, text_key
from calinix.core.calibration import Calibration
from calinix.core.choice import Recipe
from calinix.core.columns import Values
from calinix.core.health import HealthTable
from calinix.core.kv import PrefixRegistry
from calinix.core.ledger import Ledger
from calinix.core.means import RequestMeans
from calinix.core.outlook import Answers, Outlook, ones
from calinix.core.pods import ROLES, PodTable, Role
from calinix.core.prepare import Preparer
from calinix.core.rates import PrefillRates
from calinix.core.replicas import Replicas
from calinix.core.sessions import Pins, Sessions
from calinix.core.transfers import Transfers


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
        dispatch = config.upstreams.dispatch
        self.prefill_threshold = 0 if dispatch is None else dispatch.prefill_threshold
        """Prompts with so few uncached tokens need no prefill pod; 0: all do."""
        self.whole_s = self.split_s = float("-inf")
        """When one of them last went whole, and when split, where that is decided by seconds."""
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
        self.means = RequestMeans()
        self.outlooks: dict[Role, Outlook] = {role: Outlook() for role in ROLES}
        self.answers: list[Answers | None] = [None] * cache.max_pods
        """By slot: what answers took; None: none since that was last asked for."""
        self.slowness = ones(cache.max_pods)
        """By slot: time per output token over what the pool's model says."""
        self.weights = ones(cache.max_pods)
        """By slot: the controllers' weights. Written by core/steering.py; likewise:"""
        self.blind_weights = ones(cache.max_pods)
        """For when the others' load is not known well enough to compare pods by it."""
        self.late_s = float("-inf")
        """From when on a step of the controllers is overdue."""
        self.owed: dict[Role, Values] = {}
        """Per role: what weighted turns still owe each slot."""
        self.replicas = Replicas(self.table)
        self.transfers = Transfers()
        self.calibration = Calibration(cache.max_pods, cache.calibrate)
        self.health = HealthTable(cache.max_pods, config.health, cache.stale_ttl_ms / 1e3)
        ttl_s = config.sessions.ttl_ms / 1e3
        self.sessions = Sessions(self.table, config.sessions.max_sessions, ttl_s)
        self.pins = Pins(self.table, config.sessions.max_sessions, ttl_s)
        self.caching = cache.enabled
        """Whether anything is remembered of what pods cache."""
        self.event_blocks = say_blocks(config.kv_events, gateway.tokenizer)
        """Whether KV events may say what pods cache."""
        self.events_bound = config.kv_events.bind is not None
        """Whether any pod may publish them."""
        self.preparer = Preparer(
            text_key(gateway.tokenizer),
            gateway.block_size,
            cache.enabled,
            cache.token_block_size,
            hf_path(gateway.tokenizer) is not None or self.event_blocks,
        )
        self.registry = PrefixRegistry(cache.max_pods, cache.shards_count)
        self.kv_capacity_tokens = cache.kv_capacity_tokens
