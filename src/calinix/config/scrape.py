"""The struct of the configuration's `scrape`: what pods are asked at their /metrics.

The docstring under a field is its one description, as in schema.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from calinix.config.fields import Base, Ms, Path


class Scrape(Base, frozen=True):
    """What pods say of themselves at their /metrics: load, and the size of their KV cache."""

    when: Literal["auto", "always", "never"] = "auto"
    """auto: as long as a pod without kvCapacityTokens has not told its size, and while somebody
    looks (at /metrics or /admin/pods, and for some minutes after); always; or never."""
    path: Path = "/metrics"
    """Path that is asked with GET."""
    interval_ms: Ms = 1_000
    """Between two looks at a pod; one without such metrics is asked less and less often."""
    timeout_ms: Ms = 1_000
    """For its whole answer."""
    page_bytes: Annotated[int, Meta(ge=1024, le=67_108_864)] = 4_194_304
    """A longer page is not read to its end, and counts as none."""
