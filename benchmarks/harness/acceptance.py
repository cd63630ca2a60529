"""What a check of `make accept` is given, and what it gives back."""

from __future__ import annotations

import enum
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from harness.machine import ROOT
from harness.processes import Children


class Verdict(enum.Enum):
    """What came of it."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_RUN = "NOT RUN"


class Row(msgspec.Struct, frozen=True):
    """One line of the table: what must hold, the verdict, the figures (or why it was not run)."""

    what: str
    verdict: Verdict
    figures: str


class Done(msgspec.Struct, frozen=True):
    """A command that ended; `status` is None when it was ended for taking too long."""

    status: int | None
    output: str
    seconds: float

    @property
    def last_line(self) -> str:
        """Its last words."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


def test_counts(output: str) -> str:
    """The count that pytest gives, like "3 failed, 10 passed"; empty when there is none."""
    for line in reversed(output.splitlines()):
        counts = re.findall(r"\d+ (?:passed|failed|errors?)", line)
        if counts and " in " in line:
            return ", ".join(counts)
    return ""


class Context(msgspec.Struct, frozen=True):
    """Where checks run: `results` keeps logs and raw JSON, `scratch` is gone afterwards."""

    children: Children
    results: Path
    scratch: Path
    quick: bool

    def run(
        self,
        name: str,
        command: Sequence[str],
        *,
        timeout_s: float,
        folder: Path = ROOT,
        more: Mapping[str, str] | None = None,
    ) -> Done:
        """Runs a command to its end in `folder`; what it says goes to results/NAME.log too.

        `more` adds to the environment.
        """
        log = self.results / f"{name}.log"
        began = time.monotonic()
        environment = {**_environment(), **(more or {})}
        child = self.children.start(command, log, folder=folder, environment=environment)
        try:
            status = child.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            self.children.end(child)
        return Done(status, log.read_text(errors="replace"), time.monotonic() - began)

    def python(self, name: str, *arguments: str, timeout_s: float) -> Done:
        """Runs this Python with arguments, in the project's root."""
        return self.run(name, (sys.executable, *arguments), timeout_s=timeout_s)

    def benchmark(self, name: str, *arguments: str, timeout_s: float) -> Done:
        """The same with the package that `make accept` measures: the one that is compiled."""
        path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        return self.run(name, (sys.executable, *arguments), timeout_s=timeout_s, more=path)


class Check(msgspec.Struct, frozen=True):
    """A must-hold: its number, what it is about, and the function that looks."""

    number: str
    what: str
    look: Callable[[Context], list[Row]]


def row(what: str, holds: bool, figures: str) -> Row:
    """A line that passes or fails."""
    return Row(what, Verdict.PASS if holds else Verdict.FAIL, figures)


def not_run(what: str, why: str) -> Row:
    """A line that says why nothing was found out."""
    return Row(what, Verdict.NOT_RUN, why)


def _environment() -> dict[str, str]:
    """Ours, without what `make accept` and our venv would impose on a fresh clone's make."""
    foreign = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES", "VIRTUAL_ENV", "PYTHONPATH"}
    return {name: value for name, value in os.environ.items() if name not in foreign}
