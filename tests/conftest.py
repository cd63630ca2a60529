"""For all tests. Its being here also puts this folder (kit.py, faultproxy.py ...) on the path."""

from __future__ import annotations

import gc

from hypothesis import settings

# A slow machine is no failure: pytest's own timeout bounds a test.
settings.register_profile("calinix", deadline=None, print_blob=True)
settings.load_profile("calinix")


def pytest_collection_finish() -> None:
    """Sets aside what all tests have in common: each test on a loop collects garbage at its end."""
    gc.collect()
    gc.freeze()
