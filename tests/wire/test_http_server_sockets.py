"""The server end of HTTP/1.1 on real sockets: half-closed, gone, slow, large, drained, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
from pathlib import Path

import pytest

from calinix.config import ClientTls, Limits, ServerTls, Timeouts
from calinix.edge.http_client import FetchError, PodClient, fetch
from calinix.edge.http_server import HttpServer, Request
from calinix.edge.tls import client_ssl_context, server_ssl_context
from calinix.errors import ConfigError
from edgekit import LOCAL, Client, Requests, echo, reset, serving, talk
from kit import on_loop, until

GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"
CLOSE = b"GET /x HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@on_loop
async def test_a_half_closed_client_gets_its_answer() -> None:
    """Requests before the half-close are answered, also much later; then the server closes."""
    loop = asyncio.get_running_loop()
    for version in (b"HTTP/1.1", b"HTTP/1.0"):
        line = b"GET /x %b\r\nhost: a\r\nconnection: keep-alive\r\n\r\n" % version

        def answer_later(request: Request) -> None:
            loop.call_later(0.3, echo, request)

        seen = Requests(answer_later)
        async with serving(seen) as server:
            answer = await talk(server.port, line * 2, half_close=True)
            heads = answer.replace(CONTINUE, b"").split(b"HTTP/1.1 ")[1:]
            assert [head[:6] for head in heads] == [b"200 OK"] * 2
            assert answer.endswith(b"GET /x ")


@on_loop
async def test_a_half_closed_client_is_streamed_to() -> None:
    """A stream goes on after the half-close, to its end."""

    async def stream(request: Request) -> None:
        request.conn.begin(200, b"", None)
        for n in range(20):
            await asyncio.sleep(0.01)
            request.conn.write(b"%d," % n)
        request.conn.write(b"", last=True)

    tasks = set()
    async with serving(Requests(lambda r: tasks.add(asyncio.ensure_future(stream(r))))) as server:
        answer = await talk(server.port, GET, half_close=True)
        assert answer.count(b",\r\n") == 20
        assert answer.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("begun", [False, True])
@on_loop
async def test_a_client_that_goes_is_seen_at_once(how: str, begun: bool) -> None:
    """Closed or reset, before the answer or within it: heard of at once, and only once."""
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
        if how == "reset":
            reset(writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        if begun and how == "close":  # what is written next finds it out
            await asyncio.sleep(0.02)
            for connection in tuple(server.open):
                connection.write(b"y")
        await until(lambda: client.heard == ["gone"], "the handler hears of it", 0.5)
        assert server.connections == 0


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


# ---- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> ServerTls:
    """A self-signed certificate of 127.0.0.1 and localhost."""
    import datetime as dt
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "calinix test")])
    names: list[x509.GeneralName] = [
        x509.DNSName("localhost"),
        x509.IPAddress(ipaddress.ip_address(LOCAL)),
    ]
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return ServerTls(cert_file=str(folder / "cert.pem"), key_file=str(folder / "key.pem"))


def test_https_both_ways(certificate: ServerTls) -> None:
    """A request and a large answer over TLS, kept alive; the client verifies, or not, as told."""

    @on_loop
    async def check() -> None:
        loop = asyncio.get_running_loop()
        server = HttpServer(Requests(echo), loop, Limits(), Timeouts())
        await server.start(LOCAL, 0, ssl=server_ssl_context(certificate))
        url = f"https://{LOCAL}:{server.port}"
        trusting = ClientTls(ca_file=certificate.cert_file)
        for tls in (trusting, ClientTls(verify=False)):
            client = PodClient(url, loop, connect_timeout_s=5, ssl=client_ssl_context(tls))
            for size in (0, 1, 2_000_000):
                head, body = await fetch(client, "POST", "/a", body=b"x" * size)
                assert (head.status, body) == (200, b"POST /a " + b"x" * size)
            head, _ = await fetch(client, "POST", "/a", [(b"connection", b"close")])
            assert head.header(b"connection") == b"close"
            client.close()
        distrusting = PodClient(url, loop, connect_timeout_s=5)
        with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
            await fetch(distrusting, "GET", "/")
        await server.drain(5)
        assert server.connections == 0

    check()


def test_a_refusal_over_tls(certificate: ServerTls) -> None:
    """An error's answer, and its end, reach a TLS client."""

    def ask(port: int) -> bytes:
        context = ssl.create_default_context(cafile=certificate.cert_file)
        with socket.create_connection((LOCAL, port)) as raw:
            raw.settimeout(10)
            with context.wrap_socket(raw, server_hostname="localhost") as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                return b"".join(iter(lambda: sock.recv(65536), b""))

    @on_loop
    async def check() -> None:
        server = HttpServer(Requests(echo), asyncio.get_running_loop(), Limits(), Timeouts())
        await server.start(LOCAL, 0, ssl=server_ssl_context(certificate))
        answer = await asyncio.to_thread(ask, server.port)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert answer.endswith(b"}}")
        await server.drain(5)

    check()


def test_certificates_that_cannot_be_used_are_named(certificate: ServerTls, tmp_path: Path) -> None:
    """Each error names the file at fault."""
    (tmp_path / "empty.pem").write_text("")
    empty, absent = str(tmp_path / "empty.pem"), str(tmp_path / "absent.pem")
    broken = str(tmp_path / "broken.pem")
    (tmp_path / "broken.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    )
    cert, key = certificate.cert_file, certificate.key_file
    for server_tls, named in (
        (ServerTls(cert_file=absent, key_file=key), absent),
        (ServerTls(cert_file=empty, key_file=key), empty),
        (ServerTls(cert_file=cert, key_file=absent), absent),
        (ServerTls(cert_file=cert, key_file=cert), cert),
        (ServerTls(cert_file=broken, key_file=key), broken),
    ):
        with pytest.raises(ConfigError, match=named):
            server_ssl_context(server_tls)
    for client_tls in (absent, empty, broken):
        with pytest.raises(ConfigError, match=client_tls):
            client_ssl_context(ClientTls(ca_file=client_tls))
