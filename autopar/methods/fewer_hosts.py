"""What a user asked for on some hosts, as it can be had on other ones of a cluster."""

from __future__ import annotations

from dataclasses import replace

from ..clusters.cluster import Cluster
from ..clusters.ray_hosts import dealt_out
from ..sharding.mesh import MeshLike, MeshShape, parse_mesh
from .methods import Method, PipelineParallel, ShardParallel
from .named_methods import ThreeD


def fit_hosts(
    method: Method, mesh: MeshLike | None, old: Cluster, new: Cluster
) -> tuple[Method, MeshLike | None, Cluster]:
    """A method and a mesh for other hosts, and how many of these they use.

    A pipeline keeps its stages, which share submeshes if there are too few hosts; on
    one host it is one program in microbatches. Submeshes that are parts of hosts stay
    as many, of fewer devices. Of a mesh the first axis, which is the
    one over hosts, gets another size; where that is no whole number, all devices are
    one axis.

    Args:
      method: the method, which fits the old cluster.
      mesh: the mesh; of a pipeline that of one submesh.
      old: the cluster that they were given for.
      new: equal hosts, of another number.
    """
    if new.num_devices == old.num_devices:
        return method, mesh, new
    if not isinstance(method, PipelineParallel) or method.num_stages is None:
        size = old.num_devices, new.num_devices
        return _resized(method, *size), _mesh_of(mesh, *size), new
    if _are_parts(method, old) and method.num_submeshes <= new.num_devices:
        return *_smaller_parts(method, mesh, old, new), new
    stages = method.num_stages
    number = max(n for n in range(1, new.num_hosts + 1) if stages % n == 0)
    used = new.with_hosts(new.num_hosts // number * number)
    size = old.num_devices // method.num_submeshes, used.num_devices // number
    if number == 1:
        microbatches = method.num_microbatches or 1
        kept = ShardParallel(microbatches, method.microbatch_semantics)
        return kept, _mesh_of(mesh, *size), used
    if number < method.num_submeshes:
        method = replace(
            method,
            schedule="interleaved",
            stages_per_submesh=stages // number,
            num_microbatches=_multiple(method.num_microbatches, number),
        )
    return replace(method, stage_meshes=None), _mesh_of(mesh, *size), used


def _are_parts(method: PipelineParallel, cluster: Cluster) -> bool:
    """Whether some submesh of a pipeline is a part of a host."""
    sizes = [cluster.num_devices // method.num_submeshes]
    if method.stage_meshes is not None:
        sizes = [parse_mesh(each).size for each in method.stage_meshes]
    return min(sizes) < cluster.devices_per_host


def _smaller_parts(
    method: PipelineParallel, mesh: MeshLike | None, old: Cluster, new: Cluster
) -> tuple[PipelineParallel, MeshLike | None]:
    """As many submeshes, dealt out anew; the mesh is that of one if all are equal."""
    number = method.num_submeshes
    sizes = dealt_out(number, new.num_hosts, new.devices_per_host)
    if method.stage_meshes is None and len(set(sizes)) == 1:
        return method, _mesh_of(mesh, old.num_devices // number, sizes[0])
    shapes = tuple(MeshShape(("x",), (size,)) for size in sizes)
    return replace(method, stage_meshes=shapes), None


def _resized(method: Method, old: int, new: int) -> Method:
    """A named method that says how many devices there are, for another number."""
    if isinstance(method, ThreeD) and method.data * new % old == 0:
        return replace(method, data=max(1, method.data * new // old))
    return method


def _mesh_of(mesh: MeshLike | None, old: int, new: int) -> MeshLike | None:
    """A mesh of `new` devices like one of `old`; None is all along one axis."""
    if mesh is None:
        return None
    shape = parse_mesh(mesh, old)
    first, *others = shape.axis_sizes
    if first * new % old:
        return None
    return MeshShape(shape.axis_names, (first * new // old, *others))


def _multiple(number: int | None, of: int) -> int | None:
    """The next multiple, which interleaved schedules need; None is left to the plan."""
    return None if number is None else -(-number // of) * of
