"""docs/strategies.md: its tables are those of the last run, and it speaks of every strategy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import kit
from calinix.config import Predictive, StrategyName

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "strategies.md").read_text("utf-8")


def renderer() -> Any:
    """docs/render_strategies.py, which is a program and no part of a package."""
    return kit.program(ROOT / "docs" / "render_strategies.py")


def test_the_tables_are_the_figures_of_the_last_run() -> None:
    """The page is what `docs/render_strategies.py` makes of benchmarks/results/policies.json."""
    results = json.loads(
        (ROOT / "benchmarks" / "results" / "policies.json").read_text("utf-8"),
    )
    assert renderer().render(PAGE, results) == PAGE


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    """A marker that was lost is an error, not a table that is no longer renewed."""
    results = json.loads(
        (ROOT / "benchmarks" / "results" / "policies.json").read_text("utf-8"),
    )
    with pytest.raises(ValueError, match="bars"):
        renderer().render(PAGE.replace("<!-- /bars -->", ""), results)


def test_every_strategy_is_described() -> None:
    """Each has its line in the first table, and each key of the default one its own."""
    lines = re.findall(r"^\| `(\w+)` \|", PAGE.partition("## See it decide")[0], re.MULTILINE)
    assert sorted(lines) == sorted(get_args(StrategyName))
    for field in Predictive.__struct_encode_fields__:
        assert f"| `predictive.{field}` |" in PAGE
