"""Machines of published tables: presets, and what `machines.toml` says differs."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from autopar.clusters.cluster import Cluster
from benchmarks.published.simulator import Machine

FOLDER = Path(__file__).parent


@cache
def table_of(name: str) -> dict[str, Any]:
    """The tables of a data file of this folder."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


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
    kind: str,
    devices_per_host: int,
    memory_bytes: int,
    host_bandwidth: float | None,
) -> Machine:
    """Hosts of a preset's devices, of which a table gives what differs."""
    given = {"devices_per_host": devices_per_host, "memory_bytes": memory_bytes}
    if host_bandwidth is not None:
        given["host_bandwidth"] = host_bandwidth
    return _machine(Cluster.preset(kind), table_of("machines").get(kind, {}) | given)


def _machine(cluster: Cluster, table: Mapping[str, Any]) -> Machine:
    device, network = cluster.device, cluster.network_link
    peaks = {key: table[key] for key in ("bfloat16", "float8") if key in table}
    device = replace(
        device,
        peak_flops={**device.peak_flops, **peaks},
        efficiency={**device.efficiency, **table.get("efficiency", {})},
        memory_bytes=table.get("memory_bytes", device.memory_bytes),
    )
    per_host = table.get("devices_per_host", cluster.devices_per_host)
    bandwidth = network.bandwidth * cluster.devices_per_host
    network = replace(
        network,
        bandwidth=table.get("host_bandwidth", bandwidth) / per_host,
        efficiency=table.get("network_efficiency", network.efficiency),
    )
    cluster = replace(cluster, device=device)
    if "shape" not in table:
        cluster = replace(cluster, network_link=network)
    steady = table.get("steady", 1.0)
    return Machine(cluster, device.memory_bytes, per_host, steady)
