"""The configuration: one schema, one path from the YAML file to frozen structs.

schema.py, policy.py and upstreams.py hold the keys; load.py reads a file and tells all its
problems at once; expand.py and describe.py turn the result and the schema back into text for
people and machines.
"""

from calinix.config.describe import json_schema
from calinix.config.expand import BLOCK_SIZES, effective, expanded
from calinix.config.fields import Mode
from calinix.config.kv_events import KvEvents, PodKvEvents
from calinix.config.load import load_config, parse_config
from calinix.config.policy import (
    Controller,
    Imbalance,
    Predictive,
    Strategy,
    StrategyName,
    Weights,
)
from calinix.config.schema import (
    Admin,
    CacheRegistry,
    Config,
    Gateway,
    Health,
    Limits,
    Log,
    Passive,
    ServerTls,
    Sessions,
    Timeouts,
    Waiting,
)
from calinix.config.scrape import Scrape
from calinix.config.upstreams import (
    ClientTls,
    DispatchUpstream,
    Labels,
    PodConfig,
    PodGroup,
    SingleUpstream,
    Upstreams,
)

__all__ = [
    "BLOCK_SIZES",
    "Admin",
    "CacheRegistry",
    "ClientTls",
    "Config",
    "Controller",
    "DispatchUpstream",
    "Gateway",
    "Health",
    "Imbalance",
    "KvEvents",
    "Labels",
    "Limits",
    "Log",
    "Mode",
    "Passive",
    "PodConfig",
    "PodGroup",
    "PodKvEvents",
    "Predictive",
    "Scrape",
    "ServerTls",
    "Sessions",
    "SingleUpstream",
    "Strategy",
    "StrategyName",
    "Timeouts",
    "Upstreams",
    "Waiting",
    "Weights",
    "effective",
    "expanded",
    "json_schema",
    "load_config",
    "parse_config",
]
