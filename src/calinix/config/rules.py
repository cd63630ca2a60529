"""What must hold between the keys of one file: groups, ids, URLs, counts, ports, files."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import msgspec

from calinix.config.schema import Admin, CacheRegistry, Gateway, Passive
from calinix.config.source import Problem
from calinix.config.tokens import hf_path
from calinix.config.walk import quoted

GROUPS = ("single", "dispatch")
POD_LISTS = (
    "upstreams.single.pods",
    "upstreams.dispatch.prefill.pods",
    "upstreams.dispatch.decode.pods",
)
HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*\.?")
ENDPOINT = "expected http://host:port or https://host:port"
DEFAULT_PORTS = {"http": 80, "https": 443}
LAST_PORT = 65535
PORT = re.compile(r":([0-9]{1,20})$")
FILES = (
    "gateway.tls.certFile",
    "gateway.tls.keyFile",
    "gateway.tokenizing.chatTemplate",
    "upstreams.tls.caFile",
)
ANY_HOST = {"0.0.0.0", "::"}  # noqa: S104
THIS_MACHINE = ANY_HOST | {"localhost", "127.0.0.1", "::1"}
"""Hosts that lead to this machine, those that mean any address of it too."""

Fault = tuple[str, str]
"""(path, what is wrong)"""


class Draft:
    """A file as plain data, without what was wrong by itself, and the line of every path."""

    def __init__(self, tree: dict[str, object], lines: dict[str, int]):
        self.tree = tree
        self.lines = lines

    def get(self, path: str, default: object = None) -> object:
        """The value at a dotted path; `default` where nothing (good) stands."""
        node: object = self.tree
        for key in path.split("."):
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node

    def absent(self, path: str) -> bool:
        """Nothing stands there, or null; what is wrong by itself is not absent."""
        return path not in self.lines or (self.get(path, 0) is None)

    def pods(self, group: str) -> Iterator[tuple[str, dict[str, object]]]:
        """(path, pod) of every pod of one list."""
        pods = self.get(group)
        if isinstance(pods, list):
            numbered = enumerate(pods)
            yield from ((f"{group}[{i}]", pod) for i, pod in numbered if isinstance(pod, dict))

    def line(self, path: str) -> int:
        """The line of the path, or of what it stands in."""
        while path and path not in self.lines:
            path = path.rpartition(".")[0]
        return self.lines.get(path, 1)


def broken_rules(draft: Draft) -> list[Problem]:
    """Every rule that the file breaks. URLs come out with a lower-case scheme and no slash."""
    faults = [fault for rule in RULES for fault in rule(draft)]
    return [Problem(draft.line(path), 0, path, text) for path, text in faults]


def some_group_is_there(draft: Draft) -> Iterator[Fault]:
    """There are single pods, or dispatch pods."""
    if isinstance(draft.get("upstreams"), dict) and all(
        draft.absent(f"upstreams.{group}") for group in GROUPS
    ):
        yield "upstreams", "expected single or dispatch (or both), found neither"


def default_mode_is_there(draft: Draft) -> Iterator[Fault]:
    """`gateway.defaultMode` names a group of the file."""
    mode = draft.get("gateway.defaultMode")
    if mode in GROUPS and draft.absent(f"upstreams.{mode}"):
        yield "gateway.defaultMode", f"found {mode}, but there is no upstreams.{mode}"


def ids_are_unique(draft: Draft) -> Iterator[Fault]:
    """An id names one pod of the whole file."""
    seen: dict[object, str] = {}
    for group in POD_LISTS:
        for path, pod in draft.pods(group):
            if "id" in pod and (first := seen.setdefault(pod["id"], path)) != path:
                where = f"{first} (line {draft.line(f'{first}.id')})"
                yield f"{path}.id", f"expected an id of its own, {pod['id']!r} is that of {where}"


def urls_are_endpoints(draft: Draft) -> Iterator[Fault]:
    """Each URL is an endpoint that its role does not have yet."""
    for group in POD_LISTS:
        seen: dict[str, str] = {}
        for path, pod in draft.pods(group):
            url = pod.get("url")
            if not isinstance(url, str):
                continue
            root, endpoint, fault = read_url(url)
            if fault:
                yield f"{path}.url", fault
                continue
            pod["url"] = root
            if (first := seen.setdefault(endpoint, path)) != path:
                where = f"{first} (line {draft.line(f'{first}.url')})"
                yield f"{path}.url", f"expected a URL of its own, {url!r} is that of {where}"


def every_pod_has_a_slot(draft: Draft) -> Iterator[Fault]:
    """The registry can tell all pods of all groups apart."""
    most = draft.get("cacheRegistry.maxPods", CacheRegistry().max_pods)
    count = sum(1 for group in POD_LISTS for _ in draft.pods(group))
    if isinstance(most, int) and count > most:
        yield "upstreams", f"expected at most {most} pods (cacheRegistry.maxPods), found {count}"


def models_stand_once(draft: Draft) -> Iterator[Fault]:
    """A pod says what it serves by `model` or by `models`."""
    for group in POD_LISTS:
        for path, pod in draft.pods(group):
            if pod.get("model") is not None and pod.get("models"):
                yield f"{path}.model", "expected model or models, found both"


def rests_are_in_order(draft: Draft) -> Iterator[Fault]:
    """The longest rest of an ejected pod is not shorter than the first one."""
    path = "health.passive.maxEjectMs"
    first = draft.get("health.passive.ejectMs", Passive().eject_ms)
    longest = draft.get(path, Passive().max_eject_ms)
    if isinstance(first, int) and isinstance(longest, int) and longest < first:
        where = path if path in draft.lines else "health.passive.ejectMs"
        yield where, f"expected maxEjectMs >= ejectMs, found {longest} and {first}"


def ports_differ(draft: Draft) -> Iterator[Fault]:
    """The admin port is not the inference port of the same address."""
    port = draft.get("admin.port", Admin().port)
    hosts = {draft.get("gateway.host", Gateway().host), draft.get("admin.host", Admin().host)}
    if draft.get("admin.enabled", True) is False or port == 0:
        return
    if port == draft.get("gateway.port", Gateway().port) and (len(hosts) == 1 or hosts & ANY_HOST):
        where = "admin.port" if "admin.port" in draft.lines else "gateway.port"
        yield where, f"expected two ports, found {port} for both gateway.port and admin.port"


def no_pod_is_the_gateway(draft: Draft) -> Iterator[Fault]:
    """A pod's address is none that the gateway listens on: its requests would come back for ever.

    Another machine's name for this one cannot be seen here.
    """
    own = [("gateway", draft.get("gateway.host", Gateway().host), Gateway().port)]
    if draft.get("admin.enabled", True) is not False:
        own.append(("admin", draft.get("admin.host", Admin().host), Admin().port))
    for group in POD_LISTS:
        for path, pod in draft.pods(group):
            url = pod.get("url")
            _, endpoint, fault = read_url(url) if isinstance(url, str) else ("", "", "none")
            if fault:
                continue
            host, _, port = endpoint.partition("://")[2].rpartition(":")
            for section, listening, default in own:
                key = f"{section}.port"
                bound = draft.get(key, default if draft.absent(key) else None)
                if port == str(bound) and _leads_to(_plain(host), _plain(str(listening))):
                    text = f"expected a pod, {quoted(str(url))} is this gateway itself"
                    yield f"{path}.url", f"{text}: {key} is {bound}; write the engine's port"


def _leads_to(host: str, listening: str) -> bool:
    """Whether who connects to `host` comes to this machine where it listens on `listening`."""
    if host == listening or {host, listening} <= THIS_MACHINE:
        return True
    return listening in ANY_HOST and _is_loopback(host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _plain(host: str) -> str:
    """A host in one spelling."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".")
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _no_ports(endpoint: str, ranks: int) -> str:
    """What is wrong with the ports that data parallel ranks have at an endpoint; '' is nothing."""
    if endpoint.startswith("ipc:"):
        return f"expected tcp for ranks, found {quoted(endpoint)}" if ranks > 1 else ""
    port = int(endpoint.rpartition(":")[2])
    if port + ranks - 1 > LAST_PORT or (port == 0 and ranks > 1):
        return f"expected ports up to {LAST_PORT} for {ranks} ranks, found {quoted(endpoint)}"
    return ""


