"""The server end of HTTP/1.1 on real sockets: gone, slow, large, drained."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket

import pytest

from calinix.config import Limits, Timeouts
from calinix.edge.http_server import HttpServer, Request
from edgekit import LOCAL, Client, Requests, echo, reset, serving, talk
from kit import on_loop, until

GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
CLOSE = b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("begun", [False, True])
@on_loop
async def test_a_client_that_goes_is_seen_at_once(how: str, begun: bool) -> None:
    """Closed, reset or half-closed, before or within the answer: heard of at once, only once."""
    client = Client()

    def answer(request: Request) -> None:
        request.conn.stream = client
        if begun:
            request.conn.begin(200, b"", None)
            request.conn.write(b"x")

    async with serving(Requests(answer)) as server:
        reader, writer = await asyncio.open_connection(LOCAL, server.port)
        writer.write(GET)
        if begun:
            await reader.readuntil(b"1\r\nx\r\n")
        await until(lambda: server.connections == 1, "the request")
        await asyncio.sleep(0.02)
        if how == "half-close":
            writer.write_eof()
        else:
            if how == "reset":
                reset(writer)
            writer.close()
        await until(lambda: client.heard == ["gone"], "the handler hears of it", 0.5)
        assert server.connections == 0
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@on_loop
async def test_a_refusal_outlives_a_large_body() -> None:
    """A client that reads only after it has sent 30 MB still reads its 413."""

    def upload(port: int) -> bytes:
        with socket.create_connection((LOCAL, port)) as sock:
            sock.sendall(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 30000000\r\n\r\n")
            for _ in range(30):
                sock.sendall(bytes(1_000_000))
            sock.settimeout(10)
            return sock.makefile("rb").read()

    async with serving(Requests(echo), Limits(body_bytes=1000)) as server:
        for _ in range(5):
            answer = await asyncio.to_thread(upload, server.port)
            assert answer.startswith(b"HTTP/1.1 413 Content Too Large\r\n")
            assert answer.endswith(b"}}")


@on_loop
async def test_a_client_that_reads_nothing_gets_few_of_its_pipelined_requests_served() -> None:
    """Thousands of requests in one read: few answers wait at a time, and none is lost."""
    count, body = 3000, bytes(10_000)
    seen = Requests(lambda request: request.conn.respond(200, b"", body))
    async with serving(seen) as server:
        loop = asyncio.get_running_loop()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.setblocking(False)
        await loop.sock_connect(sock, (LOCAL, server.port))
        await loop.sock_sendall(sock, GET * count)
        await until(lambda: bool(seen.seen), "the first request")
        await asyncio.sleep(0.2)
        assert len(seen.seen) * len(body) < 10_000_000
        got = 0
        while got < count * len(body):
            got += len(await loop.sock_recv(sock, 1 << 20))
        assert len(seen.seen) == count
        sock.close()


@on_loop
async def test_the_next_request_waits_until_a_long_answer_has_been_taken() -> None:
    """Who answers the next request is the one who hears of a slow client: not too early."""
    body = bytes(24_000_000)
    seen = Requests(lambda request: request.conn.respond(200, b"", body))
    async with serving(seen) as server:
        reader, writer = await asyncio.open_connection(LOCAL, server.port)
        writer.write(GET + GET)
        await until(lambda: bool(seen.seen), "the first request")
        await asyncio.sleep(0.05)
        assert len(seen.seen) == 1
        got = 0
        while got < 2 * len(body):
            got += len(await reader.read(1 << 20))
        assert len(seen.seen) == 2
        writer.close()


@on_loop
async def test_bad_bytes_do_not_hurt_the_others() -> None:
    """While one client is refused, another's connection goes on."""
    async with serving(Requests(echo)) as server:
        reader, writer = await asyncio.open_connection(LOCAL, server.port)
        for bad in (
            b"\0",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            answer = await talk(server.port, bad)
            assert answer[9:10] in b"45"
            writer.write(GET)
            assert await reader.readuntil(b"GET /x ")
        writer.close()


@on_loop
async def test_python_s_own_client_is_served() -> None:
    """http.client: kept connections, large bodies, HEAD, an `Expect`, a stream."""

    def answer(request: Request) -> None:
        if request.path == "/stream":
            request.conn.begin(200, b"", None)
            for n in range(3):
                request.conn.write(b"%d" % n)
            request.conn.write(b"end", last=True)
        else:
            echo(request)

    def drive(port: int) -> None:
        client = http.client.HTTPConnection(LOCAL, port)
        for size in (0, 1, 100_000, 5_000_000):
            client.request("POST", "/a", body=b"x" * size)
            assert client.getresponse().read() == b"POST /a " + b"x" * size
        client.request("POST", "/a", body=iter([b"one", b"two"]), encode_chunked=True,
                       headers={"transfer-encoding": "chunked"})  # fmt: skip
        assert client.getresponse().read() == b"POST /a onetwo"
        client.request("HEAD", "/a")
        assert client.getresponse().read() == b""
        client.request("POST", "/a", body=b"x", headers={"expect": "100-continue"})
        assert client.getresponse().read() == b"POST /a x"
        client.request("GET", "/stream")
        assert client.getresponse().read() == b"012end"
        client.close()

    async with serving(Requests(answer)) as server:
        await asyncio.to_thread(drive, server.port)


@on_loop
async def test_a_slow_client_holds_the_stream_back() -> None:
    """The handler hears `blocked` within a bounded buffer, and `ready` once the client reads."""
    seen = Requests()
    client = Client()
    async with serving(seen) as server:
        reader, writer = await asyncio.open_connection(LOCAL, server.port)
        writer.write(CLOSE)
        await until(lambda: bool(seen.seen), "the request")
        conn = seen.seen[0].conn
        conn.stream = client
        conn.begin(200, b"", None)
        written = 0
        while client.heard != ["blocked"]:
            conn.write(b"x" * 65536)
            written += 65536
            assert written < 64 * 1024 * 1024
            await asyncio.sleep(0)
        got = 0
        while client.heard != ["blocked", "ready"]:
            got += len(await reader.read(1 << 20))
        conn.write(b"", last=True)
        got += len(await reader.read())
        assert got > written
        writer.close()


@on_loop
async def test_a_drained_server_finishes_what_it_owes() -> None:
    """Idle connections close, owed answers say `connection: close`, new ones are refused."""
    seen = Requests()
    server = HttpServer(seen, asyncio.get_running_loop(), Limits(), Timeouts())
    await server.start(LOCAL, 0)
    idle_reader, idle_writer = await asyncio.open_connection(LOCAL, server.port)
    reader, writer = await asyncio.open_connection(LOCAL, server.port)
    half_reader, half_writer = await asyncio.open_connection(LOCAL, server.port)
    writer.write(GET)
    half_writer.write(GET[:-2])
    await until(lambda: bool(seen.seen) and server.connections == 3, "the request")
    await asyncio.sleep(0.02)
    draining = asyncio.ensure_future(server.drain(10))
    assert await idle_reader.read() == b""
    with pytest.raises(ConnectionError):
        await asyncio.open_connection(LOCAL, server.port)
    assert not draining.done()
    seen.seen[0].conn.respond(200, b"", b"ok")
    assert b"connection: close" in await reader.read()
    writer.close()
    half_writer.write(GET[-2:])
    await until(lambda: len(seen.seen) == 2, "the request that was half here")
    seen.seen[1].conn.respond(200, b"", b"ok")
    assert b"connection: close" in await half_reader.read()
    half_writer.close()
    idle_writer.close()
    await draining
    assert server.connections == 0


@on_loop
async def test_a_drain_serves_connections_that_were_made_before_it() -> None:
    """The kernel had taken them, and their requests, while the loop was at work elsewhere."""
    async with serving(Requests(echo)) as server:
        clients = [socket.create_connection((LOCAL, server.port)) for _ in range(8)]
        for client in clients[1:]:
            client.sendall(GET)
            client.setblocking(False)
        draining = asyncio.ensure_future(server.drain(10))
        loop = asyncio.get_running_loop()
        for client in clients[1:]:
            assert (await loop.sock_recv(client, 65536)).startswith(b"HTTP/1.1 200 OK\r\n")
        await draining  # the first one, which asks for nothing, does not hold it up
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOCAL, server.port))
        for client in clients:
            client.close()


