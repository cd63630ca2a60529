"""Renews the tables of docs/failure-matrix.md: runs every cell, and writes down what came of it.

    python docs/render_failure_matrix.py

Takes about half a minute, most of it time-outs. Ends with 1 where a cell is not as it has to be.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "failure-matrix.md"


def main() -> int:
    """Runs the matrix; 0 when every cell is as it has to be."""
    sys.path.insert(0, str(ROOT / "tests"))
    import structlog  # noqa: PLC0415
    import uvloop  # noqa: PLC0415

    from matrixcells import cells  # noqa: PLC0415
    from matrixpage import page_of  # noqa: PLC0415
    from matrixrun import run_cells  # noqa: PLC0415

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    found = uvloop.run(run_cells(cells()))
    PAGE.write_text(page_of(PAGE.read_text("utf-8"), found), "utf-8")
    wrong = {str(cell): faults for cell, faults in found.items() if faults}
    for cell, faults in wrong.items():
        print(f"{cell}: {'; '.join(faults)}", file=sys.stderr)
    print(f"{len(found)} cells, {len(wrong)} not as they have to be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
