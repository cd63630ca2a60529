"""The programs that compare proxies, as far as it goes without running any."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def harness() -> Iterator[None]:
    """The benchmarks' folder, as when one of its programs is started."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def slice_of(case: str, contender: str, repeat: int = 0, **figures: float) -> Any:
    """A slice whose load has these figures, and is whole."""
    from harness.compare import Slice
    from harness.tools import ANSWER_BYTES, Load

    plain = {field.name: 1 for field in msgspec.structs.fields(Load)}
    plain |= {"errs": 0, "bad": 0, "stream": 0, "other": 0, "body_bytes": ANSWER_BYTES}
    return Slice(case, contender, repeat, 1, msgspec.convert(plain | figures, Load))


def test_every_bar_is_of_something_that_is_measured() -> None:
    """A bar names a case, and a contender that can hand KV on as the case wants it."""
    from harness import contenders as who
    from harness.cases import BARS, CASES, SHORT_LIST

    cases = {case.name: case for case in CASES}
    pairs = {who.ROUND_ROBIN_PAIRS: who.NIXL, who.CACHE_AWARE_PAIRS: who.NIXL}
    pairs |= {who.SMG_PAIRS: who.SGLANG, who.SGLANG_ROUTER_PAIRS: who.SGLANG}
    assert {bar.peer for bar in BARS} <= set(who.ALL)
    for bar in BARS:
        assert cases[bar.case].handoff == pairs.get(bar.peer, who.UNIFIED)
    assert {case.of for case in CASES if case.of} | set(SHORT_LIST) <= set(cases)


def test_a_case_may_be_another_figure_of_the_same_slices() -> None:
    """The 99th percentile is compared from the slices that the median is taken from."""
    from harness.compare import ratios, summarise

    taken = [slice_of("latency", "calinix", p50=100, p99=400)]
    taken += [slice_of("latency", "smg cache_aware", p50=200, p99=500)]
    found = {(one.case, one.peer): one for one in ratios(taken)}
    assert found["latency", "smg cache_aware"].ratio.median == 0.5
    assert found["latency-p99", "smg cache_aware"].ratio.median == 0.8
    assert found["latency-p99", "smg cache_aware"].holds
    assert [one.value.median for one in summarise(taken)] == [100, 200, 400, 500]


def test_the_highest_rate_is_of_whole_answers() -> None:
    """Streams and paced loads are no measure of it; the core's use stands beside it."""
    from harness.compare import max_rates

    taken = [slice_of("chat-200", "nginx", at, rps=rps, util=0.98) for at, rps in enumerate((4, 2))]
    taken += [slice_of("latency", "nginx"), slice_of("stream", "nginx", stream=1)]
    (one,) = max_rates(taken)
    rate = one.requests_per_s
    assert (one.case, rate.median, rate.min, rate.max, one.core_used) == ("chat-200", 3, 2, 4, 0.98)


@pytest.mark.parametrize(("shift", "agrees"), [(0.002, True), (0.02, False)])
def test_shares_agree_within_their_errors(shift: float, agrees: bool) -> None:
    """A share may lie as far apart as single seconds of one contender do, and no further."""
    from harness.power_of_two import SERVICE_US, _shares, judge

    def shares(name: str, more: float) -> Any:
        base = 1 / len(SERVICE_US)
        windows = [[base + more + wave] + [base] * 7 for wave in (0.004, -0.004, 0.002, -0.002)]
        loads = [slice_of("", name, p50=8000, p99=32000).load]
        contender: Any = SimpleNamespace(name=name)
        return _shares(contender, windows, loads)

    found = judge([*shares("calinix", 0.0), *shares("another", shift)])
    assert [one.holds for one in found] == [agrees, True, True]


@pytest.mark.parametrize(("other", "verdict"), [(0.1, False), (0.9, None)])
def test_slow_answers_on_a_noisy_machine_judge_nobody(other: float, verdict: bool | None) -> None:
    """A latency that is far off is a fault, but where the machine was busy it is no finding."""
    from harness.power_of_two import _shares, judge

    def shares(name: str, p50: float) -> Any:
        loads = [slice_of("", name, p50=p50, p99=32000, other=other).load]
        contender: Any = SimpleNamespace(name=name)
        return _shares(contender, [[0.125] * 8] * 3, loads)

    found = judge([*shares("calinix", 9000), *shares("another", 8000)])
    assert [one.holds for one in found] == [True, verdict, True]


@pytest.mark.parametrize("handoff", ["", "nixl", "sglang"])
def test_the_measured_gateway_starts_from_a_valid_file(handoff: str, tmp_path: Path) -> None:
    """What Calinix is measured with is a configuration, whichever way KV is handed on."""
    from calinix.config import load_config
    from harness.contenders import calinix_contender, new_setup

    setup = new_setup([1, 2, 3, 4], tmp_path, handoff)
    calinix_contender("calinix").command(setup)
    config = load_config(tmp_path / "config.yaml")
    groups = config.upstreams
    if handoff:
        assert groups.dispatch is not None
        assert groups.dispatch.protocol == handoff
        assert [len(side.pods) for side in (groups.dispatch.prefill, groups.dispatch.decode)] == [
            2,
            2,
        ]
    else:
        assert groups.single is not None
        assert len(groups.single.pods) == 4