@on_loop
async def test_a_drain_that_takes_too_long_drops_what_is_left() -> None:
    """After its time-out the handler hears that its clients are gone."""
    client = Client()

    def install(request: Request) -> None:
        request.conn.stream = client

    server = HttpServer(Requests(install), asyncio.get_running_loop(), Limits(), Timeouts())
    await server.start(LOCAL, 0)
    reader, writer = await asyncio.open_connection(LOCAL, server.port)
    writer.write(GET)
    await until(lambda: server.connections == 1, "the connection")
    await asyncio.sleep(0.02)
    await server.drain(0.05)
    assert client.heard == ["gone"]
    assert server.connections == 0
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()


@on_loop
async def test_the_server_sweeps_by_itself() -> None:
    """A request that does not arrive gets its 408 without anybody's doing."""
    async with serving(Requests(echo), timeouts=Timeouts(client_ms=100)) as server:
        answer = await talk(server.port, GET[:-2])
        assert answer.startswith(b"HTTP/1.1 408 ")


@on_loop
async def test_a_bound_socket_is_listened_on() -> None:
    """Workers share a port by sockets that are bound already."""
    sock = socket.socket()
    sock.bind((LOCAL, 0))
    server = HttpServer(Requests(echo), asyncio.get_running_loop(), Limits(), Timeouts())
    await server.start("", 0, sock=sock)
    assert server.port == sock.getsockname()[1]
    assert (await talk(server.port, CLOSE)).endswith(b"GET /x ")
    await server.drain(1)


@pytest.mark.parametrize("how", ["abort", "break_off", "drop"])
@on_loop
async def test_half_an_answer_is_not_taken_for_a_whole_one(how: str) -> None:
    """HTTP/1.0 ends a stream with the connection: one that breaks off ends in a reset."""
    seen = Requests()
    async with serving(seen) as server:
        for version, broken in ((b"HTTP/1.0", True), (b"HTTP/1.1", False)):
            reader, writer = await asyncio.open_connection(LOCAL, server.port)
            writer.write(GET.replace(b"HTTP/1.1", version))
            await until(lambda: bool(seen.seen), "the request")
            conn = seen.seen.pop().conn
            conn.begin(200, b"", None)
            conn.write(b"half")
            await reader.readuntil(b"half")
            getattr(conn, how)()
            if broken:
                with pytest.raises(ConnectionResetError):
                    await reader.read()
            else:
                assert not (await reader.read()).endswith(b"0\r\n\r\n")
            writer.close()
