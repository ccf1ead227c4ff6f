"""A plan for a step that has changed since another plan was made: what can stay, stays.

Arguments that still have their path keep their spec, as pins; all else is solved anew.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError, PlanFileError
from ..graph.op_graph import OpGraph
from ..graph.pins import keys_of_arguments, keys_of_paths, parse_pin
from ..methods.gather_again import graph_of_plan
from ..option_values import Offload
from ..options import Options
from ..plans.plan import ShardingPlan
from ..plans.plan_check import check_against
from ..plans.staged_plan import sharding_of
from ..sharding.mesh import MeshShape, parse_mesh
from ..sharding.spec import to_partition_spec
from .graph_plan import plan_graph
from .plan_request import PlanRequest
from .transfers_ahead import graph_sent_ahead

_MOST_NAMED = 8
_log = logging.getLogger("autopar")


@dataclass(frozen=True)
class Likeness:
    """What a changed step keeps of a plan.

    `pins` are by path; `anew` says of each argument that keeps nothing why, `gone` are
    paths of the plan that the step has no more.
    """

    pins: Mapping[str, PartitionSpec]
    anew: Mapping[str, str]
    gone: tuple[str, ...]
    mesh: MeshShape | None = None  # of a step of one program

    def __str__(self) -> str:
        number = len(self.pins) + len(self.anew)
        words = [
            f"of the plan given as `like`, {len(self.pins)} of {number} arguments "
            f"keep their place"
        ]
        if self.anew:
            words.append(f"planned anew: {_some(self.anew)}")
        if self.gone:
            words.append(f"no more there: {', '.join(self.gone[:_MOST_NAMED])}")
        return "; ".join(words)


def plan_like(request: PlanRequest) -> ShardingPlan | None:
    """The plan of a step that keeps what it can of `options.like`; None if none fits.

    A plan of this very step that fits the budget is returned as it is. What was kept is
    logged, as a warning if anything could not be.

    Raises:
      ValueError: as `likeness_of`.
    """
    graph, cluster, options = request.graph, request.cluster, request.options
    if _is_unchanged(options, graph, cluster):
        assert options.like is not None
        _log.info("%s: the plan given as `like` is of this very step", graph.name)
        return sharding_of(options.like)
    likeness = likeness_of(options, graph, cluster)
    kept = replace(request, options=options_like(options, likeness))
    try:
        plan = plan_graph(kept)
    except InfeasiblePlanError as error:
        _log.warning(
            "%s: no plan keeps the arguments as in the plan given as `like`, so all is "
            "planned anew: %s",
            *(graph.name, error),
        )
        return None
    tell(likeness, graph)
    return plan


def without_like(options: Options, cluster: Cluster) -> Options:
    """The options to plan all anew with, on the mesh of `options.like`."""
    assert options.like is not None
    mesh = _mesh(options, sharding_of(options.like), cluster)
    return replace(options, like=None, mesh=mesh)


def memory_choices(options: Options) -> tuple[str | None, Offload | None]:
    """What to make again and to offload: as asked for, or as in `options.like`."""
    remat, offload = options.remat, options.offload
    if options.like is not None:
        plan = sharding_of(options.like)
        remat = remat or plan.remat or None
        if offload is None and plan.host_bytes():
            state = [i for i in plan.inputs if i.role == "state" and i.shape]
            is_all = all(i.memory == "host" for i in state)
            offload = "state" if is_all else "optimizer_state"
    return remat, offload


def options_like(options: Options, likeness: Likeness) -> Options:
    """The options with what is kept as pins, and `like` itself left out."""
    pins = {**likeness.pins, **options.pins}
    return replace(options, like=None, pins=pins, mesh=likeness.mesh)


def likeness_of(options: Options, graph: OpGraph, cluster: Cluster) -> Likeness:
    """What a step keeps of the plan `options.like`; pins of the user come before it.

    Raises:
      ValueError: the plan is for another number of devices, and no mesh is named.
    """
    assert options.like is not None
    plan = sharding_of(options.like)
    mesh = _mesh(options, plan, cluster)
    keys_of_arguments(options.pins, graph, "pin")  # refuses those of no argument
    pins, anew, gone = kept_arguments(graph, options.pins, homes_in([plan]), [mesh])
    return Likeness(pins, anew, gone, mesh)


Homes = Mapping[str, Sequence[tuple[PartitionSpec, tuple[int, ...]]]]


def homes_in(programs: Iterable[ShardingPlan], chunk: str = "$.") -> Homes:
    """The spec and shape of each argument in each program that takes it, by path.

    What matches `chunk` at the end of a path is left out.
    """
    found: dict[str, list[tuple[PartitionSpec, tuple[int, ...]]]] = {}
    for plan in programs:
        for each in plan.inputs:
            names = plan.mesh.axis_names
            spec = to_partition_spec(each.spec, len(each.shape), names)
            path = re.sub(chunk, "", each.path)
            found.setdefault(path, []).append((spec, tuple(each.shape)))
    return found


def kept_arguments(
    graph: OpGraph,
    pins: Mapping[str, PartitionSpec],
    old: Homes,
    meshes: Sequence[MeshShape],
) -> tuple[dict[str, PartitionSpec], dict[str, str], tuple[str, ...]]:
    """Pins of what stays, why each other argument does not, and paths that are gone.

    `pins` are the user's, which come first; an argument must lie so on all `meshes`.
    """
    paths = [each.path for each in graph.inputs]
    pinned = keys_of_paths(pins, paths)
    kept: dict[str, PartitionSpec] = {}
    anew: dict[str, str] = {}
    for each in graph.inputs:
        kind, known = graph.tensors[each.tensor].type, old.get(each.path, ())
        if each.path in pinned:
            continue
        if not known:
            anew[each.path] = "is new"
            continue
        (spec, shape), *_ = known
        if any(spec != other for other, _ in known):
            anew[each.path] = "lay otherwise on other stages"
        elif len(shape) != kind.rank:
            anew[each.path] = f"had the shape {list(shape)}"
        else:
            try:
                for mesh in meshes:
                    parse_pin(spec, kind, mesh, each.path)
                kept[each.path] = spec
            except ValueError:
                where = " and ".join(dict.fromkeys(map(str, meshes)))
                anew[each.path] = f"{kind} on {where} cannot lie as {spec}"
    return kept, anew, tuple(path for path in old if path not in {*paths})


def _is_unchanged(options: Options, graph: OpGraph, cluster: Cluster) -> bool:
    """Whether `options.like` can be had as it is: of this step, and fitting."""
    assert options.like is not None
    plan = sharding_of(options.like)
    if options.pins or plan.cluster != cluster.name:
        return False
    predicted = plan.predicted
    budget = options.budget_on(cluster)
    if predicted.peak_bytes / predicted.memory_correction > budget:
        return False
    if _mesh(options, plan, cluster) != plan.mesh:
        return False
    try:
        check_against(plan, graph_sent_ahead(graph_of_plan(graph, plan), plan))
    except PlanFileError:
        return False
    return True


def tell(likeness: Likeness, graph: OpGraph) -> None:
    """Log what stays, as a warning if anything does not."""
    is_whole = not likeness.anew and not likeness.gone
    level = logging.INFO if is_whole else logging.WARNING
    _log.log(level, "%s: %s", graph.name, likeness)


def _mesh(options: Options, plan: ShardingPlan, cluster: Cluster) -> MeshShape:
    if options.mesh is not None:
        return parse_mesh(options.mesh, cluster.num_devices)
    if plan.mesh.size != cluster.num_devices:
        names = ";".join(f"{name}:-1" for name in plan.mesh.axis_names[:1])
        rest = zip(plan.mesh.axis_names[1:], plan.mesh.axis_sizes[1:], strict=True)
        names += "".join(f";{name}:{size}" for name, size in rest)
        raise ValueError(
            f"`like` must be a plan for as many devices as there are, but its mesh is "
            f"{plan.mesh} and {cluster.name} has {cluster.num_devices}; name the mesh, "
            f"for example mesh={names!r}."
        )
    return plan.mesh


def _some(reasons: Mapping[str, str]) -> str:
    words = [f"{path} ({reason})" for path, reason in reasons.items()]
    rest = len(words) - _MOST_NAMED
    return ", ".join(words[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
