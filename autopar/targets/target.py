"""What a cluster can be compiled for: a topology of devices that need not be here."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from ..clusters.cluster import Cluster
from ..clusters.ici import SLICES, SliceShape
from ..errors import TargetError
from .compilers import find, needed

_SPECS = Path(__file__).parent / "gpu_specs.toml"
# What all of NVIDIA's devices since Volta have in common.
_SAME = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
}


@dataclass(frozen=True)
class Target:
    """Devices that a compiler compiles for; `str` gives their name, `2x8xH100`.

    Attributes:
      platform: `cuda` or `tpu`.
      name: hosts x devices of each host x kind, or slices of TPUs.
      num_devices: number of devices in all.
      topology: arguments of `jax.experimental.topologies.get_topology_desc`, besides
        the platform.
      memory_bytes: what one device holds.
      slice_shape: that of TPUs.
    """

    platform: str
    name: str
    num_devices: int
    topology: tuple[tuple[str, Any], ...]
    memory_bytes: int
    slice_shape: SliceShape | None = None

    @staticmethod
    def of(cluster: Cluster, num_devices: int | None = None) -> Target:
        """The target of a cluster, or of a submesh that takes `num_devices` of it.

        Devices are numbered host by host, as those of the cluster are, so a mesh in
        row-major order has its last axes within hosts.

        Raises:
          TargetError: there is no compiler for the cluster's devices, or the devices
            are a part of one host, or of one slice, and whole ones besides.
        """
        if cluster.parts:
            raise TargetError(
                f"A program is compiled for devices of one kind, but {cluster.name} "
                f"has several; use PipelineParallel with a stage on each kind, or plan "
                f"for one of them."
            )
        count, kind = num_devices or cluster.num_devices, cluster.device.kind
        if kind not in known_kinds():
            raise TargetError(
                f"Devices that can be compiled for are {', '.join(known_kinds())}, but "
                f"{cluster.name} has {kind!r}; name one of these as `kind` in its file "
                f"if it is such a device."
            )
        if kind in SLICES:
            return _of_slices(cluster, count)
        within = min(count, cluster.devices_per_host)
        hosts, left = divmod(count, within)
        if left or count > cluster.num_devices:
            raise TargetError(
                f"A mesh takes a part of one host or whole hosts of its cluster, but "
                f"{count} devices of {cluster.name} with {cluster.devices_per_host} a "
                f"host are neither; use {hosts * within} devices."
            )
        name = f"{hosts}x{within}x{kind}"
        shape = f"1x{hosts}x{within}"  # slices, hosts, devices of a host
        topology = ("target_config", gpu_proto(kind)), ("topology", shape)
        memory = _specs()[kind]["device_memory_size"]
        return Target("cuda", name, count, topology, memory)

    def places(self, sizes: Sequence[int]) -> list[list[int]] | None:
        """Slice, coordinates and core of each device of a mesh; None: as they come."""
        if self.slice_shape is None:
            return None
        inside = self.slice_shape.places(sizes).tolist()
        number, size = self.num_devices, self.slice_shape.size
        return [[device // size, *inside[device % size]] for device in range(number)]

    def __str__(self) -> str:
        return self.name


def _of_slices(cluster: Cluster, count: int) -> Target:
    shape = cluster.slice_shape
    if shape is None:
        raise TargetError(
            f"TPUs are compiled for in the shape of a slice, but {cluster.name} has "
            f"{cluster.num_devices} devices, which no slice has; name slices, such as "
            f"'{cluster.device.kind}:2x4'."
        )
    slices, left = divmod(count, shape.size)
    if (slices and left) or count > cluster.num_devices:
        raise TargetError(
            f"A mesh takes a part of one slice or whole slices of its cluster, but "
            f"{count} devices of {cluster.name} with {shape.size} a slice are neither; "
            f"use {max(slices, 1) * shape.size} devices."
        )
    kind, chips = shape.kind, shape.chips
    topology: dict[str, Any] = {"topology_name": str(shape)}
    if slices > 1:
        topology["num_slices"] = slices
    if any(length % most for length, most in zip(chips, (2, 2), strict=False)):
        # Slices that are a part of a host, or whose sides are odd.
        within = (2 - length % 2 for length in (*chips, 1)[:2])
        topology["chips_per_host_bounds"] = (*within, 1)
    if kind == "v4":
        topology["chip_config_name"] = "megacore"  # a chip is one device
    name = f"{slices}*{shape}" if slices > 1 else str(shape)
    name = name if slices else f"{count} of {shape}"
    memory = cluster.device.memory_bytes
    return Target("tpu", name, count, tuple(topology.items()), memory, shape)


def gpu_proto(kind: str) -> str:
    """XLA's `GpuTargetConfigProto` of a kind of GPU as text; see `gpu_specs.toml`."""
    own = dict(_specs()[kind])
    name, (major, minor) = own.pop("name"), own.pop("compute_capability")
    is_accelerated = own.pop("accelerated")
    feature = "feature_extension: ACCELERATED_FEATURES" if is_accelerated else ""
    lines = [f"  {field}: {value}" for field, value in {**_SAME, **own}.items()]
    lines += [
        f"  cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}"
    ]
    body = "\n".join(lines)
    return (
        f"gpu_device_info {{\n{body}\n}}\n"
        f'platform_name: "CUDA"\n'
        f"dnn_version_info {{ major: 9 minor: 10 }}\n"
        f"runtime_version {{ major: 12 minor: 8 }}\n"
        f'device_description_str: "{name}"\n'
    )


def is_compiled_elsewhere(cluster: Cluster, mesh: object) -> bool:
    """Whether programs of a cluster are compiled by the compiler of absent devices.

    Not on the user's own `mesh` of devices or on Ray hosts, for devices of a kind that
    this process has, or where the compiler is not installed.
    """
    if isinstance(mesh, Mesh) or cluster.ray_hosts is not None:
        return False
    kinds = {part.device.kind for part in cluster.parts or (cluster,)}
    if not kinds.issubset(known_kinds()) or Cluster.local().device.kind in kinds:
        return False
    return all(find(platform_of(kind)) is not None for kind in kinds)


def check_compilable(cluster: Cluster | None, mesh: object) -> None:
    """Checks that programs of a cluster can be compiled, here or for absent devices.

    None is the devices of this process.

    Raises:
      TargetError: if not: a kind without a compiler, or one that is not installed.
    """
    if cluster is None or isinstance(mesh, Mesh):
        return
    if is_compiled_elsewhere(cluster, mesh):
        return
    for part in cluster.parts or (cluster,):
        if part.device.kind != Cluster.local().device.kind:
            needed(Target.of(part).platform)


def why_modelled(cluster: Cluster, mesh: object) -> str:
    """What a plan says that nobody compiled; empty if its devices are here."""
    if is_compiled_elsewhere(cluster, mesh):
        return "modelled, not compiled; plan with compile=True, or --compile"
    try:
        check_compilable(cluster, mesh)
    except TargetError as error:
        return f"modelled, not compiled; {error}"
    return ""


def known_kinds(platform: str | None = None) -> tuple[str, ...]:
    """The kinds of devices that can be compiled for, by one platform's compiler."""
    kinds = (*_specs(), *SLICES)
    return tuple(k for k in kinds if platform in (None, platform_of(k)))


def platform_of(kind: str) -> str:
    """The platform of one of the known kinds."""
    return "tpu" if kind in SLICES else "cuda"


@cache
def _specs() -> dict[str, Any]:
    return tomllib.loads(_SPECS.read_text())
