"""`calinix bench`: its scenarios measure what they say, and its command says what holds."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from calinix import cli_scenarios
from calinix.bench import bitmap, decision, fairness, index, staleness, suite
from calinix.bench.desk import INFLIGHT_PER_POD, Desk, bodies, stepping
from calinix.bench.results import Finding, at_least, at_most, is_noisy, quantile
from calinix.bench.setting import form_of, setting
from calinix.bench.suite import Result
from calinix.cli import app
from calinix.core.prompt import Endpoint, read_body
from calinix.sim.simulate import run


@pytest.mark.parametrize(("shape", "least", "most"), [("100 words", 550, 900), ("2 KB", 2000, 2400),
                                                       ("32 KB", 32_000, 34_000)])  # fmt: skip
def test_bodies_are_chats_of_their_size(shape: str, least: int, most: int) -> None:
    """Each is a whole chat request, of about the size that its name says."""
    for body in bodies(shape, random.Random(1), 4):
        assert least <= len(body) <= most
        assert read_body(Endpoint.CHAT, body).stream


def test_a_desk_gives_back_what_it_takes() -> None:
    """However much is decided, three requests a pod are inflight, and every plan is explained."""
    desk = Desk(4, "cacheAware", stepping(0.001))
    kept = list(bodies("100 words", random.Random(1), 60))
    for body in kept[:40]:
        desk.decide(body)
    assert desk.router.open_leases() == INFLIGHT_PER_POD * 4
    assert all(step > 0 for step in desk.steps(kept[-1]))
    assert len(desk.router.decisions.last(100)) == 41


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios of the same kind that take no time."""
    decision._requests.cache_clear()
    monkeypatch.setattr(decision, "OPERATIONS", 40)
    monkeypatch.setattr(decision, "WARM_UP", 10)
    monkeypatch.setattr(decision, "CALLERS", (1, 12, 128))
    monkeypatch.setattr(decision, "MANY_PODS", (256,))
    monkeypatch.setattr(index, "READS", 4)
    monkeypatch.setattr(index, "WRITES", 2)
    monkeypatch.setattr(index, "READERS", 8)
    monkeypatch.setattr(index, "WRITERS", 4)
    monkeypatch.setattr(bitmap, "OPERATIONS", 20)
    monkeypatch.setattr(fairness, "STRATEGIES", ("cacheOnly", "predictive"))
    monkeypatch.setattr(staleness, "STRATEGIES", ("leastLoad",))
    monkeypatch.setattr(staleness, "LAGS_MS", (0, 500))
    monkeypatch.setattr(suite, "DECIDING", {"cacheAware": ("100 words", "32 KB")})
    monkeypatch.setattr(suite, "QUICK", suite.Size(1, 1))


def test_callers_wait_for_one_another(small: None) -> None:
    """With n callers in one queue a decision takes about n times as long as it takes alone."""
    row = decision._level("cacheAware", "100 words", 16, 12, 2)
    assert row.callers == 12
    assert len(row.rounds_avg_us) == 2
    assert row.avg_us == min(row.rounds_avg_us)
    # What a decision takes by itself is what it takes all callers to be served once, over them.
    assert row.avg_us == pytest.approx(12e6 / row.per_s, rel=0.5)


def test_readers_and_writers_do_all_their_calls(small: None) -> None:
    """Every thread's every call is timed."""
    rows = {row.call: row for row in index.measure()}
    assert (rows["match"].calls, rows["store"].calls) == (8 * 4, 4 * 2)
    assert all(0 < row.p50_us <= row.p99_us <= row.max_us for row in rows.values())


def test_every_form_of_a_set_gives_the_same_answer() -> None:
    """Bitmap, bools, ints and array agree on who is in the intersection, and on how many."""
    picked = [random.Random(n).sample(range(bitmap.PODS), 128) for n in range(3)]
    answers = {work(*map(make, picked)) for make, work in bitmap.FORMS.values()}
    assert len(answers) == 1


def test_the_hot_prefix_is_as_hot_as_is_said() -> None:
    """Nine tenths of the requests begin with the same blocks; callers ask 1,000 times in all."""
    workload = fairness.HotPrefix()
    asked = list(workload.arrivals(random.Random(1), 1.0))
    assert len(asked) == fairness.CALLERS
    for one in asked:
        assert one.follow is not None
        following = one.follow(2.0)
        while following is not None:
            asked.append(following)
            assert following.follow is not None
            following = following.follow(2.0)
    shared = fairness.SHARED_TOKENS // fairness.BLOCK_TOKENS
    hot = [one.chain[:shared] for one in asked if one.chain[0] == 1]
    assert len(asked) == fairness.REQUESTS
    assert all(one == hot[0] for one in hot)
    assert len(hot) / len(asked) == pytest.approx(fairness.HOT_SHARE, abs=0.03)


