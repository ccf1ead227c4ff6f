"""Options for a step that has changed since another plan was made: what can, stays.

Arguments that still have their path keep their spec, as pins; all else is solved anew.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jax.sharding import PartitionSpec

from ..clusters.cluster import Cluster
from ..graph.op_graph import OpGraph
from ..options import Options
from ..plans.plan import ShardingPlan
from ..plans.staged_plan import sharding_of
from ..sharding.mesh import MeshShape, parse_mesh
from ..sharding.pins import keys_of_arguments, keys_of_paths, parse_pin
from ..sharding.spec import to_partition_spec

_MOST_NAMED = 8
_log = logging.getLogger("autopar")


def is_of_plan(options: Options, cluster: Cluster) -> bool:
    """Whether `options.like` may be had as it is, if it is of this very step."""
    assert options.like is not None
    plan = sharding_of(options.like)
    peak_bytes = plan.predicted.peak_bytes / plan.predicted.memory_correction
    return (
        not options.pins
        and plan.cluster == cluster.name
        and peak_bytes <= options.budget_on(cluster)
        and _mesh(options, plan, cluster) == plan.mesh
    )


def options_like(options: Options, graph: OpGraph, cluster: Cluster) -> Options:
    """The options with what a step keeps of the plan `options.like`, and that left out.

    Arguments that can lie as they did are pinned; pins of the user come before it. What
    is made again or offloaded is as asked for, or as in the plan.

    Raises:
      ValueError: the plan is for another number of devices, and no mesh is named.
    """
    assert options.like is not None
    plan = sharding_of(options.like)
    mesh = _mesh(options, plan, cluster)
    keys_of_arguments(options.pins, graph, "pin")  # refuses those of no argument
    pins = kept_pins(graph, options.pins, homes_in([plan]), [mesh])
    offload = options.offload
    if offload is None and plan.host_bytes():
        state = [i for i in plan.inputs if i.role == "state" and i.shape]
        is_all = all(i.memory == "host" for i in state)
        offload = "state" if is_all else "optimizer_state"
    return replace(
        options,
        like=None,
        pins={**pins, **options.pins},
        mesh=mesh,
        remat=options.remat or plan.remat or None,
        offload=offload,
    )


Homes = Mapping[str, Sequence[tuple[PartitionSpec, int]]]


def homes_in(programs: Iterable[ShardingPlan], chunk: str = "$.") -> Homes:
    """The spec and rank of each argument in each program that takes it, by path.

    What matches `chunk` at the end of a path is left out.
    """
    found: dict[str, list[tuple[PartitionSpec, int]]] = {}
    for plan in programs:
        for each in plan.inputs:
            rank = len(each.shape)
            spec = to_partition_spec(each.spec, rank, plan.mesh.axis_names)
            found.setdefault(re.sub(chunk, "", each.path), []).append((spec, rank))
    return found


def kept_pins(
    graph: OpGraph,
    pins: Mapping[str, PartitionSpec],
    old: Homes,
    meshes: Sequence[MeshShape],
) -> dict[str, PartitionSpec]:
    """Pins of the arguments that can lie on all `meshes` as they did, by path.

    What stays is logged, as a warning if anything does not. `pins` are the user's,
    which come first.
    """
    pinned = keys_of_paths(pins, [each.path for each in graph.inputs])
    kept: dict[str, PartitionSpec] = {}
    anew: list[str] = []
    for each in graph.inputs:
        if each.path in pinned:
            continue
        kind, homes = graph.tensors[each.tensor].type, {*old.get(each.path, ())}
        try:
            ((spec, rank),) = homes
            if rank != kind.rank:
                raise ValueError("it has other dims")
            for mesh in meshes:
                parse_pin(spec, kind, mesh, each.path)
            kept[each.path] = spec
        except ValueError:
            anew.append(each.path)
    gone = [path for path in old if path not in {each.path for each in graph.inputs}]
    words = f"{len(kept)} of {len(kept) + len(anew)} arguments keep their place"
    for title, paths in (("planned anew", anew), ("no more there", gone)):
        if paths:
            more = ", ..." if len(paths) > _MOST_NAMED else ""
            words += f"; {title}: {', '.join(paths[:_MOST_NAMED])}{more}"
    level = logging.WARNING if anew or gone else logging.INFO
    _log.log(level, "%s: of the plan given as `like`, %s", graph.name, words)
    return kept


def _mesh(options: Options, plan: ShardingPlan, cluster: Cluster) -> MeshShape:
    if options.mesh is not None:
        return parse_mesh(options.mesh, cluster.num_devices)
    if plan.mesh.size != cluster.num_devices:
        sizes = [-1, *plan.mesh.axis_sizes[1:]]
        pairs = zip(plan.mesh.axis_names, sizes, strict=True)
        names = ";".join(f"{name}:{size}" for name, size in pairs)
        raise ValueError(
            f"`like` must be a plan for as many devices as there are, but its mesh is "
            f"{plan.mesh} and {cluster.name} has {cluster.num_devices}; name the mesh, "
            f"for example mesh={names!r}."
        )
    return plan.mesh
