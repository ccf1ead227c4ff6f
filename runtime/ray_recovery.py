"""Which hosts of a Ray cluster are left when some were lost."""

from __future__ import annotations

import logging
import time

from autopar.clusters.cluster import Cluster
from autopar.errors import HostLostError

from .ray_hosts import find_hosts, import_ray

_log = logging.getLogger("autopar")
_PAUSE_SECONDS = 1.0


def cluster_left(cluster: Cluster) -> Cluster:
    """The cluster with the hosts that Ray takes to live, at most as many as it had.

    Waits for as many where `on_failure` says so; else one is enough. A host that hangs
    is among them until Ray gives it up; workers do not start then, and it is asked
    again.

    Raises:
      HostLostError: there are still too few after `wait_seconds`.
    """
    hosts = cluster.ray_hosts
    assert hosts is not None, "the cluster is one of Ray"
    needed = cluster.num_hosts if hosts.on_failure == "wait" else 1
    end = time.monotonic() + hosts.wait_seconds
    while (number := num_hosts_alive(cluster)) < needed:
        if time.monotonic() > end:
            raise HostLostError(
                f"{needed} hosts with {cluster.devices_per_host} {hosts.platform} "
                f"devices must be there to go on, but after {hosts.wait_seconds:g} s "
                f"there are {number}; start hosts with `ray start --address=...`, or "
                f"pass a larger wait_seconds to Cluster.ray().",
                0,
            )
        _log.warning("waiting for hosts: %d of %d are there", number, needed)
        time.sleep(_PAUSE_SECONDS)
    return cluster.with_hosts(min(number, cluster.num_hosts))


def num_hosts_alive(cluster: Cluster) -> int:
    """How many hosts Ray takes to be alive that have the devices."""
    hosts = cluster.ray_hosts
    assert hosts is not None, "the cluster is one of Ray"
    try:
        wanted = cluster.devices_per_host
        return len(find_hosts(hosts.address, None, wanted, hosts.platform)[1])
    except ValueError:  # there is none
        return 0


def hosts_lost(cluster: Cluster) -> HostLostError:
    """The error of a cluster some of whose hosts are gone before workers start.

    They may have been lost while a step was planned: nobody watches them then.
    """
    hosts = cluster.ray_hosts
    assert hosts is not None, "the cluster is one of Ray"
    left = num_hosts_alive(cluster)
    alive = {node["NodeID"] for node in import_ray().nodes() if node["Alive"]}
    gone = [
        (rank, f"the host at {address} (Ray's node {node[:8]})")
        for rank, (node, address) in enumerate(hosts.nodes)
        if node not in alive
    ]
    names = ", ".join(name for _, name in gone) or "some host"
    return HostLostError(
        f"The hosts must live until workers start, but {names} is gone: {left} of "
        f"{cluster.num_hosts} are left; ask for so many with "
        f"Cluster.ray(num_hosts={left}).",
        gone[0][0] if gone else 0,
    )
