"""Telemetry: what is counted, under which labels, what is written; it never hinders a request."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from calinix import __version__
from calinix.config import Config, Log, StrategyName, parse_config
from calinix.core.events import Failure
from calinix.errors import ConfigError
from calinix.gateway.routes import RouteTable
from calinix.telemetry import (
    BATCH,
    Metrics,
    PodState,
    RequestLog,
    RequestRecord,
    Telemetry,
    configure_logging,
)
from calinix.telemetry.counters import (
    FAILURES,
    MAX_CACHED_KEYS,
    MAX_ENDPOINTS,
    STRATEGIES,
    Histogram,
    status_label,
)
from calinix.telemetry.request_log import MAX_BUFFERED_BYTES, PIPE_BYTES

OPERATIONS = Path(__file__).resolve().parent.parent / "docs" / "operations.md"


class Pod(msgspec.Struct, frozen=True):
    """A pod as the router tells of it."""

    id: str
    role: str = "single"
    inflight: int = 0
    healthy: bool = True
    draining: bool = False
    ejected: bool = False
    blocks: int = 0


class Pods:
    """A router that only knows its pods."""

    def __init__(self, *pods: Pod):
        self.list = list(pods)

    def pods(self) -> Sequence[PodState]:
        """All of them."""
        return self.list


def metrics(*pods: Pod) -> Metrics:
    """Metrics of a gateway with these pods."""
    return Metrics(Pods(*(pods or (Pod("a"), Pod("b")))), max_pods=256)


def record(**fields: object) -> RequestRecord:
    """A good streamed request to pod a, but for `fields`."""
    given_ = {
        "requestId": "r-1",
        "endpoint": "/v1/chat/completions",
        "mode": "single",
        "strategy": "cacheAware",
        "model": "m",
        "status": 200,
        "podId": "a",
        "receivedAt": 1.8e9,
        "e2eS": 1.0,
        **{re.sub(r"_(\w)", lambda m: m[1].upper(), k): v for k, v in fields.items()},
    }
    return msgspec.convert(given_, RequestRecord)


def samples(shown: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels) -> value of every sample of Calinix, read as Prometheus would."""
    families = text_string_to_metric_families(shown.exposition().decode())
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
        if s.name.startswith("calinix_")
    }


def value(shown: Metrics, name: str, **labels: str) -> float | None:
    """One sample, or None where there is none."""
    return samples(shown).get((name, tuple(sorted(labels.items()))))


def config(log: Log) -> Config:
    """A configuration with this log."""
    plain = parse_config("upstreams: {single: {pods: [{id: a, url: 'http://a:1'}]}}")
    return msgspec.structs.replace(plain, log=log)


# --- metrics -------------------------------------------------------------------------------------


def test_requests_are_counted_by_their_labels() -> None:
    """Mode, strategy, status and endpoint tell requests apart."""
    shown = metrics()
    for status in (200, 200, 503):
        shown.observe(record(status=status))
    shown.observe(record(endpoint="/v1/embeddings", mode="dispatch", strategy="random"))
    labels = {"mode": "single", "strategy": "cacheAware", "endpoint": "/v1/chat/completions"}
    assert value(shown, "calinix_requests_total", status="200", **labels) == 2
    assert value(shown, "calinix_requests_total", status="503", **labels) == 1
    other = {"mode": "dispatch", "strategy": "random", "endpoint": "/v1/embeddings"}
    assert value(shown, "calinix_requests_total", status="200", **other) == 1


