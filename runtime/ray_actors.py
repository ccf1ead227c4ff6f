"""Actors on the hosts of a Ray cluster, and which of its hosts are left."""

from __future__ import annotations

import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from autopar.clusters.cluster import Cluster, RayHosts
from autopar.clusters.ray_discovery import (
    VIRTUAL_DEVICES,
    find_hosts,
    import_ray,
    number_hosts,
)
from autopar.errors import HostLostError

from .ray_worker import HostWorker

_log = logging.getLogger("autopar")
START_SECONDS = 120.0
_LOOK_EVERY_SECONDS = 1.0
_THREADS = 6  # a step, a save, and signs of life


def start_actors(
    cluster: Cluster, owner: object
) -> tuple[list[Any], Callable[[], Any]]:
    """An actor on each host, in the order in which they were found; what ends them all.

    Raises:
      HostLostError: a host is gone, or has not enough to spare.
    """
    assert cluster.ray_hosts is not None, "the cluster is one of Ray"
    ray = import_ray()
    from ray.util.placement_group import (
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    hosts = cluster.ray_hosts
    number, count = cluster.num_hosts, cluster.devices_per_host
    try:
        _, found = find_hosts(hosts.address, number, count, hosts.platform)
    except ValueError as error:
        raise hosts_lost(cluster) from error
    share = _share(hosts.platform, count, found[0].kind == VIRTUAL_DEVICES)
    group = placement_group([share] * number, strategy="STRICT_SPREAD")
    actors: list[Any] = []

    def close() -> None:
        if ray.is_initialized():  # else Ray has ended them already
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)

    finish = weakref.finalize(owner, close)
    try:
        _wait_for(group, cluster, share)
    except HostLostError:
        finish()
        raise
    make = ray.remote(HostWorker)
    placed = placement_group_table(group)["bundles_to_node_id"]
    for bundle in number_hosts(placed, ray.nodes()):
        actors.append(
            make.options(
                num_cpus=share.get("CPU", 0),
                num_gpus=share.get("GPU", 0),
                resources={k: v for k, v in share.items() if k not in ("CPU", "GPU")},
                max_concurrency=_THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=bundle
                ),
                runtime_env={"env_vars": _environment(hosts, count)},
            ).remote()
        )
    return actors, finish


def _wait_for(group: Any, cluster: Cluster, share: Mapping[str, float]) -> None:
    """Until every host has reserved its share.

    Raises:
      HostLostError: one is gone meanwhile, or has not enough to spare.
    """
    end = time.monotonic() + START_SECONDS
    while not group.wait(_LOOK_EVERY_SECONDS):
        if num_hosts_alive(cluster) < cluster.num_hosts:
            raise hosts_lost(cluster)
        if time.monotonic() > end:
            raise HostLostError(
                f"The hosts must have {share} to spare, but within {START_SECONDS:g} s "
                f"{cluster.num_hosts} of them had not; end what else runs there.",
                0,
            )


def _share(platform_: str, count: int, is_virtual: bool) -> dict[str, float]:
    """What an actor takes of its host; virtual devices are shared by several."""
    if platform_ != "cpu":
        return {"CPU": 0.01, platform_.upper(): float(count)}
    return {"CPU": 0.01, **({VIRTUAL_DEVICES: 0.01} if is_virtual else {})}


def _environment(hosts: RayHosts, count: int) -> dict[str, str]:
    """What jax reads when it starts on a host."""
    names = {"JAX_PLATFORMS": hosts.lowering_platform}
    if hosts.platform != "cpu":
        return names
    own = os.environ.get("XLA_FLAGS", "")
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", own).split()
    flags.append(f"--xla_force_host_platform_device_count={count}")
    # The default scheduler crashes on some programs with collectives.
    scheduler = "--xla_cpu_enable_concurrency_optimized_scheduler"
    if not any(flag.startswith(scheduler) for flag in flags):
        flags.append(f"{scheduler}=false")
    # With fewer threads than twice the devices, steps that overlap can deadlock.
    threads = max(2 * count, os.cpu_count() or 1)
    return {**names, "XLA_FLAGS": " ".join(flags), "NPROC": str(threads)}


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
        time.sleep(_LOOK_EVERY_SECONDS)
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
