"""Renews docs/demo.svg: what a terminal shows while `calinix demo` runs.

    python docs/render_demo.py

It runs the demo and keeps one look at it; nothing in the picture is made up.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.terminal_theme import DIMMED_MONOKAI

from calinix import cli_demo

PICTURE = Path(__file__).with_name("demo.svg")
COLUMNS = 112
SECONDS = 12.0
LOOK = 36
"""Which look: there are four a second."""


class Still:
    """Stands where the live display would; the look that is wanted becomes the picture."""

    looks = 0

    def __init__(self, **options: Any):
        del options

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def update(self, view: RenderableType, *, refresh: bool) -> None:
        """One look at the demo."""
        del refresh
        self.looks += 1
        if self.looks == LOOK:
            PICTURE.write_text(picture(view), "utf-8")


def picture(view: RenderableType) -> str:
    """The view as SVG, in the reader's own fonts: nothing is fetched for it."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(view)
    drawn = console.export_svg(title="make demo", theme=DIMMED_MONOKAI)
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    return drawn.replace("Fira Code, monospace", "monospace")


if __name__ == "__main__":
    cli_demo.Live = Still  # type: ignore[assignment,misc]
    cli_demo.Console = lambda: Console(file=io.StringIO(), force_terminal=True)  # type: ignore[assignment,misc]
    cli_demo.demo(seconds=SECONDS, rate=3.0)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KB")
