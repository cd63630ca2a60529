"""The failure matrix of prefill/decode, cell by cell over real sockets: docs/failure-matrix.md."""

from __future__ import annotations

import pytest

import kit
from matrixcells import PROTOCOLS, cells
from matrixrun import run_cells


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_cell(protocol: str, stream: bool) -> None:
    """Status, number of calls, who is cancelled, time, and that nothing is left: as expected."""
    chosen = [cell for cell in cells() if (cell.protocol, cell.stream) == (protocol, stream)]
    found = kit.run(run_cells(chosen), timeout_s=100)
    wrong = {str(cell): faults for cell, faults in found.items() if faults}
    assert len(found) == len(chosen) > 50
    assert not wrong, "\n".join(f"{cell}: {'; '.join(faults)}" for cell, faults in wrong.items())
