"""Writes a cluster as the TOML file that `Cluster.load` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .cluster import Cluster
from .hardware import Device, Link


def to_toml(cluster: Cluster, comment: str = "", *, is_part: bool = False) -> str:
    """The file's text; `comment` is put at its head, line by line.

    A cluster of one host, unless it is a part of another, has no network link in its
    file: it is the host's.
    """
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    if cluster.parts:
        lines.append(_field("name", cluster.name))
        for part in cluster.parts:
            table = to_toml(part, is_part=True).replace("\n[", "\n[parts.")
            lines += ["", "[[parts]]", table.rstrip()]
        return "\n".join(lines) + "\n"
    lines += [
        _field("name", cluster.name),
        _field("source", cluster.source),
        _field("num_hosts", cluster.num_hosts),
        _field("devices_per_host", cluster.devices_per_host),
        _field("launch_seconds", cluster.launch_seconds),
        _field("kernel_seconds", cluster.kernel_seconds),
        _field("visible_fraction", cluster.visible_fraction),
        *([_field("overlaps", True)] if cluster.overlaps else []),
        *([_field("ici", cluster.ici)] if cluster.ici else []),
        *_device(cluster.device),
        *_link("host_link", cluster.host_link),
    ]
    if cluster.num_hosts > 1 or is_part:
        lines += _link("network_link", cluster.network_link)
    return "\n".join(lines) + "\n"


def _device(device: Device) -> list[str]:
    lines = [
        "",
        "[device]",
        _field("kind", device.kind),
        _field("memory_bytes", device.memory_bytes),
        _field("memory_bandwidth", device.memory_bandwidth),
        _field("flops_efficiency", device.flops_efficiency),
        _field("memory_efficiency", device.memory_efficiency),
        _field("product_area", device.product_area),
        _field("product_depth", device.product_depth),
        _field("host_memory_bandwidth", device.host_memory_bandwidth),
        _field("jax_kinds", device.jax_kinds),
        *_table("device.peak_flops", device.peak_flops),
    ]
    return lines + _table("device.efficiency", device.efficiency)


def _link(name: str, link: Link) -> list[str]:
    lines = [
        "",
        f"[{name}]",
        _field("name", link.name),
        _field("alpha_seconds", link.alpha_seconds),
        _field("bandwidth", link.bandwidth),
        _field("efficiency", link.efficiency),
    ]
    for kind, by_group in link.measured.items():
        lines += _table(f"{name}.measured.{kind}", by_group)
    return lines


def _table(name: str, values: Mapping[Any, Any]) -> list[str]:
    if not values:
        return []
    return [
        "",
        f"[{name}]",
        *(_field(str(key), value) for key, value in values.items()),
    ]


def _field(name: str, value: Any) -> str:
    return f"{name} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        return f'"{escaped}"'
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    return f"{value:.4g}" if value == float(f"{value:.4g}") else repr(float(value))