def test_who_goes_by_caches_alone_serves_a_hot_prefix_from_one_pod() -> None:
    """cacheOnly: Jain's index of requests per pod is near that of nine tenths on one of 16."""
    row = fairness._row("cacheOnly", 1)
    assert row.jain == pytest.approx(1 / (16 * (0.90625**2 + 15 * 0.00625**2)), abs=0.01)
    assert row.hit_rate > 0.95


def test_leases_are_held_while_pods_serve() -> None:
    """As many requests are under way as there are callers, once all have begun."""
    asked = run(fairness.scenario(), "leastLoad", 1).requests
    ends_s = asked.arrival_s + asked.e2e_s
    at_s = float(np.median(asked.arrival_s))
    assert ((asked.arrival_s <= at_s) & (ends_s > at_s)).sum() == fairness.CALLERS


def test_late_load_misroutes(small: None) -> None:
    """The later the load is known, the more requests go where another pod would be quicker."""
    fresh, late = staleness.measure(1, lambda _: None)
    assert (fresh.lag_ms, late.lag_ms) == (0, 500)
    assert fresh.misrouted_ratio < late.misrouted_ratio
    assert fresh.lost_mean_s < late.lost_mean_s


def test_bars_that_are_missed_in_noise_prove_nothing() -> None:
    """A bar holds or not; where rounds differ much, one that is missed is undecided."""
    assert at_most("x", 11.0, 12.0, "us", doubtful=True).holds is True
    assert at_most("x", 13.0, 12.0, "us").holds is False
    assert at_most("x", 13.0, 12.0, "us", doubtful=True).holds is None
    assert at_least("x", 90_000.0, 80_000.0) == Finding("x", "90,000", ">= 80,000", True)
    assert is_noisy([10.0, 20.0, 30.0])
    assert not is_noisy([10.0, 12.0, 30.0])
    assert quantile([3, 1, 2], 0.99) == 3


def test_a_core_that_others_used_breaks_no_bar() -> None:
    """A bar that is missed while others had half of the core is undecided; else it is missed."""
    row = decision.CallersRow("100 words", 16, 1, 20.0, 11.0, 90.0, 45_000.0, 0.5, [20.0])
    half = decision.findings(decision.Decision("cacheAware", [row], []))
    whole = msgspec.structs.replace(row, cpu_ratio=1.0)
    assert [one.holds for one in half] == [None]
    found = decision.findings(decision.Decision("cacheAware", [whole], []))
    assert [one.holds for one in found] == [False]


def test_the_form_is_said() -> None:
    """Compiled, interpreted, or which part of it is which; and whether threads share a lock."""
    assert form_of(compiled_path=True, compiled_index=True) == "compiled"
    assert form_of(compiled_path=False, compiled_index=False) == "interpreted"
    assert form_of(compiled_path=False, compiled_index=True) == "interpreted, but for the index"
    assert setting().python.startswith("3.")


def test_the_command_runs_all_and_writes_what_it_found(small: None, tmp_path: Path) -> None:
    """Every scenario is shown with the seed's figures beside it; the JSON holds it all."""
    path = tmp_path / "seed.json"
    done = CliRunner().invoke(app, ["bench", "--quick", "--json", str(path)])
    assert done.exit_code == 0, done.output
    result = msgspec.json.decode(path.read_bytes(), type=Result)
    assert result.quick
    assert set(result.method) == set(suite.SCENARIOS)
    assert [row.callers for row in result.decision[0].callers[:3]] == [1, 12, 128]
    assert {one.what for one in result.findings} >= {
        "decision, 1 caller, avg",
        "decisions a second, 12 callers",
        "decision among 256 pods over 16 pods, 32 KB",
        "hot prefix, predictive: Jain",
    }
    for said in ("2,451", "0.076", "1.042", "< 70", result.machine.form.split(",")[0], "Quick"):
        assert said in done.output


def test_check_fails_where_a_bar_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `--check` makes a missed bar the command's failure."""

    def missed(*_: Any, **__: Any) -> Result:
        finding = Finding("a bar", "3", "<= 2", holds=False)
        return Result(machine=setting(), quick=True, method={}, findings=[finding])

    monkeypatch.setattr(cli_scenarios, "run_scenarios", missed)
    runner = CliRunner()
    told = runner.invoke(app, ["bench"])
    assert told.exit_code == 0
    assert "does not hold" in told.output
    assert runner.invoke(app, ["bench", "--check"]).exit_code == 1


def test_unknown_scenarios_are_named() -> None:
    """What is no scenario is refused before anything is run."""
    refused = CliRunner().invoke(app, ["bench", "--only", "decisions"])
    assert refused.exit_code == 2
    assert "decision" in refused.output
    assert CliRunner().invoke(app, ["bench", "--only", ","]).exit_code == 2
