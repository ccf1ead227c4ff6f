"""What `autopar.Auto` does: one program on all devices, or a pipeline, by their time.

A pipeline is looked for where it can pay: across hosts, if intra-operator parallelism
alone is far from its floor, or where nothing else fits into memory. On one host links
are fast, and a small model stays as quick to plan as with `jax.jit`. Where the user
names a mesh, rules or pins by axes, there is no search. A step that cannot be cut just
gets no pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..frontend.tracing import trace
from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph
from ..methods.methods import Auto, PipelineParallel
from ..options import Options
from ..planner.mesh_search import FAR, least_seconds
from ..planner.planning import Planned, roles_of
from ..planner.step_variants import Offload
from ..planner.update_loops import one_update
from ..plans.explain import format_seconds
from ..plans.parallel_plan import Plan
from ..rematerialisation.remat import LEVELS
from .pipeline_like import pipeline_like
from .pipeline_plan import PlannedPipeline
from .stage_memory import fitting_pipeline
from .stage_search import StageSearch, search_stages

MOST_OPERATORS = 40_000
"""How many operators of a step Auto searches stages for.

The search and the plan in full take about 0.6 ms of CPU for each operator; devices
hardly count.
"""

_log = logging.getLogger("autopar")

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
Price = Callable[[PlannedPipeline], Plan]


def planned_pipeline(
    call: Call, method: PipelineParallel, options: Options, price: Price
) -> PlannedPipeline:
    """The pipeline that `method` asks for; what it leaves out is searched.

    That of a step of several updates is of one of them.

    Raises:
      InfeasiblePlanError: no stages fit into memory.
    """
    try:
        return _planned(call, method, options, price)
    except (ValueError, NotImplementedError):
        traced = trace(*call)
        graph = build_graph(traced, roles_of(traced))
        found = one_update(call, traced, graph)
        if found is None:
            raise
    is_on_ray = options.cluster is not None and options.cluster.ray_hosts is not None
    if is_on_ray or method.microbatch_semantics != "exact":
        raise ValueError(
            f"Stages run several updates a call on local devices and in exact "
            f"microbatches alone; call the step once an update, not in {found[2]}."
        )
    planned = planned_pipeline(found[0], method, options, price)
    return replace(planned, updates=(found[1], *planned.updates))


def _planned(
    call: Call, method: PipelineParallel, options: Options, price: Price
) -> PlannedPipeline:
    if options.like is not None:
        return pipeline_like(call, method, options, price)
    if method.num_stages is not None:
        if not _may_have_unequal_submeshes(method, options):
            return fitting_pipeline(call, method, options, price)
        number = method.num_microbatches or options.num_microbatches
        method = replace(method, num_microbatches=number)
    return _searched(call, method, options, price)


def _searched(
    call: Call, method: PipelineParallel, options: Options, price: Price
) -> PlannedPipeline:
    """The fastest pipeline within memory, with what "auto" leaves to us if need be.

    What makes nothing again and keeps all state on devices is taken if it fits: all
    others do more work. If not, the fastest of the levels of `remat`; and only then the
    host keeps the optimizer's state.
    """
    levels: Sequence[str | None] = [options.remat]
    if options.remat == "auto":
        levels = [None, *LEVELS]
    moves: Sequence[Offload | None] = [options.offload]
    if options.offload == "auto":
        moves = [None, "optimizer_state"]
    found: list[StageSearch] = []
    errors: list[InfeasiblePlanError] = []
    for offload in moves:
        for level in levels:
            chosen = replace(options, remat=level, offload=offload)
            try:
                each = search_stages(*call, method, chosen, price)
            except InfeasiblePlanError as error:
                errors.append(error)
                continue
            assert each is not None, "an unlimited search finds one or says why not"
            found.append(each)
            if level is None:
                break
        if found:
            break
    if not found:
        raise min(errors, key=lambda each: each.least_budget_bytes or inf)
    best = min(found, key=lambda each: each.plan.predicted.step_seconds).planned
    bounds = [each.planned.bound_seconds for each in found]
    return replace(best, bound_seconds=min(bounds))


def better_pipeline(
    call: Call, options: Options, plan: Callable[[], Planned], price: Price
) -> PlannedPipeline | None:
    """The pipeline that beats one program on all devices, if there is any.

    `plan` makes the plan of one program.

    Raises:
      InfeasiblePlanError: neither fits into memory.
    """
    if not _is_open(options):
        return None
    cluster = options.cluster or Cluster.local()
    try:
        planned = plan()
    except InfeasiblePlanError as error:
        graph = build_graph(traced := trace(*call), roles_of(traced))
        found = None if _is_large(graph) else _search(call, options, price)
        if found is None:
            raise
        _log.warning(
            "%s becomes a pipeline, as no other plan was found that fits (%s)",
            *(traced.name, error.tightest_constraint),
        )
        return found
    one = planned.plan.predicted
    seconds = one.step_seconds
    floor_seconds = least_seconds(planned.graph, cluster)
    if cluster.num_hosts == 1 or seconds <= FAR * floor_seconds:
        return None
    if _is_large(planned.graph):
        return None
    found = _search(call, options, price, seconds)
    if found is None:
        return None
    _log.info("a pipeline: one program takes %s", format_seconds(seconds))
    least = min(found.bound_seconds, seconds * (1 - one.optimality_gap))
    return replace(found, bound_seconds=least)


def may_be_pipelined(options: Options) -> bool:
    """Whether a pipeline might be chosen for some call."""
    return isinstance(options.method, Auto) and _is_open(options)


def _may_have_unequal_submeshes(method: PipelineParallel, options: Options) -> bool:
    """Whether stages do not divide the devices, and the search may deal them out."""
    number = method.num_stages
    devices = (options.cluster or Cluster.local()).num_devices
    said = (method.stage_meshes, method.stage_products, method.layer_costs)
    return (
        number is not None
        and number < devices
        and devices % number != 0
        and method.stages_per_submesh == 1
        and options.plan is None
        and all(each is None for each in said)
    )


def _is_open(options: Options) -> bool:
    """Whether the user left it to us what runs where."""
    names_axes = any(entry for spec in options.pins.values() for entry in spec or ())
    given = (options.plan, options.mesh, options.rules, options.remat, options.offload)
    return not names_axes and all(each is None for each in given)


def _is_large(graph: OpGraph) -> bool:
    """Whether a pipeline would take a minute or more to plan; says so."""
    number = len(graph.operators())
    if number <= MOST_OPERATORS:
        return False
    _log.warning(
        "no pipeline is looked for in a step of %d operators, as planning one takes a "
        "minute or more for now; PipelineParallel() searches all the same, and "
        "PipelineParallel(num_stages=...) needs no search",
        number,
    )
    return True


def _search(
    call: Call, options: Options, price: Price, below_seconds: float = inf
) -> PlannedPipeline | None:
    if options.cluster is None and Cluster.local().num_hosts > 1:
        return None  # stages are not run across processes but on Ray
    try:
        found = search_stages(*call, PipelineParallel(), options, price, below_seconds)
    except (ValueError, NotImplementedError) as error:
        _log.info("no pipeline: %s", error)
        return None
    return None if found is None else found.planned