def kv_events_have_an_address(draft: Draft) -> Iterator[Fault]:
    """Replays are only asked of a pod that is listened to; ranks are counted up from a port."""
    bind = draft.get("kvEvents.bind")
    for group in POD_LISTS:
        for path, pod in draft.pods(group):
            events = pod.get("kvEvents")
            if not isinstance(events, dict):
                continue
            endpoint, replays = events.get("endpoint"), events.get("replayEndpoint")
            ranks = events.get("ranks", 1)
            for key in ("endpoint", "replayEndpoint"):
                if isinstance(said := events.get(key), str) and said.startswith("tcp://*"):
                    wanted = "expected the pod's address, as the gateway reaches it, found"
                    yield f"{path}.kvEvents.{key}", f"{wanted} {quoted(said)}"
            if replays is not None and endpoint is None and bind is None:
                yield (
                    f"{path}.kvEvents.replayEndpoint",
                    "expected an endpoint beside it, or kvEvents.bind, found neither",
                )
            if not isinstance(ranks, int):
                continue
            for key, name in (("endpoint", endpoint), ("replayEndpoint", replays)):
                if isinstance(name, str) and (fault := _no_ports(name, ranks)):
                    yield f"{path}.kvEvents.{key}", fault
            if isinstance(bind, str) and endpoint is None and (fault := _no_ports(bind, ranks)):
                yield "kvEvents.bind", fault