def test_what_a_routed_request_adds_up_to() -> None:
    """Tokens, blocks, retries, disconnects and the four histograms take what the record says."""
    shown = metrics()
    shown.observe(
        record(
            ttft_s=0.3,
            itl_s=0.012,
            e2e_s=2.0,
            decision_s=3e-5,
            prompt_blocks=10,
            cached_blocks=4,
            predicted_cached_tokens=64.5,
            prompt_tokens=160,
            cached_tokens=48,
            output_tokens=70,
            retries=1,
            retry_reason="refused",
        )
    )
    shown.observe(record(status=499, error="client_left", e2e_s=9.0))
    expected = {
        "calinix_request_ttft_seconds_sum": 0.3,
        "calinix_inter_token_seconds_sum": 0.012,
        "calinix_request_e2e_seconds_sum": 2.0,
        "calinix_request_e2e_seconds_count": 1,
        "calinix_decision_seconds_sum": 3e-5,
        "calinix_prefix_lookups_total": 10,
        "calinix_prefix_hits_total": 4,
        "calinix_cached_tokens_predicted_total": 64.5,
        "calinix_cached_tokens_reported_total": 48,
        "calinix_prompt_tokens_total": 160,
        "calinix_output_tokens_total": 70,
        "calinix_client_disconnects_total": 1,
    }
    assert {name: value(shown, name) for name in expected} == expected
    assert value(shown, "calinix_retries_total", reason="refused") == 1
    assert value(shown, "calinix_pod_requests_total", pod_id="a", role="single") == 2


def test_refused_and_broken_requests_are_no_latencies() -> None:
    """A request that no pod took, or whose answer broke off, says nothing of answer times."""
    shown = metrics()
    shown.observe(record(pod_id="", status=503, decision_s=1e-5, prompt_blocks=9))
    shown.observe(record(error="broken"))
    shown.observe(record(status=404))
    assert value(shown, "calinix_request_e2e_seconds_count") == 0
    assert value(shown, "calinix_decision_seconds_count") == 0
    assert value(shown, "calinix_prefix_lookups_total") == 0


def test_both_pods_of_a_dispatch_are_counted() -> None:
    """A dispatched request counts for its prefill pod and its decode pod."""
    shown = metrics(Pod("a", "decode"), Pod("b", "prefill"))
    shown.observe(record(mode="dispatch", prefill_pod_id="b"))
    assert value(shown, "calinix_pod_requests_total", pod_id="a", role="decode") == 1
    assert value(shown, "calinix_pod_requests_total", pod_id="b", role="prefill") == 1


def test_pods_are_shown_as_the_router_knows_them() -> None:
    """Every scrape asks the router: a pod that is added appears, one that is removed does not."""
    source = Pods(Pod("a", "single", 3, False, True, True, 77))
    shown = Metrics(source, max_pods=4)
    labels = {"pod_id": "a", "role": "single"}
    kinds = {"inflight": 3, "healthy": 0, "draining": 1, "ejected": 1, "blocks_known": 77}
    assert {k: value(shown, f"calinix_pod_{k}", **labels) for k in kinds} == kinds
    source.list = [Pod("new", "prefill")]
    assert value(shown, "calinix_pod_healthy", pod_id="new", role="prefill") == 1
    assert value(shown, "calinix_pod_healthy", **labels) is None


def test_failures_are_counted_by_pod_and_kind() -> None:
    """Every Failure of the core has its own label; what is none is `other`."""
    assert {failure.value for failure in Failure} == FAILURES
    shown = metrics()
    for kind in ("connect", "connect", "made up"):
        shown.pod_failed("a", kind)
    labels = {"pod_id": "a", "role": "single"}
    assert value(shown, "calinix_pod_failures_total", kind="connect", **labels) == 2
    assert value(shown, "calinix_pod_failures_total", kind="other", **labels) == 1


def test_what_only_the_host_knows() -> None:
    """Inflight and waiting are shown once the host says how to ask; dropped lines likewise."""
    shown = metrics()
    assert value(shown, "calinix_inflight_requests") is None
    shown.inflight, shown.waiting = (lambda: 3), (lambda: 2)
    assert value(shown, "calinix_inflight_requests") == 3
    assert value(shown, "calinix_waiting_requests") == 2


