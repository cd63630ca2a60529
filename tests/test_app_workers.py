"""What a gateway of several workers is made of: the port that is held, a worker's ears."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

import kit
from calinix.app_worker import CONFIG_FILE, Worker
from calinix.app_workers import hold_port
from calinix.edge import bus
from calinix.errors import ConfigError
from routing import make_config


def test_a_held_port_is_only_for_who_shares_it() -> None:
    """It takes no connection itself; another gateway, of workers too, is told that it is taken."""
    held = hold_port("127.0.0.1", 0)
    port = held.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.socket() as worker:
        worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        worker.bind(("127.0.0.1", port))
        worker.listen(1)
        with pytest.raises(ConfigError, match=r"gateway\.port: cannot listen"):
            hold_port("127.0.0.1", port)
    held.close()


def test_ports_of_ipv4_are_other_ports() -> None:
    """Listening on ::, as one process does it, does not mind who has the port on IPv4."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        hold_port("::", other.getsockname()[1]).close()


@kit.on_loop
async def test_a_report_that_cannot_be_read_ends_nobody(tmp_path: Path) -> None:
    """A fault in one worker must not take the others with it: it is said once, and left out."""
    worker = Worker(make_config(single=2), tmp_path, 0, 0, None)
    good = bus.Report("b", ("single-0",), (), (), b"")
    bad = bus.Report("b", ("single-0",), (), (), b"\xff")
    for payload in (b"\x91\x01", bus.packed(bad), b"", bus.packed(good)):
        worker._link.data_received(bus.frame(bus.Kind.REPORT, payload))
    view = worker.router.steering(asyncio.get_running_loop().time())
    assert view.replicas == 1
    assert not worker.stopping.is_set()
    await worker.stop(0.0)
    assert not (tmp_path / CONFIG_FILE).exists()
