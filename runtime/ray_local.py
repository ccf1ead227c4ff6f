"""A Ray cluster of virtual hosts on this machine, to try things out and for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autopar.clusters.ray_discovery import VIRTUAL_DEVICES, import_ray

from .ray_workers import end_live_workers

# Ray gives a frozen host up after seconds instead of a minute, and its workers get as
# much of the machine as the driver: by default they run with a niceness of 15.
_SETTINGS = {
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
}
_OBJECT_STORE_BYTES = 256 << 20


@dataclass(frozen=True)
class LocalHosts:
    """The virtual hosts of a local cluster, which may come and go.

    `cluster` is Ray's own, `node` the arguments of each of its nodes.
    """

    cluster: Any
    node: Mapping[str, Any]

    @property
    def address(self) -> str:
        """The cluster's address."""
        return str(self.cluster.address)

    def add(self) -> Any:
        """Start one more host; it has joined when this returns."""
        added = self.cluster.add_node(**self.node)
        self.cluster.wait_for_nodes()
        return added

    def kill(self, host: Any) -> None:
        """End a host that `add` gave, with all its processes, as if it lost power."""
        self.cluster.remove_node(host, allow_graceful=False)


@contextmanager
def local_ray_hosts(num_hosts: int, devices_per_host: int) -> Iterator[LocalHosts]:
    """Virtual hosts with virtual CPU devices; all their processes end with the context.

    Raises:
      ValueError: a number below one.
      ImportError: ray is not installed.
    """
    for name, count in (("hosts", num_hosts), ("devices per host", devices_per_host)):
        if count < 1:
            raise ValueError(
                f"A local cluster needs 1 or more {name}, but got {count}; use 2 hosts "
                f"of 4 devices."
            )
    ray = import_ray()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    from ray.cluster_utils import Cluster

    node = {
        "num_cpus": max(2, os.cpu_count() or 1),
        "resources": {VIRTUAL_DEVICES: devices_per_host},
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        for _ in range(num_hosts - 1):
            cluster.add_node(**node)
        cluster.wait_for_nodes()
        yield LocalHosts(cluster, node)
    finally:
        if ray.is_initialized() and ray.get_runtime_context().gcs_address == (
            cluster.address
        ):
            end_live_workers()
            ray.shutdown()
        cluster.shutdown()
