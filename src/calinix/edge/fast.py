"""Chooses the compiled form of the bytes path's innermost steps where it was built."""

from __future__ import annotations

try:
    from calinix.edge._bytes_path import Outlet, Relay, count_events, whole_chunks, with_end
except ImportError:
    from calinix.edge.bytes_path import Outlet, Relay, count_events, whole_chunks, with_end

__all__ = ["Outlet", "Relay", "count_events", "whole_chunks", "with_end"]
