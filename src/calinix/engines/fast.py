"""Chooses the compiled form of what looks into JSON objects where it was built."""

from __future__ import annotations

try:
    from calinix.engines._members import Members, find_members
except ImportError:
    from calinix.engines.members import Members, find_members

__all__ = ["Members", "find_members"]
