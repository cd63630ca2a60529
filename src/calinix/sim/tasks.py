"""One run as people ask for it: a strategy, a seed, and what is changed of the scenario."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Annotated, Any, cast

import msgspec
import msgspec.inspect as mi
import yaml

from calinix.config import Config
from calinix.config.near import nearest, paths_of_keys
from calinix.config.source import compose
from calinix.config.walk import Walker
from calinix.sim.baselines import BASELINES
from calinix.sim.fleet_config import config_of, converted, merged
from calinix.sim.scenarios import SCENARIOS, Scenario
from calinix.sim.workload import SimRequest, Workload


class Task(msgspec.Struct, frozen=True):
    """One run."""

    scenario: str
    strategy: str
    """A strategy or a baseline; behind a colon settings of its own: see `parsed`."""
    seed: int
    load: float | None = None
    pods: int | None = None
    changes: str = ""
    """Settings of all runs."""


class Changes(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """What a run may change of its scenario, by settings whose keys begin with `scenario`."""

    requests: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Only so many, the first."""
    noise: Annotated[float, msgspec.Meta(ge=0)] | None = None
    streamed_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    gateways: Annotated[int, msgspec.Meta(ge=1, le=256)] | None = None
    sync_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    late_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    speeds: tuple[Annotated[float, msgspec.Meta(ge=0.001)], ...] | None = None
    """Of the pods of each group, repeated."""


class FirstOf(msgspec.Struct, frozen=True):
    """The first requests of a workload, and what follows them."""

    workload: Workload
    most: int

    @property
    def block_tokens(self) -> int:
        """As the workload's."""
        return self.workload.block_tokens

    @property
    def requests(self) -> int:
        """As many as there are."""
        return min(self.most, self.workload.requests)

    def arrivals(self, rng: random.Random, load: float) -> Iterator[SimRequest]:
        """The first of the workload's."""
        return itertools.islice(self.workload.arrivals(rng, load), self.most)


def parsed(text: str) -> dict[str, Any]:
    """`KEY=VALUE;KEY=VALUE` as a configuration; keys as in the YAML file, with dots.

    Raises ValueError.
    """
    settings: dict[str, Any] = {}
    for one in filter(None, (part.strip() for part in text.split(";"))):
        path, found, said = one.partition("=")
        if not found or not path.strip():
            raise ValueError(f"{one!r} is not KEY=VALUE")
        try:
            value: Any = yaml.safe_load(said)
        except yaml.YAMLError:
            raise ValueError(f"{one!r}: {said!r} is no value") from None
        for key in reversed(path.strip().split(".")):
            value = {key: value}
        settings = merged(settings, value)
    return settings


def named(task: Task) -> tuple[str, Scenario]:
    """The strategy's name and the scenario with all that was changed of it. Raises ValueError."""
    name, _, own = task.strategy.partition(":")
    settings = merged(parsed(task.changes), parsed(own))
    _name_no_strategy(settings)
    scenario = SCENARIOS[task.scenario]
    scenario_says = settings.pop("scenario", {})
    try:
        changes = msgspec.convert(scenario_says, Changes)
    except msgspec.ValidationError as error:
        raise ValueError(_said(error, Changes, scenario_says, "scenario.")) from error
    fields = {
        field: value
        for field in ("noise", "streamed_share", "gateways", "sync_s", "late_s")
        if (value := getattr(changes, field)) is not None
    }
    replace = msgspec.structs.replace
    if changes.requests is not None:
        fields["workload"] = FirstOf(scenario.workload, changes.requests)
    if changes.speeds:
        speeds = changes.speeds
        fields["groups"] = tuple(replace(group, speeds=speeds) for group in scenario.groups)
    return name.strip(), replace(scenario, settings=merged(scenario.settings, settings), **fields)


def _name_no_strategy(settings: dict[str, Any]) -> None:
    """Raises ValueError where settings put another strategy in the place of the one that is run."""
    gateway = settings.get("gateway")
    key, name = "gateway.strategy", gateway.get("strategy") if isinstance(gateway, dict) else None
    if isinstance(name, dict):
        key, name = f"{key}.name", name.get("name")
    if name is not None:
        raise ValueError(f"{key} is not to be set here; write --strategy {name}")


def check(task: Task) -> None:
    """Raises ValueError, with what is wrong, for a task that cannot run."""
    name, scenario = named(task)
    known = "leastLoad" if name in BASELINES else name
    config = config_of(scenario.pods(task.pods), known, 16, scenario.settings)
    try:
        converted(config)
    except msgspec.ValidationError as error:
        raise ValueError(_said(error, Config, config)) from error


def _said(error: msgspec.ValidationError, kind: type[Any], tree: Any, prefix: str = "") -> str:
    """What is wrong, in the words that are used of a file: which key, and what is expected there.

    `tree` is what was no `kind`. Of a key that is not known, which one was probably meant.
    """
    found = re.search(r"unknown field `([^`]*)`", str(error))
    if found is None:
        walker = Walker(cast("mi.StructType", mi.type_info(kind)), {})
        walker.walk(compose(yaml.safe_dump(tree)))
        wrong = [f"{prefix}{one.path}: {one.text}" for one in walker.problems]
        return "; ".join(wrong) or f"{prefix}{error}"
    paths = {one: f"scenario.{one}" for one in Changes.__struct_encode_fields__}
    for key, places in paths_of_keys(cast("mi.StructType", mi.type_info(Config))).items():
        paths.setdefault(key, places[0])
    near = nearest(found[1], paths)
    hint = f"; did you mean {paths[near]!r}?" if near else ""
    return f"unknown key {prefix + found[1]!r}{hint}"
