"""An engine's own figures out of its /metrics: vLLM's as recorded, SGLang's by its names."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calinix.engines.stats import MAX_LINE_BYTES, EngineStats, StatsReader, read_stats

PAGE = (
    (Path(__file__).parent.parent / "data" / "samples" / "metrics.http")
    .read_bytes()
    .partition(b"\r\n\r\n")[2]
)
RECORDED = EngineStats(
    engine="vllm",
    running=0,
    waiting=0,
    kv_usage=0.0,
    block_size=32,
    capacity_tokens=1280,
    started_s=1796019061.57,
)
SGLANG = b"""# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",pp_rank="0"} 3.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="1",pp_rank="0"} 3.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs_total{model_name="m",tp_rank="0"} 99.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 161721.0
sglang:max_total_num_tokens{model_name="m",tp_rank="1"} 161721.0
sglang:page_size{model_name="m"} 64.0
"""
RANKS = b"""vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="300"} 1.0
"""


def test_a_recorded_page_of_vllm() -> None:
    """Every figure of a real pod's page, 58 KB of which seven lines matter."""
    assert read_stats(PAGE) == RECORDED


def test_sglang_and_its_tensor_parallel_ranks() -> None:
    """What several processes of one rank say is counted once; longer names are others."""
    assert read_stats(SGLANG) == EngineStats("sglang", 3, 2, 0.25, 64, 161721, None)


def test_data_parallel_ranks_are_summed() -> None:
    """Requests and caches add up; the use is that of both caches together."""
    assert read_stats(RANKS) == EngineStats("vllm", 7, 0, 0.625, 16, 6400, None)


def test_the_size_in_tokens_goes_before_blocks() -> None:
    """Newer versions state it; blocks that are not known yet give none."""
    line = (
        b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="%b",num_gpu_blocks="%b"} 1\n'
    )
    assert read_stats(line % (b"1000", b"100")).capacity_tokens == 1000
    assert read_stats(line % (b"None", b"100")).capacity_tokens == 1600
    assert read_stats(line % (b"None", b"None")).capacity_tokens is None


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"\n\n",
        b"<html>vllm:num_requests_running 1</html>",
        b"vllm:num_requests_running{",
        b"vllm:num_requests_running ",
        b'vllm:num_requests_running{engine="0"} NaN\n',
        b"vllm:num_requests_running -1\n",
        b"vllm:num_requests_running 1e300\n",
        b'vllm:cache_config_info{block_size="x",num_gpu_blocks="1e9999"} 1.0\n',
        b'vllm:cache_config_info{block_size="0",num_gpu_blocks="7"} 1.0\n',
    ],
)
def test_what_makes_no_sense_is_not_said(page: bytes) -> None:
    """No figure is made of it, and nothing is raised."""
    stats = read_stats(page)
    assert (stats.running, stats.capacity_tokens, stats.started_s) == (None, None, None)


@given(places=st.lists(st.integers(0, len(PAGE)), max_size=20))
def test_the_page_may_come_in_any_pieces(places: list[int]) -> None:
    """Wherever the bytes are cut, the figures are the same."""
    reader = StatsReader()
    bounds = [0, *sorted(places), len(PAGE)]
    for start, end in itertools.pairwise(bounds):
        reader.feed(PAGE[start:end])
    assert reader.stats() == RECORDED


@given(st.binary(max_size=300), st.integers(0, len(RANKS)))
def test_damaged_pages_raise_nothing(noise: bytes, place: int) -> None:
    """Bytes in the middle of a page may lose figures, never more."""
    stats = read_stats(RANKS[:place] + noise + RANKS[place:])
    assert stats.kv_usage is None or 0.0 <= stats.kv_usage <= 1.0


@pytest.mark.parametrize("run", [b"a", b'a="', b'a="\\"', b"a="])
def test_garbage_in_the_place_of_labels_costs_no_time(run: bytes) -> None:
    """A line as long as may be, of anything: read once through, not once for each of its bytes."""
    garbage = run * ((MAX_LINE_BYTES - 64) // len(run))
    page = b"vllm:num_requests_running{%b} 1\n" % garbage
    began = time.process_time()
    assert read_stats(page).engine == "vllm"
    assert time.process_time() - began < 1.0


def test_memory_is_bounded() -> None:
    """A line without an end is passed over, and what follows it is read."""
    reader = StatsReader()
    for _ in range(40):
        reader.feed(b"vllm:num_requests_running" + b"x" * MAX_LINE_BYTES)
        assert len(reader._rest) <= MAX_LINE_BYTES
    reader.feed(b" 5\nvllm:num_requests_waiting 6\n")
    stats = reader.stats()
    assert (stats.running, stats.waiting) == (None, 6)
