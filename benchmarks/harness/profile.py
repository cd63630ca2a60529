"""Calinix alone under a profiler, to see where its time goes."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from harness.cases import Case
from harness.contenders import Contender
from harness.processes import BenchmarkError
from harness.slices import Bench
from harness.tools import BUILD, Load


def profile(bench: Bench, case: Case, contender: Contender) -> tuple[Path, Load]:
    """Records the proxy during one slice; the report's path, and the load it was taken under.

    The figures of that load are not to be compared: being watched costs time.
    """
    plan = bench.plan
    with bench.under_load(case, contender) as (proxy, load):
        if proxy is None:
            raise BenchmarkError("there is no proxy to watch")
        time.sleep(plan.warm_up_s)
        report = record(proxy.pids(), plan.seconds, BUILD / f"profile-{case.name}")
        return report, load.result()


def record(pids: list[int], seconds: float, stem: Path) -> Path:
    """Runs py-spy, else perf, on a proxy; raises BenchmarkError when neither is here."""
    if shutil.which("py-spy"):
        flames = stem.with_suffix(".svg")
        _run("py-spy", "record", "-p", str(pids[0]), "-d", f"{seconds:.0f}", "-o", str(flames))
        return flames
    if not shutil.which("perf"):
        raise BenchmarkError("no profiler here: install py-spy (pip) or perf (linux-perf)")
    joined = ",".join(str(pid) for pid in pids)
    samples, report = stem.with_suffix(".perf"), stem.with_suffix(".txt")
    _run("perf", "record", "-q", "-g", "-o", str(samples), "-p", joined, "sleep", f"{seconds}")
    report.write_text(_run("perf", "report", "--stdio", "--no-children", "-i", str(samples)))
    return report


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{command[0]} failed:\n{done.stderr}")
    return done.stdout
