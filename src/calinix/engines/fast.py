"""Chooses the compiled form of what looks into JSON where it was built."""

from __future__ import annotations

try:
    from calinix.engines._members import Members, find_members
    from calinix.engines._usage import usual_counts
except ImportError:
    from calinix.engines.members import Members, find_members
    from calinix.engines.usage_shapes import usual_counts

__all__ = ["Members", "find_members", "usual_counts"]
