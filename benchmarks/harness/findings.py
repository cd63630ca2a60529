"""What a benchmark judges: one thing that must hold, and whether it does."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True):
    """One thing that must hold, with the figures it was judged by."""

    what: str
    figure: str
    limit: str
    holds: bool | None
    """None: the machine was too noisy to tell."""
