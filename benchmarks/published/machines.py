"""Machines of published tables: presets, and what `machines.toml` says differs.

Hosts may not join all their devices alike: eight V100s make a hybrid cube mesh, where a
device has one or two NVLink lanes to each of four others and none to the other three.
There a ring goes at the lanes that its poorest device has to others of its group, and
in an all_to_all each device serves its peers in turn, each over the lanes to that peer.
Stages are taken to begin at the first device of a host.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.clusters.hardware import AxisLink
from autopar.sharding.mesh import MeshShape
from benchmarks.published.work import Layout

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Machine:
    """Hosts of equally many devices; `cluster` is one of any size.

    `steady`: what kernels of a whole step reach of their speed alone.
    """

    cluster: Cluster
    devices_per_host: int
    steady: float = 1.0

    def of(self, layout: Layout) -> Cluster:
        """The devices of a layout."""
        return replace(
            self.cluster, num_hosts=layout.hosts, devices_per_host=layout.devices
        )


@cache
def table_of(name: str) -> dict[str, Any]:
    """The tables of a data file of this folder; its arrays are tuples."""
    return _frozen(tomllib.loads((FOLDER / f"{name}.toml").read_text()))


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def machine_of(name: str, num_devices: int) -> Machine | None:
    """So many devices of the machine that a table calls so; None if it is not known."""
    table = table_of("machines").get(name)
    if table is None:
        return None
    if "file" in table:
        return _machine(Cluster.load(FOLDER / table["file"]), table)
    preset = table["preset"]
    if "shape" in table:
        chips = math.prod(map(int, table["shape"].split("x")))
        preset = f"{max(num_devices // chips, 1)}*{preset}:{table['shape']}"
    return _machine(Cluster.preset(preset), table)


def known_machine(
    kind: str, devices_per_host: int, memory_bytes: int, host_bandwidth: float | None
) -> Machine:
    """Hosts of a preset's devices, of which a table gives what differs."""
    given = {"devices_per_host": devices_per_host, "memory_bytes": memory_bytes}
    network = {"host_bandwidth": host_bandwidth} if host_bandwidth else {}
    known = table_of("machines").get(kind, {})
    return _machine(Cluster.preset(kind), known | given | network)


def _machine(cluster: Cluster, table: Mapping[str, Any]) -> Machine:
    device, network = cluster.device, cluster.network_link
    peaks = {key: table[key] for key in ("bfloat16", "float8") if key in table}
    device = replace(
        device,
        peak_flops={**device.peak_flops, **peaks},
        efficiency={**device.efficiency, **table.get("efficiency", {})},
        memory_bytes=table.get("memory_bytes", device.memory_bytes),
        product_depth=table.get("product_depth", device.product_depth),
    )
    per_host = table.get("devices_per_host", cluster.devices_per_host)
    bandwidth = network.bandwidth * cluster.devices_per_host
    network = replace(
        network,
        bandwidth=table.get("host_bandwidth", bandwidth) / per_host,
        efficiency=table.get("network_efficiency", network.efficiency),
    )
    if "shape" not in table:
        cluster = replace(cluster, network_link=network)
    cluster = replace(cluster, device=device)
    return Machine(cluster, per_host, table.get("steady", 1.0))


@lru_cache(maxsize=4096)
def link_of(cluster: Cluster, mesh: MeshShape, axes: tuple[str, ...]) -> AxisLink:
    """As `Cluster.link`, with the lanes of groups that stay inside a host."""
    link = cluster.link(mesh, axes)
    lanes = np.array(table_of("machines").get(cluster.device.kind, {}).get("lanes", ()))
    if not len(lanes) or mesh.size > len(lanes) or link.size == 1:
        return link
    least = table_of("machines")[cluster.device.kind]["least_lanes"]
    ring, turn = [], []
    for group in mesh.groups(axes):
        inside = lanes[np.ix_(group, group)]
        ring.append(max(float(inside.sum(axis=1).min()), least))
        turns = 1 / np.maximum(inside, least)
        np.fill_diagonal(turns, 0.0)
        turn.append(float(turns.sum(axis=1).max()) / (len(group) - 1))
    seconds = link.seconds_per_byte * float(lanes.sum(axis=1).max())
    return replace(
        link,
        seconds_per_byte=seconds / min(ring),
        exchange_seconds_per_byte=seconds * max(turn),
    )
