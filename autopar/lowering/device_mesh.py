"""The devices that a mesh shape means: of this process, or none if they are remote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from ..clusters.cluster import Cluster, RayHosts
from ..sharding.mesh import MeshLike, MeshShape


def device_mesh(
    shape: MeshShape, given: MeshLike | None, cluster: Cluster
) -> Mesh | AbstractMesh:
    """The mesh that a program of `cluster` is lowered for.

    Devices are those of the user's own mesh, if `given` is one, else the first ones of
    this process. Programs of a Ray cluster are lowered without devices.

    Raises:
      ValueError: this process has too few devices, or a mesh of its devices was given
        for hosts that are elsewhere.
    """
    auto = (AxisType.Auto,) * shape.num_axes
    if cluster.ray_hosts is not None:
        if isinstance(given, Mesh):
            raise ValueError(
                f"A mesh for Ray hosts names axes and sizes, as its devices are not of "
                f"this process, but got {given}; write mesh={str(shape)!r}."
            )
        if shape.size != cluster.num_devices:
            raise ValueError(
                f"A step uses all devices of its Ray hosts, which are "
                f"{cluster.num_devices}, but the mesh {shape} has {shape.size}; ask "
                f"for fewer with Cluster.ray(num_hosts=, devices_per_host=)."
            )
        return _remote_mesh(shape, cluster.ray_hosts, 0, [shape])
    if isinstance(given, Mesh):
        devices = given.devices
    else:
        available = jax.devices()
        if len(available) < shape.size:
            raise ValueError(
                f"The mesh {shape} needs {shape.size} devices, but this process has "
                f"{len(available)}; use a smaller mesh, or plan only with "
                f"step.plan(...), which needs no devices."
            )
        slices = cluster.slice_shape
        if slices is not None:
            available = slices.laid_out(available, shape.axis_sizes)
        devices = np.array(available[: shape.size]).reshape(shape.axis_sizes)
    return Mesh(devices, shape.axis_names, axis_types=auto)


def stage_meshes(
    shapes: Sequence[MeshShape], cluster: Cluster
) -> Sequence[Mesh | AbstractMesh]:
    """A mesh of each shape: devices of this process dealt out in order, or none.

    Meshes without devices tell by their kind of device which submesh they are of which.

    Raises:
      ValueError: this process has too few devices.
      NotImplementedError: this process is one of several without Ray.
    """
    if cluster.ray_hosts is None and jax.process_count() > 1:
        raise NotImplementedError(
            f"The stages of a pipeline run in one process or on a Ray cluster, but "
            f"this is one of {jax.process_count()} processes of jax.distributed; use "
            f"method=autopar.ShardParallel(), or cluster=autopar.Cluster.ray()."
        )
    meshes: list[Mesh | AbstractMesh] = []
    available, first = jax.devices() if cluster.ray_hosts is None else [], 0
    for number, shape in enumerate(shapes):
        names, auto = shape.axis_names, (AxisType.Auto,) * shape.num_axes
        if cluster.ray_hosts is not None:
            meshes.append(_remote_mesh(shape, cluster.ray_hosts, number, shapes))
            continue
        devices = np.array(available[first : first + shape.size])
        if len(devices) < shape.size:
            raise ValueError(
                f"The submeshes of the pipeline need "
                f"{sum(shape.size for shape in shapes)} devices, but this process has "
                f"{len(available)}; use smaller ones, or plan only with "
                f"step.plan(...), which needs no devices."
            )
        meshes.append(Mesh(devices.reshape(shape.axis_sizes), names, axis_types=auto))
        first += shape.size
    return meshes


def _remote_mesh(
    shape: MeshShape, hosts: RayHosts, submesh: int, of: Sequence[MeshShape]
) -> AbstractMesh:
    sizes = "+".join(str(each.size) for each in of)
    name = f"submesh {submesh} of {sizes}"
    return absent_mesh(shape, name, hosts.lowering_platform)


def absent_mesh(shape: MeshShape, name: str, platform: str) -> AbstractMesh:
    """A mesh of devices that are not here; `name` is what it calls them."""
    auto, kind = (AxisType.Auto,) * shape.num_axes, AbstractDevice(name, None, platform)
    return AbstractMesh(
        shape.axis_sizes, shape.axis_names, axis_types=auto, abstract_device=kind
    )


def submesh_of(mesh: Any) -> tuple[int, tuple[int, ...]]:
    """Which submesh of a pipeline a mesh without devices is, and the sizes of all."""
    _, number, _, sizes = mesh.abstract_device.device_kind.split(" ")
    return int(number), tuple(map(int, sizes.split("+")))