def one_process_binds(draft: Draft) -> Iterator[Fault]:
    """Pods connect to one process: of several workers only one could bind."""
    workers = draft.get("gateway.workers", 1)
    if isinstance(workers, int) and workers > 1 and draft.get("kvEvents.bind") is not None:
        text = f"expected none with gateway.workers: {workers}; give each pod an endpoint instead"
        yield "kvEvents.bind", text


def tokens_can_be_made(draft: Draft) -> Iterator[Fault]:
    """`gateway.tokenizer: hf:` names a tokenizer, and its template has a JSON object."""
    tokenizer = draft.get("gateway.tokenizer")
    path = hf_path(tokenizer) if isinstance(tokenizer, str) else None
    if path is not None:
        file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
        if not os.path.isfile(file):
            fault = f"expected a tokenizer.json, found none at {quoted(path)}"
            if not os.path.exists(path):
                fault += "; write the model's folder on this machine, not its name on a hub"
            yield "gateway.tokenizer", fault
    where = "gateway.tokenizing.templateArguments"
    if isinstance(text := draft.get(where), str):
        try:
            msgspec.json.decode(text, type=dict[str, object])
        except msgspec.MsgspecError:
            yield where, f"expected a JSON object, found {quoted(text)}"


def the_threshold_can_hold(draft: Draft) -> Iterator[Fault]:
    """SGLang's decode pods cannot do without a prefill pod."""
    path = "upstreams.dispatch.prefillThreshold"
    threshold = draft.get(path, 0)
    if draft.get("upstreams.dispatch.protocol") == "sglang" and threshold:
        yield path, f"expected 0 with protocol: sglang, found {threshold}"


def locality_has_a_meaning(draft: Draft) -> Iterator[Fault]:
    """Only a decode pod has a pod to be near to."""
    for role in ("single", "prefill"):
        path = f"gateway.strategy.{role}.locality"
        if draft.get(path):
            yield path, "expected 0: only decode pods have a prefill pod to be near to"


def files_are_there(draft: Draft) -> Iterator[Fault]:
    """Certificates, keys and templates can be opened."""
    for path in FILES:
        name = draft.get(path)
        if not isinstance(name, str):
            continue
        if not os.path.isfile(name):
            yield path, f"expected a file, found none at {quoted(name)}"
        elif not os.access(name, os.R_OK):
            yield path, f"expected a readable file, {quoted(name)} is not"


RULES: tuple[Callable[[Draft], Iterator[Fault]], ...] = (
    some_group_is_there,
    default_mode_is_there,
    ids_are_unique,
    urls_are_endpoints,
    every_pod_has_a_slot,
    models_stand_once,
    rests_are_in_order,
    ports_differ,
    no_pod_is_the_gateway,
    the_threshold_can_hold,
    kv_events_have_an_address,
    one_process_binds,
    tokens_can_be_made,
    locality_has_a_meaning,
    files_are_there,
)


def read_url(url: str) -> tuple[str, str, str]:
    """(URL without a slash, the same in one spelling, ''), or ('', '', what is wrong)."""
    if "@" in url:
        # What stands before it may be a password: it is not shown.
        return "", "", f"{ENDPOINT}, found one with a user; a pod's key goes to apiKey"
    text = f"{ENDPOINT}, found {quoted(url)}"
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        return "", "", text
    try:
        parts = urlsplit(url)
        host, said = parts.hostname or "", PORT.search(parts.netloc)
        if said and not 0 < int(said[1]) <= LAST_PORT:
            return "", "", f"{text}; a port is from 1 to {LAST_PORT}"
        port = parts.port
    except ValueError:
        return "", "", text
    if "://" not in url:
        return "", "", f"{text}; did you mean {quoted('http://' + url)}?"
    if parts.scheme not in DEFAULT_PORTS:
        return "", "", text
    root = f"{parts.scheme}://{parts.netloc}"
    if parts.path not in {"", "/"} or "?" in url or "#" in url:
        return "", "", f"{text}; remove what follows {quoted(root)}"
    if not _is_host(host, parts.netloc) or parts.netloc.endswith(":"):
        return "", "", text
    return root, f"{parts.scheme}://{host}:{port or DEFAULT_PORTS[parts.scheme]}", ""


def _is_host(host: str, netloc: str) -> bool:
    """A name, an IPv4 address, or an IPv6 address in brackets."""
    if not netloc.startswith("["):
        return HOST.fullmatch(host) is not None
    try:
        return bool(ipaddress.IPv6Address(host)) and "%" not in host
    except ValueError:
        return False