def test_build_info_and_the_process() -> None:
    """The version is there, and what Prometheus expects of any process."""
    shown = Metrics(Pods(), 1, {"compiled": "true"})
    assert value(shown, "calinix_build_info", version=__version__, compiled="true") == 1
    assert b"# TYPE process_cpu_seconds_total counter" in shown.exposition()


NASTY = st.sampled_from(["", "single", "cacheAware", 'a"b\n', "\ud800", "x" * 500]) | st.text()


@given(st.lists(st.tuples(NASTY, NASTY, st.integers(), NASTY, NASTY, NASTY), max_size=30))
def test_labels_are_bounded(made: list[tuple[str, str, int, str, str, str]]) -> None:
    """Whatever a record holds, labels come from fixed lists; endpoints by number."""
    shown = metrics()
    for mode, strategy, status, pod_id, reason, error in made:
        shown.observe(
            RequestRecord(
                request_id="r",
                mode=mode,
                strategy=strategy,
                status=status,
                pod_id=pod_id,
                prefill_pod_id=pod_id,
                retries=1,
                retry_reason=reason,
                error=error,
            )
        )
        shown.pod_failed(pod_id, error)
    for name, labels in samples(shown):
        for label, text in labels:
            if label == "mode":
                assert text in {"single", "dispatch", "other"}
            elif label == "strategy":
                assert text in STRATEGIES | {"other"}
            elif label == "status":
                assert re.fullmatch(r"[1-5]\d\d|[1-5]xx|other", text)
            elif label == "pod_id":
                assert text in {"a", "b", "other"}
            elif label in {"kind", "reason"}:
                assert text in FAILURES | {"other"}
            else:
                assert label in {"le", "role", "endpoint", "version"}, (name, label)


def test_tables_are_bounded() -> None:
    """Endless new endpoints and statuses end in a bounded number of series and cached keys."""
    shown = metrics()
    count = 2 * MAX_CACHED_KEYS
    for i in range(count):
        shown.observe(record(endpoint=f"/made/up/{i}", status=100 + i % 500))
    assert len({labels[3] for labels in shown.requests}) == MAX_ENDPOINTS + 1
    assert len(shown._cells) <= MAX_CACHED_KEYS
    assert sum(cell[0] for cell in shown.requests.values()) == count
    few = Metrics(Pods(*(Pod(f"p{i}") for i in range(100))), max_pods=2)
    for i in range(100):
        few.observe(record(pod_id=f"p{i}"))
    assert len(few.pods) <= 4 * 2 + 1


def test_strategies_and_endpoints_fit() -> None:
    """Every strategy has its label, and the gateway's own route table fits among the endpoints."""
    assert set(get_args(StrategyName)) == STRATEGIES
    labels = {route.label for route in RouteTable(())._routes.values()}
    assert 10 < len(labels) < MAX_ENDPOINTS - 10


@pytest.mark.parametrize(
    ("status", "label"),
    [(200, "200"), (499, "499"), (418, "4xx"), (599, "5xx"), (0, "other"), (-5, "other")],
)
def test_statuses(status: int, label: str) -> None:
    """Known statuses have labels of their own, others their class."""
    assert status_label(status) == label


@given(st.lists(st.floats()))
def test_histograms_count_what_they_should(values: list[float]) -> None:
    """Every duration is in the first bucket that is not below it; what is none is left out."""
    histogram = Histogram((0.1, 1.0, 10.0))
    for one in values:
        histogram.observe(one)
    good = [one for one in values if 0 <= one < 1e9]
    assert histogram.counts == [
        sum(low < one <= high for one in good)
        for low, high in ((-1, 0.1), (0.1, 1.0), (1.0, 10.0), (10.0, 1e9))
    ]
    assert histogram.total_s == pytest.approx(sum(good))


