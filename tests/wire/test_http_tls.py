"""TLS at both HTTP ends: certificates, verification, refusals that arrive."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
from pathlib import Path

import pytest

from calinix.config import ClientTls, Limits, ServerTls, Timeouts
from calinix.edge.http_client import FetchError, PodClient, fetch
from calinix.edge.http_server import HttpServer, Request
from calinix.edge.tls import client_ssl_context, server_ssl_context
from calinix.errors import ConfigError
from edgekit import LOCAL, Requests, echo
from kit import on_loop, until


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


class Answering:
    """A handler that keeps nothing."""

    def on_request(self, request: Request) -> None:
        """Answers at once."""
        request.conn.respond(200, b"", b"")


@pytest.mark.parametrize("secure", [False, True])
def test_what_a_connection_held_goes_with_it(certificate: ServerTls, secure: bool) -> None:
    """No cycle keeps a closed connection, at either end, until garbage is collected.

    Under TLS each has buffers of hundreds of kilobytes, which collectors do not see.
    """

    def alive() -> int:
        kinds = ("ServerConnection", "PodConnection", "SSLProtocol")
        return sum(type(one).__name__ in kinds for one in gc.get_objects())

    @on_loop
    async def check() -> None:
        loop = asyncio.get_running_loop()
        server = HttpServer(Answering(), loop, Limits(), Timeouts())
        await server.start(LOCAL, 0, ssl=server_ssl_context(certificate) if secure else None)
        url = f"http{'s' if secure else ''}://{LOCAL}:{server.port}"
        context = client_ssl_context(ClientTls(verify=False)) if secure else None
        gc.collect()
        gc.disable()
        try:
            before = alive()
            for _ in range(10):
                client = PodClient(url, loop, connect_timeout_s=5, ssl=context)
                await fetch(client, "POST", "/a", body=b"x")
                client.close()
            await until(lambda: not server.open, "every connection is closed")
            kept = alive() - before
        finally:
            gc.enable()
        await server.drain(0)
        assert kept <= 2  # the last ones may still be on the loop's hands

    check()


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


def test_a_drain_does_not_wait_for_handshakes(certificate: ServerTls) -> None:
    """Clients that connect and then say nothing hold no drain up, however long they may take."""

    @on_loop
    async def check() -> None:
        server = HttpServer(Requests(echo), asyncio.get_running_loop(), Limits(), Timeouts())
        await server.start(LOCAL, 0, ssl=server_ssl_context(certificate))
        silent = [socket.create_connection((LOCAL, server.port)) for _ in range(3)]
        await asyncio.wait_for(server.drain(30), 10)
        assert server.connections == 0
        for client in silent:
            client.close()

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
