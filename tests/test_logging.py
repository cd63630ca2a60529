"""Operational logs: lines for people or for machines, bounded, on a stream that may be gone."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import msgspec
import pytest
import structlog

from calinix.config import Log
from calinix.telemetry import configure_logging


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
        """What asyncio complains of becomes one line of the same kind, traceback included."""
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
