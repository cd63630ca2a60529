"""The request log: one line per request, in batches, and never in the way of a request."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from calinix.config import Log
from calinix.errors import ConfigError
from calinix.telemetry import BATCH, RequestLog, Telemetry
from calinix.telemetry.request_log import (
    GATHERED_BYTES,
    MAX_BUFFERED_BYTES,
    PIPE_BYTES,
    LogLine,
)
from calinix.telemetry.telemetry import log_line
from telemetrykit import Pod, Pods, config, record, value


@pytest.fixture
def operational() -> Iterator[list[dict[str, object]]]:
    """What is logged with structlog meanwhile."""
    with structlog.testing.capture_logs() as found:
        yield found  # type: ignore[misc]


def read_lines(path: Path) -> list[dict[str, object]]:
    """A log file's lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_one_line_per_request(tmp_path: Path) -> None:
    """A finished request gives one line of JSON: what is known of it, whole microseconds."""
    path = tmp_path / "requests.jsonl"
    telemetry = Telemetry(config(Log(requests_file=str(path))), Pods(Pod("a")))
    telemetry.finish(record(ttft_us=123_456, output_tokens=5))
    telemetry.flush()
    (line,) = read_lines(path)
    assert set(line) <= {field.encode_name for field in msgspec.structs.fields(LogLine)}
    assert line["requestId"] == "r-1"
    assert line["ttftUs"] == 123_456
    assert line["outputTokens"] == 5
    assert "promptTokens" not in line
    telemetry.close()


def test_records_are_counted_in_batches_and_written_when_enough_have_gathered(
    tmp_path: Path,
) -> None:
    """Nothing is counted before a batch is full, nothing written before 16 KiB have gathered."""
    path = tmp_path / "requests.jsonl"
    telemetry = Telemetry(config(Log(requests_file=str(path))), Pods(Pod("a")))
    for i in range(BATCH - 1):
        telemetry.finish(record(request_id=str(i)))
    assert read_lines(path) == []
    assert not telemetry.counters.requests
    telemetry.finish(record(request_id="last"))
    count = BATCH
    assert telemetry.counters.requests
    assert read_lines(path) == []
    while not path.stat().st_size:
        assert count < 1000
        telemetry.finish(record(request_id=str(count)))
        count += 1
    assert path.stat().st_size >= GATHERED_BYTES
    telemetry.finish(record(request_id="last"))
    telemetry.close()
    lines = read_lines(path)
    assert len(lines) == count + 1
    assert lines[-1]["requestId"] == "last"
    served = value(telemetry.metrics, "calinix_pod_requests_total", pod_id="a", role="single")
    assert served == count + 1


def test_the_time_of_a_request_is_filled_in() -> None:
    """A record without `received_at` gets it from the clock and its own duration."""
    telemetry = Telemetry(config(Log(requests=False)), Pods())
    late = record(received_at=0.0, e2e_us=10_000_000)
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


def test_a_rotated_log_begins_anew(tmp_path: Path, operational: list[dict[str, object]]) -> None:
    """What ended before `reopen` is in the renamed file, the rest in a new one of the old name."""
    path, old = tmp_path / "requests.jsonl", tmp_path / "requests.jsonl.1"
    telemetry = Telemetry(config(Log(requests_file=str(path))), Pods(Pod("a")))
    telemetry.finish(record(request_id="before"))
    path.rename(old)
    telemetry.reopen()
    telemetry.finish(record(request_id="after"))
    telemetry.flush()
    assert [line["requestId"] for line in read_lines(old)] == ["before"]
    assert [line["requestId"] for line in read_lines(path)] == ["after"]
    path.unlink()
    path.mkdir()
    telemetry.reopen()
    telemetry.close()
    assert [line["event"] for line in operational] == ["request_log_not_reopened"]


def test_what_has_no_name_is_not_opened_anew() -> None:
    """Standard output stays what it is."""
    read, write = os.pipe()
    log = RequestLog(write, owned=True)
    log.reopen()
    log.write([log_line(record())])
    log.close()
    with os.fdopen(read, "rb") as pipe:
        assert len(pipe.read().splitlines()) == 1


@given(st.text(max_size=400), st.text(max_size=400))
def test_any_text_gives_one_short_line(model: str, error: str) -> None:
    """Whatever a client sends as model: one line of JSON, cut, nothing of it a line of its own."""
    read, write = os.pipe()
    log = RequestLog(write, owned=True)
    made = record()
    made.model, made.error = model, error
    log.write([log_line(made), log_line(record(request_id="next"))])
    log.close()
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    first, second = data.splitlines()
    assert json.loads(second)["requestId"] == "next"
    assert len(json.loads(first).get("model", "")) <= 128
    assert len(first) < PIPE_BYTES


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    """Text that cannot be UTF-8 is written with replacements, beside lines that can."""
    path = tmp_path / "requests.jsonl"
    log = RequestLog.open(Log(requests_file=str(path)))
    assert log is not None
    made = record()
    made.model = "a\ud800b"
    log.write([log_line(record()), log_line(made)])
    log.close()
    assert [line["model"] for line in read_lines(path)] == ["m", "a?b"]


def test_a_slow_reader_blocks_nothing(operational: list[dict[str, object]]) -> None:
    """With a full pipe lines wait, then are dropped and counted; those that come out are whole."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 8192)
    log = RequestLog(write, owned=True)
    line_bytes = len(msgspec.json.encode(log_line(record()))) + 1
    batches = 2 * MAX_BUFFERED_BYTES // (line_bytes * BATCH)
    for _ in range(batches):
        log.write([log_line(record())] * BATCH)
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
        log.write([log_line(record())] * BATCH)
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
        log.write([log_line(record())])
        log.flush()
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
    log.write([log_line(record())])
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
        log.write([log_line(record(request_id=str(i))) for i in range(5)])
    log.close()
    assert [line["requestId"] for line in read_lines(path)] == ["0", "1", "2", "3", "4"]
