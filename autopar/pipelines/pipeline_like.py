"""A pipeline for a step that has changed since its plan was made: what can stay, stays.

Submeshes, schedule and microbatches are those of the plan; so are the cuts, if the step
has as many products as then. Arguments that still have their path keep their spec.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from ..clusters.cluster import Cluster
from ..frontend.tracing import trace
from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph
from ..methods.methods import PipelineParallel
from ..options import Options
from ..planner.whole_step import batch_tensors, roles_of
from ..plans.parallel_plan import Plan
from ..plans.staged_plan import StagedPlan
from ..sharding.pins import keys_of_paths, parse_pin
from ..sharding.spec import to_partition_spec
from .pipeline_plan import PlannedPipeline, plan_pipeline
from .stage_cut import work_line
from .stage_memory import fitting_pipeline

_MOST_NAMED = 8
_PIECE = re.compile(r"\[\d+:\d+\]$")
_log = logging.getLogger("autopar")

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


def pipeline_like(
    call: Call,
    method: PipelineParallel,
    options: Options,
    price: Callable[[PlannedPipeline], Plan],
) -> PlannedPipeline:
    """The pipeline of a step that keeps what it can of `options.like`.

    A plan of this very step that fits the budget is taken as it is. What was kept is
    logged, as a warning if anything could not be.

    Raises:
      InfeasiblePlanError: stages do not fit into memory so.
    """
    assert options.like is not None
    like = options.like.stages
    free = replace(options, like=None)
    unchanged = _unchanged(call, method, free, like)
    if unchanged is not None:
        return unchanged
    traced = trace(*call)
    graph = build_graph(traced, roles_of(traced))
    batch = batch_tensors(traced, graph, options)
    held = [each.tensor for each in graph.inputs if each.tensor not in batch]
    number = sum(cost > 0 for cost in work_line(graph, held).costs)
    if method.stage_products is not None and sum(method.stage_products) != number:
        method = replace(method, stage_products=None)
    pins, anew = _kept(graph, like, options.pins)
    _tell(graph, pins, anew)
    remat = next((p.sharding.remat for p in like.programs if p.sharding.remat), None)
    free = replace(
        free,
        pins={**pins, **options.pins},
        remat=options.remat or remat,
        method=method,
    )
    return fitting_pipeline(call, method, free, price)


def _unchanged(
    call: Call, method: PipelineParallel, options: Options, like: StagedPlan
) -> PlannedPipeline | None:
    """The pipeline of the plan itself, if that is of this very step and fits."""
    cluster = options.cluster or Cluster.local()
    budget = options.memory_budget
    if options.pins or like.cluster != cluster.name or method != like.method:
        return None
    if budget is not None and max(like.peak_bytes) > budget:
        return None
    try:
        return plan_pipeline(*call, method, replace(options, plan=Plan(like)))
    except ValueError:  # of another step, with other products, or of more devices
        return None


def _kept(
    graph: OpGraph, like: StagedPlan, pins: Mapping[str, PartitionSpec]
) -> tuple[dict[str, PartitionSpec], dict[str, str]]:
    """Pins by path, and of each argument that keeps nothing why; users' come first."""
    old = _homes(like)
    pinned = keys_of_paths(pins, [each.path for each in graph.inputs])
    kept: dict[str, PartitionSpec] = {}
    anew: dict[str, str] = {}
    for each in graph.inputs:
        kind, known = graph.tensors[each.tensor].type, old.get(each.path)
        if each.path in pinned:
            continue
        if known is None:
            anew[each.path] = "is new"
        elif len(known) > 1:
            anew[each.path] = "lay otherwise on other stages"
        else:
            (spec,) = known
            try:
                for mesh in like.meshes:
                    parse_pin(spec, kind, mesh, each.path)
                kept[each.path] = spec
            except ValueError:
                anew[each.path] = f"{kind} cannot lie as {spec} on all stages"
    return kept, anew


def _homes(like: StagedPlan) -> dict[str, set[PartitionSpec]]:
    """The specs of each argument, pieces of a leaf together."""
    found: dict[str, set[PartitionSpec]] = {}
    for program in like.programs:
        names = program.sharding.mesh.axis_names
        for each in program.sharding.inputs:
            spec = to_partition_spec(each.spec, len(each.shape), names)
            found.setdefault(_PIECE.sub("", each.path), set()).add(spec)
    return found


def _tell(
    graph: OpGraph, kept: Mapping[str, PartitionSpec], anew: Mapping[str, str]
) -> None:
    words = [f"{path} ({reason})" for path, reason in anew.items()]
    rest = len(words) - _MOST_NAMED
    more = f" and {rest} more" if rest > 0 else ""
    _log.log(
        logging.WARNING if anew else logging.INFO,
        "%s: of the plan given as `like`, %d of %d arguments keep their place%s",
        graph.name,
        len(kept),
        len(kept) + len(anew),
        f"; planned anew: {', '.join(words[:_MOST_NAMED])}{more}" if anew else "",
    )