def test_the_documents_list_what_is_shown() -> None:
    """The metrics table of docs/operations.md and the exposition name the same metrics."""
    listed = set(re.findall(r"^\| `(calinix_\w+)`", OPERATIONS.read_text("utf-8"), re.MULTILINE))
    shown = metrics()
    shown.inflight = shown.waiting = shown.dropped_lines = lambda: 0
    types = re.findall(r"^# TYPE (calinix_\w+) ", shown.exposition().decode(), re.MULTILINE)
    assert listed == set(types)


# --- the request log -----------------------------------------------------------------------------


@pytest.fixture
def operational() -> Iterator[list[dict[str, object]]]:
    """What is logged with structlog meanwhile."""
    with structlog.testing.capture_logs() as found:
        yield found  # type: ignore[misc]


def read_lines(path: Path) -> list[dict[str, object]]:
    """A log file's lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_one_line_per_request(tmp_path: Path) -> None:
    """A finished request gives one JSON line: every field, camelCase, seconds to six digits."""
    path = tmp_path / "requests.jsonl"
    telemetry = Telemetry(config(Log(requests_file=str(path))), Pods(Pod("a")))
    telemetry.finish(record(ttft_s=0.12345678, output_tokens=5))
    telemetry.flush()
    (line,) = read_lines(path)
    assert set(line) == {field.encode_name for field in msgspec.structs.fields(RequestRecord)}
    assert line["requestId"] == "r-1"
    assert line["ttftS"] == 0.123456
    assert line["outputTokens"] == 5
    assert line["promptTokens"] is None
    telemetry.close()


def test_records_are_passed_on_in_batches(tmp_path: Path) -> None:
    """Nothing is counted or written before a batch is full or `flush` is called; then all is."""
    path = tmp_path / "requests.jsonl"
    telemetry = Telemetry(config(Log(requests_file=str(path))), Pods(Pod("a")))
    for i in range(BATCH - 1):
        telemetry.finish(record(request_id=str(i)))
    assert read_lines(path) == []
    assert not telemetry.metrics.requests
    telemetry.finish(record(request_id="last"))
    assert len(read_lines(path)) == BATCH
    telemetry.finish(record(request_id="one more"))
    telemetry.close()
    assert [line["requestId"] for line in read_lines(path)][-2:] == ["last", "one more"]
    assert value(telemetry.metrics, "calinix_pod_requests_total", pod_id="a", role="single") == 65


def test_the_time_of_a_request_is_filled_in() -> None:
    """A record without `received_at` gets it from the clock and its own duration."""
    telemetry = Telemetry(config(Log(requests=False)), Pods())
    late = record(received_at=0.0, e2e_s=10.0)
    telemetry.finish(late)
    assert time.time() - 11 < late.received_at < time.time() - 9


def test_the_log_is_appended_to(tmp_path: Path) -> None:
    """A restart adds to the file that is there; others on the machine cannot read it."""
    path = tmp_path / "requests.jsonl"
    for request_id in ("first", "second"):
        telemetry = Telemetry(config(Log(requests_file=str(path))), Pods(Pod("a")))
        telemetry.finish(record(request_id=request_id))
        telemetry.close()
    assert [line["requestId"] for line in read_lines(path)] == ["first", "second"]
    assert path.stat().st_mode & 0o007 == 0


def test_a_log_that_cannot_be_opened_is_told_at_start(tmp_path: Path) -> None:
    """A folder that is not there is a ConfigError that names the key."""
    with pytest.raises(ConfigError, match=r"log\.requestsFile: cannot open .*: No such file"):
        Telemetry(config(Log(requests_file=str(tmp_path / "no" / "log"))), Pods())


@given(st.text(max_size=400), st.text(max_size=400))
def test_any_text_gives_one_short_line(model: str, error: str) -> None:
    """Whatever a client sends as model: one line of JSON, cut, nothing of it a line of its own."""
    read, write = os.pipe()
    log = RequestLog(write, owned=True)
    made = record()
    made.model, made.error = model, error
    made.trim()
    log.write([made, record(request_id="next")])
    log.close()
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    first, second = data.splitlines()
    assert json.loads(second)["requestId"] == "next"
    assert len(json.loads(first)["model"]) <= 128
    assert len(first) < PIPE_BYTES


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    """Text that cannot be UTF-8 is written with replacements, beside lines that can."""
    path = tmp_path / "requests.jsonl"
    log = RequestLog.open(Log(requests_file=str(path)))
    assert log is not None
    made = record()
    made.model = "a\ud800b"
    log.write([record(), made])
    log.close()
    assert [line["model"] for line in read_lines(path)] == ["m", "a?b"]


def test_a_slow_reader_blocks_nothing(operational: list[dict[str, object]]) -> None:
    """With a full pipe lines wait, then are dropped and counted; those that come out are whole."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 8192)
    log = RequestLog(write, owned=True)
    line_bytes = len(msgspec.json.encode(record())) + 1
    batches = 2 * MAX_BUFFERED_BYTES // (line_bytes * BATCH)
    for _ in range(batches):
        log.write([record()] * BATCH)
    assert len(log._buffer) <= MAX_BUFFERED_BYTES
    assert log.dropped_lines % BATCH == 0
    assert 0 < log.dropped_lines < batches * BATCH
    assert [event["event"] for event in operational] == ["request_log_slow"]
    os.set_blocking(read, False)
    data = b""
    while log._buffer:
        data += os.read(read, 65536)
        log.flush()
    data += os.read(read, 65536)
    log.close()
    os.close(read)
    assert data.endswith(b"\n")
    lines = [json.loads(line) for line in data.splitlines()]
    assert len(lines) == batches * BATCH - log.dropped_lines


