"""The test kit itself: a fault proxy that did not fault, or a run that forgave, proves nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import kit
from faultproxy import FaultProxy, reserve_port


class Echo:
    """A server that says back what it hears, and counts the connections that have ended."""

    def __init__(self) -> None:
        self.ended = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()
            self.ended += 1


@contextlib.asynccontextmanager
async def proxied_echo() -> AsyncIterator[tuple[FaultProxy, Echo]]:
    """An echo server behind a fault proxy."""
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with FaultProxy(server.sockets[0].getsockname()[1]) as proxy:
        yield proxy, echo
    server.close()
    await server.wait_closed()


Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(proxy: FaultProxy) -> AsyncIterator[Pair]:
    """A connection through the proxy that has carried b"hello" both ways."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    with contextlib.closing(writer):
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        yield reader, writer


def test_bytes_pass_and_are_counted() -> None:
    """Without a fault the proxy is a wire: same bytes, both ends see the close, all is counted."""

    async def main() -> None:
        async with proxied_echo() as (proxy, echo):
            async with connected(proxy) as (reader, writer):
                payload = bytes(range(256)) * 1000
                writer.write(payload)
                assert await reader.readexactly(len(payload)) == payload
                writer.write_eof()
                assert await reader.read() == b""
            await kit.until(lambda: proxy.open_links == 0, "the link ends")
            assert echo.ended == proxy.connections == 1
            assert proxy.bytes_up == proxy.bytes_down == 5 + len(payload)
            assert proxy.count(b"hello") == 1
            assert bytes(proxy.links[0].down) == b"hello" + payload

    kit.run(main())


@pytest.mark.parametrize("reset", [True, False], ids=["rst", "fin"])
def test_cut_now(reset: bool) -> None:
    """A cut ends open connections at once, with the packet that was asked for; new ones work."""

    async def main() -> None:
        async with proxied_echo() as (proxy, echo):
            async with connected(proxy) as (reader, _):
                proxy.cut(reset=reset)
                if reset:
                    with pytest.raises(ConnectionResetError):
                        await reader.read()
                else:
                    assert await reader.read() == b""
            await kit.until(lambda: echo.ended == 1, "the target hears of the cut")
            async with connected(proxy):
                assert proxy.open_links == 1

    kit.run(main())


@pytest.mark.parametrize("reset", [True, False], ids=["rst", "fin"])
def test_cut_after_bytes(reset: bool) -> None:
    """A later cut lets exactly as many bytes down first, on open connections and on new ones."""

    async def main() -> None:
        async with proxied_echo() as (proxy, _):
            async with connected(proxy) as (reader, writer):
                proxy.cut(after_bytes=7, reset=reset)
                writer.write(b"0123456789")
                assert await reader.readexactly(7) == b"0123456"
                with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            async with connected(proxy) as (reader, writer):
                writer.write(b"0123456789")
                assert await reader.readexactly(2) == b"01"
                with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)

    kit.run(main())


def test_stall_and_restore() -> None:
    """A stalled link stays open, carries nothing either way, and goes on where it was."""

    async def main() -> None:
        async with proxied_echo() as (proxy, _), connected(proxy) as (reader, writer):
            proxy.stall()
            writer.write(b"later")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.05)
            assert proxy.bytes_up == 5
            late, late_writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            late_writer.write(b"new")
            proxy.restore()
            assert await reader.readexactly(5) == b"later"
            assert await late.readexactly(3) == b"new"
            late_writer.close()

    kit.run(main())


def test_slow() -> None:
    """A slow link takes its time: 2,000 bytes at 10,000 a second are 0.2 s, less one piece."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with proxied_echo() as (proxy, _):
            proxy.slow(10_000)
            async with connected(proxy) as (reader, writer):
                start = loop.time()
                writer.write(b"x" * 2000)
                await reader.readexactly(2000)
                assert loop.time() - start >= 0.14

    kit.run(main())


def test_refuse_and_restore() -> None:
    """A refusing proxy gives ECONNREFUSED, leaves open links alone, and comes back on its port."""

    async def main() -> None:
        async with proxied_echo() as (proxy, _), connected(proxy) as (reader, writer):
            proxy.refuse()
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(b"still here")
            assert await reader.readexactly(10) == b"still here"
            proxy.restore()
            async with connected(proxy):
                assert proxy.connections == 2

    kit.run(main())


def test_client_leaves() -> None:
    """When the client closes, the target hears of it."""

    async def main() -> None:
        async with proxied_echo() as (proxy, echo):
            async with connected(proxy):
                assert echo.ended == 0
            await kit.until(lambda: echo.ended == 1, "the target hears of the close")

    kit.run(main())


def test_no_target() -> None:
    """Where nobody listens behind the proxy, the client's connection is reset."""

    async def main() -> None:
        with reserve_port() as holder:
            async with FaultProxy(holder.getsockname()[1]) as proxy:
                reader, _ = await asyncio.open_connection("127.0.0.1", proxy.port)
                with pytest.raises(ConnectionResetError):
                    await reader.read()

    kit.run(main())


def test_run_forgives_no_unhandled_exception() -> None:
    """An exception in a loop callback fails the run, though nobody awaited it."""

    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(0.01)

    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        kit.run(main())


def test_run_forgives_no_task_left() -> None:
    """A task that outlives the run fails it."""
    kept: list[asyncio.Task[None]] = []

    async def main() -> None:
        kept.append(asyncio.get_running_loop().create_task(asyncio.sleep(60), name="stray"))

    with pytest.raises(AssertionError, match="stray"):
        kit.run(main())


def test_until_names_what_was_missed() -> None:
    """A condition that never holds fails with its name."""
    with pytest.raises(AssertionError, match="the moon"):
        kit.run(kit.until(lambda: False, "the moon", timeout_s=0.05))


HEAD = b"HTTP/1.1 200 OK\r\nA: b\r\n"


@pytest.mark.parametrize(
    ("wire", "body", "complete"),
    [
        (HEAD + b"content-length: 2\r\n\r\nok", b"ok", True),
        (HEAD + b"content-length: 3\r\n\r\nok", b"ok", False),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", b"ok", True),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nok\r\n", b"ok", False),
        (HEAD + b"transfer-encoding: chunked\r\n\r\na\r\nok", b"ok", False),
        (HEAD + b"\r\nto the end", b"to the end", True),
        (HEAD, b"", False),
    ],
)
def test_replies_are_read(wire: bytes, body: bytes, complete: bool) -> None:
    """A reply's body is decoded, and one that broke off is told from one that ended."""
    reply = kit.parse_reply(wire)
    assert (reply.body, reply.complete) == (body, complete)
    assert reply.status == (200 if b"\r\n\r\n" in wire else 0)
