"""`calinix simulate`: its figures, its files, and that equal seeds give equal bytes."""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from calinix import __version__
from calinix.cli import app
from calinix.sim import batch
from calinix.sim.baselines import BASELINES
from calinix.sim.batch import RunError, run_all
from calinix.sim.measures import Row
from calinix.sim.scenarios import SCENARIOS
from calinix.sim.tasks import Task, check, named, parsed

SMALL = ("seed-2p2d", "--set", "scenario.requests=150")
NAMES = {
    "seed-2p2d", "mooncake-conversation", "mooncake-synthetic", "azure-conversation", "hot-prefix",
    "sequential-agents", "slow-pod", "pod-loss", "stale-state", "many-gateways",
    "heterogeneous-4p4d",
}  # fmt: skip


class Balance(HTMLParser):
    """What is open; every end must be that of the last beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """One more is open."""
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Opened and closed at once."""

    def handle_endtag(self, tag: str) -> None:
        """The last one is closed."""
        assert self.open.pop() == tag


def simulate(*arguments: str | Path) -> Result:
    """The command in this process; so is what it runs, unless asked otherwise."""
    if "--processes" not in arguments:
        arguments = (*arguments, "--processes", "1")
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "200"})


def figures(path: Path) -> Any:
    """What a file of figures holds."""
    return json.loads(path.read_bytes())


def test_the_figures_have_the_agreed_shape(tmp_path: Path) -> None:
    """Scenario, version, configuration and one row per strategy and seed; nothing else."""
    out = tmp_path / "figures.json"
    strategies = "powerOfTwo,smgCacheAware"
    result = simulate(*SMALL, "--strategy", strategies, "--seeds", "2", "--json", out)
    assert result.exit_code == 0, result.output
    found = figures(out)
    assert list(found) == ["scenario", "version", "config", "rows"]
    assert (found["scenario"], found["version"]) == ("seed-2p2d", __version__)
    assert found["config"]["seeds"] == [1, 2]
    assert found["config"]["gateway"]["upstreams"]["dispatch"]
    assert [(row["strategy"], row["seed"]) for row in found["rows"]] == [
        (strategy, seed) for strategy in strategies.split(",") for seed in (1, 2)
    ]
    assert all(row["requests"] == 150 and row["ttft_mean_s"] > 0 for row in found["rows"])
    assert "powerOfTwo" in result.output
    assert "150 requests, load 1, mean of 2 seeds" in result.output


def test_equal_seeds_give_equal_bytes_on_any_number_of_processes(tmp_path: Path) -> None:
    """One process or several, in whatever order they end: the files are the same."""
    arguments = (*SMALL, "--strategy", "powerOfTwo,predictive,dynamoCost", "--seeds", "2")
    files = []
    for number, processes in enumerate(("1", "2")):
        out = tmp_path / str(number)
        result = simulate(*arguments, "--processes", processes, "--out", out)
        assert result.exit_code == 0, result.output
        files.append([(out / name).read_bytes() for name in ("results.json", "report.html")])
    assert files[0] == files[1]
    rows = figures(tmp_path / "0" / "results.json")["rows"]
    assert rows[0]["ttft_mean_s"] != rows[1]["ttft_mean_s"]


def test_the_report_needs_nothing_from_outside(tmp_path: Path) -> None:
    """One file with every picture in it, and every picture's numbers in results.json."""
    result = simulate(*SMALL, "--strategy", "weightedRoundRobin,powerOfTwo", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"(src|href)\s*=|url\(|@import|<script", page)
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    titles = re.findall(r'class="t"[^>]*>([^<]+)<', page)
    for wanted in (
        "Time to first token", "Time per output token", "End to end", "Throughput", "Output",
        "Prefix hit ratio", "Balance (Jain's index)".replace("'", "&#x27;"),
        "Queue of prefill pods, weightedRoundRobin", "Weights of decode pods, weightedRoundRobin",
        "Queue of decode pods, powerOfTwo", "Work per pod, powerOfTwo",
    ):  # fmt: skip
        assert wanted in titles
    files = list((tmp_path / "pictures").iterdir())
    assert len(files) == len(titles)
    assert tmp_path / "pictures" / "weights-decode-weightedRoundRobin.svg" in files
    found = figures(tmp_path / "results.json")
    assert [one["strategy"] for one in found["figures"]] == ["weightedRoundRobin", "powerOfTwo"]
    series = found["figures"][0]["series"]
    assert len(series["ttft_s"]) == len(series["shares"])
    assert series["forecasts"]
    assert max(weight or 0 for row in series["weights"] for weight in row) > 1.0


