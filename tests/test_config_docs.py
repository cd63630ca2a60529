"""The pages and the schema that are made of the configuration's structs are up to date."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

import kit
from calinix.config import (
    BLOCK_SIZES,
    Config,
    expanded,
    json_schema,
    load_config,
    parse_config,
)
from calinix.config.describe import field_docs, structs
from calinix.config.fields import Base
from calinix.core.prepare import BLOCK_UNITS
from calinix.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"


def renderer() -> Any:
    """docs/render_configuration.py, which is a program and no part of a package."""
    return kit.program(ROOT / "docs" / "render_configuration.py")


def leaves(node: object, path: str = "") -> set[str]:
    """Dotted paths of all values; what is in a list is told as `[]`."""
    if isinstance(node, dict):
        return {leaf for key, value in node.items() for leaf in leaves(value, f"{path}.{key}")}
    if isinstance(node, list) and node and isinstance(node[0], dict):
        return leaves(node[0], f"{path}[]")
    return {path.removeprefix(".")}


def test_the_page_is_up_to_date() -> None:
    """docs/configuration.md is what the structs give; `docs/render_configuration.py` renews it."""
    page = PAGE.read_text("utf-8")
    assert page == renderer().render(page)


def test_the_page_names_every_key() -> None:
    """Each key of the expanded example has a row in the page's tables."""
    rows = set(re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE))
    config = load_config(ROOT / "tests" / "data" / "config" / "good.yaml")
    missing = set()
    for leaf in leaves(yaml.safe_load(expanded(config))):
        pod = leaf.partition("pods[].")[2]
        weight = re.sub(r"^gateway\.strategy\.(single|prefill|decode)\.", "", leaf)
        if not rows & {leaf, pod, weight}:
            missing.add(leaf)
    assert not missing


def test_the_problems_on_the_page_are_true() -> None:
    """The file that the page's example of problems speaks of gives exactly those lines."""
    page = PAGE.read_text("utf-8")
    shown = re.search(r"\$ calinix check broken\.yaml\n(.*?)```", page, re.DOTALL)
    assert shown
    broken = (
        'gateway:\n  stratgy: leastLoad\n  port: "8080"\nupstreams:\n  single:\n    pods:\n'
        "      - {id: pod-1, url: http://10.0.0.11:8000}\n"
        "      - {id: pod-2, url: http://10.0.0.11:8000}\n"
    )
    with pytest.raises(ConfigError) as caught:
        parse_config(broken, "broken.yaml")
    assert caught.value.problems == shown[1].splitlines()


@pytest.mark.parametrize("struct", structs(), ids=lambda struct: struct.__name__)
def test_every_key_has_a_meaning(struct: type[Base]) -> None:
    """Every field of every struct has its docstring, a sentence on one line."""
    for name, text in field_docs(struct).items():
        assert text.endswith("."), f"{struct.__name__}.{name}: {text!r}"
    assert struct.__doc__


def test_the_schema_describes_every_key() -> None:
    """The JSON Schema is draft 2020-12, refuses unknown keys, and has a text at every key."""
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$ref"] == "#/$defs/Config"
    assert set(schema["$defs"]) == {struct.__name__ for struct in structs()}
    for definition in schema["$defs"].values():
        assert definition["additionalProperties"] is False
        assert all(key["description"] for key in definition["properties"].values())
    assert schema["$defs"]["Gateway"]["properties"]["port"]["maximum"] == 65535
    assert schema["$defs"]["PodConfig"]["properties"]["apiKey"]["anyOf"][0]["writeOnly"] is True


def test_the_schema_speaks_of_the_keys_of_the_file() -> None:
    """The schema's keys are those that the loader takes, camelCase, with the same defaults."""
    properties = json_schema()["$defs"]["CacheRegistry"]["properties"]
    shown = yaml.safe_load(expanded(parse_config(SMALL)))["cacheRegistry"]
    assert {key: value["default"] for key, value in properties.items()} == shown
    assert {field.encode_name for field in msgspec.structs.fields(Config)} == set(
        json_schema()["$defs"]["Config"]["properties"]
    )


def test_block_sizes_are_those_of_the_core() -> None:
    """The block size that is shown where the file names none is the one that routing uses."""
    assert BLOCK_SIZES == BLOCK_UNITS


SMALL = "upstreams: {single: {pods: [{id: p, url: 'http://p:1'}]}}\n"
