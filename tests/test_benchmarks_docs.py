"""docs/benchmarks.md: its tables and pictures are those of the files in benchmarks/results."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kit

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "benchmarks.md").read_text("utf-8")


@pytest.fixture(scope="module")
def program() -> Any:
    """docs/render_benchmarks.py, which is a program and no part of a package."""
    return kit.program(ROOT / "docs" / "render_benchmarks.py")


def test_the_page_is_what_was_measured(program: Any) -> None:
    """The page is what `docs/render_benchmarks.py` makes of the files that are there."""
    assert program.render(PAGE, program.load(program.RESULTS)) == PAGE


def test_the_pictures_are_what_was_measured(program: Any) -> None:
    """Every picture that the page shows is drawn from the files, and no other one lies there."""
    results = program.load(program.RESULTS)
    drawn: dict[str, str] = {}
    for section in program.SECTIONS:
        drawn |= program.pictures(section, results)
    folder = ROOT / "docs" / "benchmarks"
    assert {path.name: path.read_text("utf-8") for path in folder.iterdir()} == drawn
    assert set(re.findall(r"\]\(benchmarks/([\w-]+\.svg)\)", PAGE)) == set(drawn)


def test_a_file_that_is_not_there_is_one_honest_line(program: Any) -> None:
    """A section without its file says which file is missing, and what makes it."""
    page = program.render(PAGE, {})
    for name in set(program.HOW) - {"engine_nixl"}:
        assert page.count(f"there is no `{name}.json`") == 1
    assert "](benchmarks/" not in page


def test_a_page_without_a_place_for_a_section_is_refused(program: Any) -> None:
    """A marker that was lost is an error, not a section that is no longer renewed."""
    with pytest.raises(ValueError, match="storm"):
        program.render(PAGE.replace("<!-- /storm -->", ""), {})


def test_whatever_contenders_and_cases_there_are_is_shown(program: Any) -> None:
    """Other contenders under other cases get tables of their own; bars, rates and sizes follow."""
    one = {"median": 2.0, "min": 1.0, "max": 3.0}
    named = {"chat": ["calinix", "nginx"], "pairs": ["calinix", "smg"]}
    found = program.load(program.RESULTS)
    peers = {
        "machine": found["peers"]["machine"],
        "quick": True,
        "plan": {"cases": [{"name": case, "what": f"load of {case}"} for case in named]},
        "contenders": [{"name": "smg", "version": "9.9", "how": "its defaults"}],
        "summaries": [
            {"case": case, "contender": name, "value": one, "unit": "CPU us/request"}
            for case, names in named.items()
            for name in [*names, "direct"]
        ],
        "ratios": [
            {"case": case, "peer": names[1], "ratio": one, "limit": 1.5, "holds": False,
             "noisy": True}
            for case, names in named.items()
        ],
        "max_rate": [
            {"case": "chat", "contender": "smg", "requestsPerS": one, "coreUsed": 0.97}
        ],
        "cold_start": [{"contender": "smg", "seconds": one, "starts": 5}],
        "memory": [{"contender": "smg", "idleMb": 50.0, "afterMb": 77.0, "requests": 100_000}],
        "findings": [{"what": "shares", "figure": "3", "limit": "4", "holds": None}],
    }  # fmt: skip
    section = program.side_by_side("peers")({"peers": peers})
    for said in (
        "|  | unit | calinix | nginx |", "|  | unit | calinix | smg |", "load of pairs",
        "| pairs | smg | 2.00 | <= 1.5 | **no**, but noisy |", "not for quoting", "97%", "100,000",
        "2.00 (1.00-3.00)", "too noisy to tell",
    ):  # fmt: skip
        assert said in section
    assert "direct" not in section
    assert "| smg | 9.9 | its defaults |" in program.setting({"peers": peers})


def test_the_program_writes_a_page_of_other_results(tmp_path: Path, program: Any) -> None:
    """With --results and --out it makes a page of one's own run, pictures beside it."""
    shutil.copy(program.RESULTS / "seed.json", tmp_path)
    out = tmp_path / "mine.md"
    command = [sys.executable, str(ROOT / "docs" / "render_benchmarks.py")]
    command += ["--results", str(tmp_path), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"written: {out}\n"
    page = out.read_text("utf-8")
    assert "hot prefix, predictive: Jain" in page
    assert "](mine/decisions.svg)" in page
    assert (tmp_path / "mine" / "decisions.svg").exists()
