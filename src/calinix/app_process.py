"""What a serving process asks of the system: sockets, and memory that it may keep."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from typing import Final

_MAX_FILES: Final = 65_536
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
"""Of glibc's malloc.h."""
_KEPT_FREE_BYTES: Final = 16 << 20
_GROWN_BYTES: Final = 1 << 20
_OWN_MAPPING_BYTES: Final = 1 << 20


def settle_memory() -> None:
    """To be called once all is set up, before the first request.

    Requests leave no cycles behind, so full collections are rare and skip what start-up made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    _keep_heap()


def _keep_heap() -> None:
    """Bodies come and go: their pages are kept for the next ones, up to 16 MiB of them.

    By default the C library gives the top of the heap back as soon as 128 KiB of it are free, and
    asks for it again with the next body: some page faults for every long prompt. Bodies above
    1 MiB have mappings of their own, which go with them.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _KEPT_FREE_BYTES)
        mallopt(_TOP_PAD, _GROWN_BYTES)
        mallopt(_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def allow_sockets() -> None:
    """As many as the system lets a process have: shells and units often start one with 1024.

    256 pods with KV events alone take as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