def test_every_scenario_is_described() -> None:
    """`--list` shows each by its name, and there are at least the agreed ones."""
    result = simulate("--list")
    assert result.exit_code == 0
    assert set(SCENARIOS) >= NAMES
    assert all(name in result.output for name in SCENARIOS)
    assert all(one.description.endswith(".") for one in SCENARIOS.values())


def test_the_page_names_every_scenario_and_baseline() -> None:
    """docs/simulation.md has a row for each, and shows the rows' keys."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "simulation.md").read_text("utf-8")
    rows = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    assert rows == {*SCENARIOS, *BASELINES}
    assert all(f'"{key}"' in page for key in Row.__struct_fields__)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no-such",), "mooncake-conversation"),
        ((), "one of seed-2p2d"),
        (("seed-2p2d", "--strategy", "best"), "weightedRoundRobin"),
        (("seed-2p2d", "--strategy", ","), "names no strategy"),
        (("seed-2p2d", "--set", "gateway.retries=7"), "retries"),
        (("seed-2p2d", "--set", "scenario.gatways=2"), "scenario.gateways"),
        (("seed-2p2d", "--set", "controller.stepms=250"), "controller.stepMs"),
        (("seed-2p2d", "--set", "noise=0.2"), "scenario.noise"),
        (("seed-2p2d", "--set", "gateway"), "is not KEY=VALUE"),
        (("seed-2p2d", "--set", "gateway.seed=[1"), "is no value"),
        (("seed-2p2d", "--strategy", "random:nothing=1"), "nothing"),
        (("seed-2p2d", "--load", "inf"), "--load"),
    ],
)
def test_what_is_not_understood_is_refused(arguments: tuple[str, ...], said: str) -> None:
    """Before anything runs, in words that help."""
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert said in re.sub(r"[\s│]+", " ", result.output)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    """A file where a folder should be: a line, not a traceback."""
    (tmp_path / "file").write_text("")
    result = simulate(*SMALL, "--strategy", "random", "--out", tmp_path / "file")
    assert result.exit_code == 1
    assert "cannot write" in result.output


def test_all_is_every_strategy_and_baseline(tmp_path: Path) -> None:
    """One word for all of them, and each runs on a scenario with prefill and decode apart."""
    out = tmp_path / "figures.json"
    arguments = ("seed-2p2d", "--set", "scenario.requests=20", "--strategy", "all")
    result = simulate(*arguments, "--processes", "1", "--json", out)
    assert result.exit_code == 0, result.output
    names = {row["strategy"] for row in figures(out)["rows"]}
    assert names >= {"predictive", "weightedPowerOfTwo", "clairvoyant", "llmdDefault", "random"}


def test_settings_reach_the_scenario_and_the_gateway() -> None:
    """Those of all runs and those of one strategy, which go before them."""
    changes = "scenario.noise=0.2;scenario.gateways=4;scenario.speeds=[2, 1];controller.stepMs=250"
    task = Task("azure-conversation", "predictive:controller.stepMs=125;scenario.lateS=1", 1,
                changes=changes)  # fmt: skip
    name, scenario = named(task)
    assert name == "predictive"
    assert (scenario.noise, scenario.gateways, scenario.late_s) == (0.2, 4, 1.0)
    assert scenario.settings["controller"]["stepMs"] == 125
    speeds = [pod.figures.prefill_tokens_per_s for pod in scenario.pods(4)]
    assert speeds == [20_000.0, 10_000.0, 20_000.0, 10_000.0]
    check(task)


def test_the_row_is_of_the_strategy_that_ran() -> None:
    """Settings below gateway.strategy are taken; another strategy in its place is not."""
    own = "gateway.strategy.predictive.crowding=1"
    _, scenario = named(Task("azure-conversation", "predictive", 1, changes=own))
    assert scenario.settings["gateway"]["strategy"] == {"predictive": {"crowding": 1}}
    for task in (
        Task("azure-conversation", "predictive", 1, changes="gateway.strategy=leastLoad"),
        Task("azure-conversation", "predictive:gateway.strategy.name=leastLoad", 1),
    ):
        with pytest.raises(ValueError, match="write --strategy leastLoad"):
            named(task)
    result = simulate(*SMALL, "--strategy", "predictive", "--set", "gateway.strategy=leastLoad")
    assert result.exit_code == 2
    assert "write --strategy leastLoad" in re.sub(r"[\s│]+", " ", result.output)


def test_settings_are_as_in_the_file() -> None:
    """Dotted keys, YAML values."""
    assert parsed("a.b=1; a.c=[x, true];d=text") == {"a": {"b": 1, "c": ["x", True]}, "d": "text"}
    assert parsed("") == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("controller.stepMs=soon", r"^controller\.stepMs: expected an integer .*, found 'soon'"),
        (
            "controller.stepMs=1",
            r"^controller\.stepMs: expected an integer from 50 to 60000, found 1$",
        ),
        ("gateway.strategy=leastLoad", r"^gateway\.strategy is .* --strategy leastLoad$"),
        ("gateway.strategy.name=best", r"^gateway\.strategy\.name is .* --strategy best$"),
        ("gateway={strategy: {name: random}}", r"^gateway\.strategy\.name is not to be set here"),
        (
            "gateway.strategy.predictive.crowding=-1",
            r"^gateway\.strategy\.predictive\.crowding: expected a number .*, found -1",
        ),
        ("gateway.limits=7", r"^gateway\.limits: expected "),
        ("scenario.noise=much", r"^scenario\.noise: expected a number .*, found 'much'"),
        ("scenario.speeds=[2, 0]", r"^scenario\.speeds\[1\]: expected a number .*, found 0$"),
        ("scenario=7", r"scenario"),
        ("scenario.nose=1", r"^unknown key 'scenario\.nose'; did you mean 'scenario\.noise'\?$"),
    ],
)
def test_wrong_values_are_told_as_in_a_file(changes: str, said: str) -> None:
    """The key in full, what is expected there, and what was found."""
    with pytest.raises(ValueError, match=said):
        check(Task("azure-conversation", "predictive", 1, changes=changes))


def test_progress_grows_to_its_end() -> None:
    """The share never shrinks, and ends at 1 with all runs done."""
    tasks = [Task("seed-2p2d", "random", seed, changes="scenario.requests=50") for seed in (1, 2)]
    heard: list[tuple[float, int]] = []
    for processes in (1, 2):
        heard.clear()
        assert len(run_all(tasks, lambda *now: heard.append(now), processes)) == 2
        assert heard == sorted(heard)
        assert heard[-1] == (1.0, 2)


def test_a_run_that_fails_ends_the_others() -> None:
    """A process that ends before its run is told by the run's name, and nothing goes on."""
    tasks = [Task("seed-2p2d", name, 1, changes="scenario.requests=5") for name in ("random", "no")]
    with pytest.raises(RunError, match=r"the run of no with seed 1 broke off: .* exit code 1"):
        run_all(tasks, processes=2)
    assert not multiprocessing.active_children()


def test_runs_that_hang_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of which nothing is heard are ended, in words; `simulate` says them and ends."""
    monkeypatch.setattr(batch, "_serve", _hang)
    monkeypatch.setattr(batch, "STILL_S", 0.2)
    result = simulate(*SMALL, "--strategy", "random,roundRobin", "--processes", "2")
    assert result.exit_code == 1
    assert "nothing was heard of the runs for 0.2 s" in result.output
    assert "Traceback" not in result.output
    assert not multiprocessing.active_children()


def _hang(pipe: object) -> None:
    threading.Event().wait(60.0)