def test_closing_waits_only_so_long() -> None:
    """With a reader that never reads, `close` gives up after its time."""
    read, write = os.pipe()
    log = RequestLog(write, owned=True)
    for _ in range(10):
        log.write([record()] * BATCH)
    begin = time.monotonic()
    log.close(timeout_s=0.05)
    assert time.monotonic() - begin < 5
    os.close(read)


def test_a_broken_pipe_ends_the_log_not_the_gateway(
    operational: list[dict[str, object]],
) -> None:
    """When the reader is gone there is one warning, and everything goes on without the log."""
    read, write = os.pipe()
    os.close(read)
    log = RequestLog(write, owned=True)
    for _ in range(3):
        log.write([record()])
    assert not log.enabled
    assert [(e["event"], e["reason"]) for e in operational] == [("request_log_off", "Broken pipe")]
    log.close()


@pytest.mark.parametrize(("number", "reason"), [(28, "No space left"), (5, "Input/output error")])
def test_a_full_disk_ends_the_log_not_the_gateway(
    number: int,
    reason: str,
    operational: list[dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A write that fails for good gives one warning; counting goes on."""
    telemetry = Telemetry(config(Log(requests_file=str(tmp_path / "log"))), Pods(Pod("a")))

    def fail(fd: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fail)
        for _ in range(3):
            telemetry.finish(record())
            telemetry.flush()
    assert [event["event"] for event in operational] == ["request_log_off"]
    assert reason in str(operational[0]["reason"])
    assert value(telemetry.metrics, "calinix_pod_requests_total", pod_id="a", role="single") == 3
    telemetry.close()


def test_a_closed_descriptor_is_no_error(operational: list[dict[str, object]]) -> None:
    """A process without standard output runs without the request log."""
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    log = RequestLog(write)
    log.write([record()])
    assert not log.enabled
    assert [event["event"] for event in operational] == ["request_log_off"]


def test_partial_writes_are_finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the system takes in small pieces arrives whole and in order."""
    path = tmp_path / "log"
    log = RequestLog.open(Log(requests_file=str(path)))
    assert log is not None
    write = os.write
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
        log.write([record(request_id=str(i)) for i in range(5)])
    log.close()
    assert [line["requestId"] for line in read_lines(path)] == ["0", "1", "2", "3", "4"]


# --- operational logs ----------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Yes."""
        return True


@pytest.fixture
def restored() -> Iterator[None]:
    """Leaves structlog and logging as they were."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("restored")
class TestLogging:
    """configure_logging, on streams of our own."""

    def test_json_where_nobody_looks(self) -> None:
        """Not on a terminal, each event is one JSON line with time, level and fields."""
        out = io.StringIO()
        configure_logging(Log(), out)
        structlog.get_logger().warning("pod_down", pod_id="a", tries=3)
        line = json.loads(out.getvalue())
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", line.pop("timestamp"))
        assert line == {"event": "pod_down", "level": "warning", "pod_id": "a", "tries": 3}

    def test_console_where_somebody_does(self) -> None:
        """On a terminal, or when asked for, events are readable text; in colour on a terminal."""
        out, plain = Terminal(), io.StringIO()
        configure_logging(Log(), out)
        structlog.get_logger().info("serving", port=8080)
        assert "\x1b[" in out.getvalue()
        configure_logging(Log(format="console"), plain)
        structlog.get_logger().info("serving", port=8080)
        assert re.search(r"\[info *\] serving +port=8080", plain.getvalue())

    def test_levels(self) -> None:
        """What is below the level is not written."""
        out = io.StringIO()
        configure_logging(Log(level="warning"), out)
        log = structlog.get_logger()
        log.info("no")
        log.error("yes")
        assert "no" not in out.getvalue()
        assert "yes" in out.getvalue()

    def test_the_standard_library_looks_the_same(self) -> None:
        """The complaints of asyncio become lines of the same kind, tracebacks included; only once."""
        out = io.StringIO()
        configure_logging(Log(), io.StringIO())
        configure_logging(Log(), out)
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            logging.getLogger("asyncio").exception("callback %s failed", "x")
        line = json.loads(out.getvalue())
        assert (line["event"], line["level"]) == ("callback x failed", "error")
        assert "RuntimeError: boom" in line["exception"]

    @pytest.mark.parametrize("format_", ["json", "console"])
    def test_tracebacks_hold_no_locals(self, format_: str) -> None:
        """A traceback names the error and the lines, never the values that were at hand."""
        out = io.StringIO()
        configure_logging(msgspec.convert({"format": format_}, Log), out)
        secret = str(2**70)
        try:
            raise RuntimeError("boom")
        except RuntimeError:
            structlog.get_logger().exception("failed")
        assert "RuntimeError: boom" in out.getvalue()
        assert secret not in out.getvalue()

    @pytest.mark.parametrize("format_", ["json", "console"])
    def test_fields_are_bounded_and_on_one_line(self, format_: str) -> None:
        """Long text is cut; line ends and escape codes from outside do not get through."""
        out = io.StringIO()
        configure_logging(msgspec.convert({"format": format_}, Log), out)
        structlog.get_logger().info("refused", path="x" * 5000, model="a\n\x1b[31m\ud800")
        text = out.getvalue()
        assert text.count("\n") == 1
        assert "\x1b[31m" not in text
        assert len(text) < 1500
        text.encode()

    def test_a_dead_stream_raises_nothing(self) -> None:
        """When standard error is gone, log calls do nothing, of either kind."""
        out = io.StringIO()
        configure_logging(Log(), out)
        out.close()
        structlog.get_logger().error("into the void")
        logging.getLogger("asyncio").error("into the void")

    def test_standard_error_is_the_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        """Without a stream of its own, everything goes to standard error."""
        configure_logging(Log(format="json"))
        structlog.get_logger().error("here")
        shown = capsys.readouterr()
        assert json.loads(shown.err)["event"] == "here"
        assert shown.out == ""
        assert sys.stderr is not sys.stdout
