"""Addresses in the configuration: the gateway's own ports, and pods that are none."""

from __future__ import annotations

import pytest

from calinix.config import parse_config
from calinix.errors import ConfigError

PODS = "upstreams: {single: {pods: [{id: p, url: 'http://p:1'}]}}\n"


def problems(text: str) -> list[str]:
    """What is told of a file that cannot be used; empty for one that can."""
    try:
        parse_config(text, "c.yaml")
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    ("gateway", "admin", "clash"),
    [
        ("{port: 7}", "{port: 7}", True),
        ("{port: 7, host: 10.0.0.1}", "{port: 7}", False),
        ("{port: 7}", "{port: 7, enabled: false}", False),
        ("{port: 0}", "{port: 0}", False),
        ("{port: 7, host: 127.0.0.1}", "{port: 7}", True),
    ],
)
def test_ports_clash_only_on_one_address(gateway: str, admin: str, clash: bool) -> None:
    """The same port is refused where both would listen on it, and only there."""
    assert bool(problems(f"gateway: {gateway}\nadmin: {admin}\n{PODS}")) is clash


@pytest.mark.parametrize(
    ("keys", "url", "port"),
    [
        ("gateway: {port: 7}", "http://localhost:7", "gateway.port is 7"),
        ("gateway: {port: 7}", "https://127.3.2.1:7/", "gateway.port is 7"),
        ("gateway: {port: 7}", "http://[::1]:7", "gateway.port is 7"),
        ("gateway: {port: 7}", "http://[::ffff:127.0.0.1]:7", "gateway.port is 7"),
        ("gateway: {port: 7}", "http://0.0.0.0:7", "gateway.port is 7"),
        ("gateway: {port: 7, host: 10.0.0.1}", "http://10.0.0.1:7", "gateway.port is 7"),
        ("gateway: {port: 7, host: Here.}", "http://here:7", "gateway.port is 7"),
        ("gateway: {port: 7, host: '::'}", "http://127.0.0.1:7", "gateway.port is 7"),
        ("gateway: {port: 80}", "http://localhost", "gateway.port is 80"),
        ("gateway: {}", "http://localhost:8080", "gateway.port is 8080"),
        ("admin: {}", "http://localhost:9090", "admin.port is 9090"),
        ("gateway: {port: 0}", "http://localhost:8080", None),
        ("gateway: {port: http}", "http://localhost:8080", None),
        ("gateway: {port: 7}", "http://localhost:77", None),
        ("gateway: {port: 7}", "http://10.0.0.1:7", None),
        ("gateway: {port: 7, host: 10.0.0.1}", "http://localhost:7", None),
        ("gateway: {port: 7, host: 127.0.0.1}", "http://127.0.0.2:7", None),
        ("admin: {enabled: false}", "http://localhost:9090", None),
        ("admin: {port: 7, host: 10.0.0.1}", "http://localhost:7", None),
    ],
)
def test_a_pod_is_not_the_gateway_itself(keys: str, url: str, port: str | None) -> None:
    """An address at which the gateway or its admin port listens is refused, and no other one."""
    text = f"{keys}\n{PODS.replace('http://p:1', url)}"
    # What is wrong with the first line itself is told elsewhere.
    found = [one for one in problems(text) if one.startswith("c.yaml:2: ")]
    where = f"c.yaml:2: upstreams.single.pods[0].url: expected a pod, {url.rstrip('/')!r} is"
    told = f"{where} this gateway itself: {port}; write the engine's port"
    assert found == ([] if port is None else [told])
