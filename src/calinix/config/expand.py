"""The whole effective configuration as text: defaults filled in, secrets masked."""

from __future__ import annotations

import msgspec
import yaml

from calinix.config.fields import MASK, SECRET_KEYS, Mode
from calinix.config.policy import Strategy
from calinix.config.schema import Config
from calinix.config.tokens import text_key

BLOCK_SIZES = {"bytes": 128, "words": 32}


def effective(config: Config) -> Config:
    """The same configuration with everything said that it leaves open.

    These are the strategy's parameters, the block size and the default mode. Only the seed stays
    open: it is drawn at start.
    """
    gateway = config.gateway
    strategy = gateway.strategy
    single: Mode = "single" if config.upstreams.single is not None else "dispatch"
    return msgspec.structs.replace(
        config,
        gateway=msgspec.structs.replace(
            gateway,
            strategy=Strategy(name=strategy) if isinstance(strategy, str) else strategy,
            block_size=gateway.block_size or BLOCK_SIZES[text_key(gateway.tokenizer)],
            default_mode=gateway.default_mode or single,
        ),
    )


def expanded(config: Config) -> str:
    """The effective configuration as YAML; apart from its secrets it can be loaded again."""
    tree = msgspec.to_builtins(effective(config))
    ordered = {"version": tree.pop("version"), **tree}
    ordered["upstreams"] = ordered.pop("upstreams")
    return yaml.safe_dump(
        _shown(ordered), sort_keys=False, allow_unicode=True, width=100, default_flow_style=False
    )


def _shown(node: object) -> object:
    """Secrets masked; `model` left out, which `models` has taken up."""
    if isinstance(node, dict):
        return {
            key: _masked(value) if key in SECRET_KEYS else _shown(value)
            for key, value in node.items()
            if key != "model"
        }
    if isinstance(node, list | tuple):
        return [_shown(item) for item in node]
    return node


def _masked(value: object) -> object:
    if isinstance(value, list | tuple):
        return [MASK for _ in value]
    return MASK if value else value
