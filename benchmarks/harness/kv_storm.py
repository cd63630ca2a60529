"""Batches of KV events as many engines publish them, and a program that publishes them at a pace.

    python -m harness.kv_storm ENDPOINT PODS BLOCKS_PER_S SECONDS

Each event stores `EVENT_BLOCKS` new blocks behind a root or behind what its pod stored before;
when a pod holds `POD_BLOCKS`, each event's batch first removes what was stored longest ago, as a
full cache does.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque

import numpy as np
import zmq

from calinix.engines.kv_events import Dialect, KvEvent, RemovedBlocks, StoredBlocks, write_batch

BLOCK_TOKENS = 16
EVENT_BLOCKS = 8
POD_BLOCKS = 4096
CHAIN_EVENTS = 8
"""Events of one chain: 64 blocks."""
WARM_UP_S = 0.5


class Pod:
    """One engine's stores and removals, without the engine."""

    def __init__(self, seed: int, event_blocks: int = EVENT_BLOCKS):
        self._rng = random.Random(seed)
        self._tokens = np.random.default_rng(seed)
        self._size = event_blocks
        self._stored: deque[list[int]] = deque()
        self._behind = 0
        self.sequence = 0

    def batch(self, dialect: Dialect = "maps") -> bytes:
        """The next batch; one event that stores, preceded by removals when the cache is full."""
        events: list[KvEvent] = []
        if len(self._stored) * self._size >= POD_BLOCKS:
            oldest = self._stored.popleft()
            events += [RemovedBlocks([name], "GPU", 0) for name in reversed(oldest)]
        names = [self._rng.getrandbits(64) for _ in range(self._size)]
        self._behind = (self._behind + 1) % CHAIN_EVENTS
        parent = self._stored[-1][-1] if self._behind and self._stored else None
        tokens = self._tokens.integers(0, 150_000, self._size * BLOCK_TOKENS).tolist()
        keys: list[list[object] | None] = [None] * self._size
        events.append(
            StoredBlocks(
                list(names), parent, tokens, BLOCK_TOKENS, None, "GPU", None, keys, 0,
                "full_attention",
            )
        )  # fmt: skip
        self._stored.append(names)
        self.sequence += 1
        return write_batch(events, 1.0, 0, dialect)


def main() -> None:
    """Publishes until its time is over; it says when it begins."""
    endpoint, pods, blocks_per_s, seconds = sys.argv[1], *map(float, sys.argv[2:5])
    count = int(blocks_per_s / EVENT_BLOCKS * seconds)
    makers = [Pod(seed) for seed in range(int(pods))]
    batches = [makers[at % len(makers)].batch() for at in range(count)]
    topics = [b"kv@pod-%d@bench" % at for at in range(len(makers))]
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
    socket.set(zmq.SNDHWM, 0)
    socket.connect(endpoint)
    time.sleep(WARM_UP_S)
    print("publishing", flush=True)
    began = time.monotonic()
    for at, batch in enumerate(batches):
        due = began + at / count * seconds
        while (wait := due - time.monotonic()) > 0:
            # Not for shorter: a sleep is no more exact than that, and costs as much.
            time.sleep(max(wait, 0.0005))
        number = at // len(makers)
        socket.send_multipart((topics[at % len(makers)], number.to_bytes(8, "big"), batch))
    print(f"{count / (time.monotonic() - began) * EVENT_BLOCKS:.0f}", flush=True)
    time.sleep(WARM_UP_S)
    socket.close()


if __name__ == "__main__":
    main()
