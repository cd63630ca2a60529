"""The connections to the pods, by pod id."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator

from calinix.config import Config, PodConfig
from calinix.core.events import Role
from calinix.edge.http_client import PodClient, read_pod_url
from calinix.edge.identify import Identity
from calinix.engines.base import Prefiller
from calinix.engines.mooncake import bootstrap_url
from calinix.engines.protocols import Engine
from calinix.gateway.heads import PodAddress


def pods_by_role(config: Config) -> dict[str, tuple[Role, PodConfig]]:
    """Pod id -> its role and settings, over both groups."""
    upstreams = config.upstreams
    groups: list[tuple[Role, tuple[PodConfig, ...]]] = []
    if upstreams.single is not None:
        groups.append(("single", upstreams.single.pods))
    if upstreams.dispatch is not None:
        groups.append(("prefill", upstreams.dispatch.prefill.pods))
        groups.append(("decode", upstreams.dispatch.decode.pods))
    return {pod.id: (role, pod) for role, pods in groups for pod in pods}


class Upstream:
    """One pod's connections, what is constant in heads sent to it, and what it said that it is."""

    __slots__ = (
        "_bootstrap", "_connect_timeout_s", "_epoch", "_prefiller", "address", "client", "identity",
        "pod",
    )  # fmt: skip

    def __init__(self, pod: PodConfig, client: PodClient, connect_timeout_s: float):
        self.pod = pod
        self.client = client
        self.address = PodAddress(client.host, client.prefix, pod.api_key)
        self.identity: Identity | None = None
        """What it said that it is; None where it was not asked, or not yet."""
        self._connect_timeout_s = connect_timeout_s
        self._bootstrap: PodClient | None = None
        self._prefiller: Prefiller | None = None
        self._epoch = -1

    @property
    def engine(self) -> Engine:
        """As it said; "other" where that is not known."""
        return "other" if self.identity is None else self.identity.engine

    def identify(self, identity: Identity) -> None:
        """It has said what it is."""
        self.identity = identity
        self.forget()

    def prefiller(self, epoch: int) -> Prefiller:
        """How decode pods find this prefill pod; begins anew with the pod's epoch."""
        if self._prefiller is None or self._epoch != epoch:
            host = self.pod.bootstrap_host or read_pod_url(self.pod.url)[0]
            port = self.pod.bootstrap_port
            if port is None and self.identity is not None:
                port = self.identity.bootstrap_port
            self._prefiller = Prefiller(host, port)
            self._epoch = epoch
        return self._prefiller

    def forget(self) -> None:
        """What the bootstrap server has said may be of another process: to be asked again."""
        self._prefiller = None

    def bootstrap(self) -> PodClient:
        """Connections to the pod's bootstrap server."""
        if self._bootstrap is None:
            self._bootstrap = PodClient(
                bootstrap_url(self.prefiller(self._epoch)),
                self.client.loop,
                connect_timeout_s=self._connect_timeout_s,
                max_idle=4,
            )
        return self._bootstrap

    def close(self) -> None:
        """Closes the idle connections."""
        self.client.close()
        if self._bootstrap is not None:
            self._bootstrap.close()


class Upstreams:
    """Pod id -> Upstream; `on_added` and `on_removed` let the probes follow."""

    def __init__(self, config: Config, loop: asyncio.AbstractEventLoop, tls: ssl.SSLContext | None):
        self._loop = loop
        self._tls = tls
        self._connect_timeout_s = config.gateway.timeouts.connect_ms / 1e3
        self._by_id: dict[str, Upstream] = {}
        self.on_added: Callable[[Upstream], None] | None = None
        self.on_removed: Callable[[str], None] | None = None

    def __getitem__(self, pod_id: str) -> Upstream:
        return self._by_id[pod_id]

    def __contains__(self, pod_id: str) -> bool:
        return pod_id in self._by_id

    def __iter__(self) -> Iterator[Upstream]:
        return iter(list(self._by_id.values()))

    def adopt(self, config: Config, tls: ssl.SSLContext | None) -> None:
        """Settings for connections that are opened from now on."""
        self._connect_timeout_s = config.gateway.timeouts.connect_ms / 1e3
        self._tls = tls
        for upstream in self:
            tls_of_pod = tls if upstream.pod.url.startswith("https://") else None
            upstream.client.adopt(self._connect_timeout_s, tls_of_pod)

    def add(self, pod: PodConfig) -> None:
        """Opens nothing yet: connections are made when there is something to send."""
        client = PodClient(
            pod.url,
            self._loop,
            connect_timeout_s=self._connect_timeout_s,
            max_idle=min(pod.max_conns, 256),
            ssl=self._tls if pod.url.startswith("https://") else None,
        )
        upstream = self._by_id[pod.id] = Upstream(pod, client, self._connect_timeout_s)
        if self.on_added is not None:
            self.on_added(upstream)

    def remove(self, pod_id: str) -> None:
        """Closes the idle connections; answers under way go on to their end."""
        upstream = self._by_id.pop(pod_id, None)
        if upstream is not None:
            if self.on_removed is not None:
                self.on_removed(pod_id)
            upstream.close()

    def close(self) -> None:
        """Closes every connection that carries nothing."""
        for upstream in self:
            self.remove(upstream.pod.id)
