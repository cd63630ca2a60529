"""TLS contexts from the configuration: the inference port's and the one towards https pods."""

from __future__ import annotations

import ssl
from pathlib import Path

from calinix.config import ClientTls, ServerTls
from calinix.errors import ConfigError


def server_ssl_context(tls: ServerTls) -> ssl.SSLContext:
    """The inference port's certificate. Raises ConfigError naming the file at fault."""
    _check_pem(tls.cert_file, "CERTIFICATE")
    _check_pem(tls.key_file, "PRIVATE KEY")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{tls.cert_file} with {tls.key_file}: {error}"]) from error
    return context


def client_ssl_context(tls: ClientTls) -> ssl.SSLContext:
    """How https pods are verified. Raises ConfigError naming the file at fault."""
    if tls.ca_file is not None:
        _check_pem(tls.ca_file, "CERTIFICATE")
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{tls.ca_file}: {error}"]) from error
    context.set_alpn_protocols(["http/1.1"])
    if not tls.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _check_pem(path: str, kind: str) -> None:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error
    if f"{kind}-----".encode("ascii") not in text:
        raise ConfigError([f"{path}: holds no PEM block of a {kind.lower()}"])
