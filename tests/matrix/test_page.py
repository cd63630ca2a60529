"""docs/failure-matrix.md says what the matrix says."""

from __future__ import annotations

from pathlib import Path

from matrixcells import CLIENT, DECODE, PREFILL, PROTOCOLS, cells
from matrixpage import page_of

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "failure-matrix.md"


def test_the_page_is_up_to_date() -> None:
    """The tables are those of a run without a fault; docs/render_failure_matrix.py renews them."""
    page = PAGE.read_text("utf-8")
    assert page == page_of(page, {cell: [] for cell in cells()})


def test_a_wrong_cell_is_seen_on_the_page() -> None:
    """What a run finds wrong stands in its cell, in so many words."""
    page, (first, *_) = PAGE.read_text("utf-8"), cells()
    shown = page_of(page, {cell: ["took 9 s"] if cell == first else [] for cell in cells()})
    assert "**WRONG**: took 9 s" in shown


def test_every_fault_is_met_alone_and_in_pairs() -> None:
    """Each fault occurs by itself, for each protocol and kind of answer, and in pairs."""
    found = {(c.protocol, c.stream, c.prefill, c.decode, c.client) for c in cells()}
    for protocol in PROTOCOLS:
        for stream in (True, False):
            alone = [(p, "ok", "stays") for p in PREFILL if p != "no params" or protocol == "nixl"]
            alone += [("ok", d, "stays") for d in DECODE] + [("ok", "ok", c) for c in CLIENT]
            for faults in alone:
                assert (protocol, stream, *faults) in found
    for kinds in ((0, 1), (0, 2), (1, 2)):
        good = ("ok", "ok", "stays")
        pairs = {
            c[2:] for c in found if all((c[2 + k] != good[k]) == (k in kinds) for k in range(3))
        }
        assert len(pairs) >= 4
