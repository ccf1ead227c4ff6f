"""Clusters of several kinds of hosts: what each part is, and what all have together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .hardware import Device, Link

_Cluster = TypeVar("_Cluster", bound=Any)  # `Cluster`, whose file imports this one


@dataclass(frozen=True)
class JoinedFile:
    """What the file of a joined cluster has: its name, and a table for each part."""

    name: str
    parts: Sequence[Any]


def host_parts(cluster: Any) -> tuple[int, ...]:
    """By host, which of the cluster's parts it is of; 0 where all are equal."""
    numbers = [part.num_hosts for part in cluster.parts] or [cluster.num_hosts]
    return tuple(i for i, number in enumerate(numbers) for _ in range(number))


def cluster_around(cluster: _Cluster, first: int, number: int) -> _Cluster:
    """What `number` devices from device `first` on are of: one part, or all."""
    inside = cluster.devices_per_host
    hosts = host_parts(cluster)[first // inside : (first + number - 1) // inside + 1]
    is_one = bool(cluster.parts) and len(set(hosts)) == 1
    return cluster.parts[hosts[0]] if is_one else cluster


def join_clusters(parts: Sequence[_Cluster], name: str | None = None) -> _Cluster:
    """One cluster of the hosts of all `parts`, in their order.

    What spans hosts of several parts counts on what the least of them has: a step over
    all devices waits for the slowest.

    Raises:
      ValueError: there are no two parts, a part is of several kinds or of Ray, or their
        hosts have unequal numbers of devices.
    """
    if len(parts) < 2 or any(part.parts or part.ray_hosts for part in parts):
        raise ValueError(
            f"a cluster is joined of two or more clusters of equal hosts, none of them "
            f"of Ray, but got {[part.name for part in parts]}."
        )
    sizes = {part.devices_per_host for part in parts}
    if len(sizes) > 1:
        raise ValueError(
            f"hosts of a joined cluster have equally many devices, but got "
            f"{sorted(sizes)}; say how many of each host to use, such as "
            f"'2x4xH100+2x4xV100'."
        )
    links = [each for part in parts for each in (part.host_link, part.network_link)]
    return replace(
        parts[0],
        name=name or "+".join(part.name for part in parts),
        num_hosts=sum(part.num_hosts for part in parts),
        device=_least([part.device for part in parts]),
        host_link=_slowest([part.host_link for part in parts]),
        network_link=_slowest(links),
        launch_seconds=max(part.launch_seconds for part in parts),
        kernel_seconds=max(part.kernel_seconds for part in parts),
        visible_fraction=max(part.visible_fraction for part in parts),
        source="; ".join(dict.fromkeys(part.source for part in parts)),
        parts=tuple(parts),
    )


def _slowest(links: Sequence[Link]) -> Link:
    return max(links, key=lambda link: (link.seconds_per_byte, link.alpha_seconds))


def _least(devices: Sequence[Device]) -> Device:
    """The slowest device, with the least memory of all."""
    slowest = min(devices, key=lambda device: device.flops_per_second("float32"))
    return replace(
        slowest,
        memory_bytes=min(device.memory_bytes for device in devices),
        memory_bandwidth=min(device.memory_bandwidth for device in devices),
        host_memory_bandwidth=min(device.host_memory_bandwidth for device in devices),
    )
