"""The plan of one graph: the loop over meshes, and the candidates on each of them."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from time import perf_counter

from .. import rules as _rules
from ..costs.user_shard_map import check_shard_maps
from ..errors import InfeasiblePlanError
from ..methods.layout_rules import LayoutRules
from ..methods.named_methods import gathers_again, restrictions_of
from ..plans.plan import ShardingPlan
from ..sharding.constraints import check_returned_pins, warn_ignored_constraints
from ..sharding.mesh import MeshShape
from ..sharding.pins import resolve_pins
from ..state.placements import placement_pins
from .auto_layout import auto_layout
from .budget import BudgetPlanner
from .gather_again import gathering_again
from .intra_op import IntraOpSolution, warn_fallbacks
from .mesh_search import (
    MANY_OPERATORS,
    TIGHT_GAP,
    MeshSearch,
    SearchLimits,
    least_seconds,
)
from .mesh_shapes import mesh_shapes
from .plan_cache import CacheEntry, cache_entry
from .plan_request import PlanRequest
from .questions import Questions
from .step_forms import ring_limits

_log = logging.getLogger("autopar")
assert _rules  # imported so that every rule registers


def plan_graph(
    request: PlanRequest,
    gap: float = TIGHT_GAP,
    cutoff: float = math.inf,
    is_kept: bool = True,
) -> ShardingPlan:
    """The cheapest plan of a step's graph, over all meshes where none is named.

    On a mesh that is named the plan is within `gap` of the best. Plans of `cutoff`
    seconds are of no use: where none is better, it is any and need not fit. Plans
    with a wider gap, and those that are not `is_kept`, are not cached.

    Raises:
      InfeasiblePlanError: no plan exists.
    """
    start = perf_counter()
    if gathers_again(request.options.method):
        request = replace(request, graph=gathering_again(request.graph))
    graph, cluster, mesh = request.graph, request.cluster, request.mesh()
    warn_fallbacks(graph)
    if mesh is not None:
        check_shard_maps(graph, mesh)
        warn_ignored_constraints(graph, mesh)
    entry = cache_entry(request) if is_kept else CacheEntry(None)
    known = entry.load(graph)
    if known is not None:
        seconds = perf_counter() - start
        _log.info("%s: plan from %s in %.1f s", graph.name, entry.path, seconds)
        return known

    if mesh is None:
        shapes = mesh_shapes(cluster)
        is_long = len(graph.operators()) >= MANY_OPERATORS
        limits = SearchLimits(least_seconds(graph, cluster), cutoff, is_long)
        search = MeshSearch(cluster, shapes, limits)
        meshes = Questions(search.best())
        while meshes.asked is not None:
            try:
                answer = _plan_on_mesh(request, *meshes.asked)
            except InfeasiblePlanError as error:
                answer = error
            meshes.answer(answer)
        solution = meshes.result
        plan = replace(solution.plan, tried=search.others(solution))
        _log.info("%s: mesh %s of %s", graph.name, plan.mesh, search)
    else:
        solution = _plan_on_mesh(request, mesh, gap, cutoff)
        plan = solution.plan
    _log.info(
        "%s: planned %d operators in %.1f s, gap %.3g%%",
        graph.name,
        len(graph.operators()),
        perf_counter() - start,
        100 * solution.assignment.gap,
    )
    if gap <= TIGHT_GAP and plan.predicted.step_seconds < cutoff:
        entry.store(plan)
    return plan


def _plan_on_mesh(
    request: PlanRequest, mesh: MeshShape, gap: float, cutoff: float
) -> IntraOpSolution:
    """The cheapest plan found on one mesh, among the candidates of `BudgetPlanner`."""
    graph, cluster, options = request.graph, request.cluster, request.options
    batch, method = request.batch, options.method
    budget_bytes = options.budget_on(cluster)
    pinned = resolve_pins(options.pins, graph, mesh)
    check_returned_pins(graph, pinned, mesh)
    pins = {**placement_pins(request.leaves, graph, mesh), **pinned}
    if isinstance(method, LayoutRules) and method.is_auto:
        own = restrictions_of(None, options.rules, graph, mesh, batch)
        place = graph, mesh, cluster, batch, budget_bytes
        return auto_layout(method, *place, pins=pins, limits=own).solution
    own = restrictions_of(method, options.rules, graph, mesh, batch)
    limits = *own, *ring_limits(graph, options)
    planner = BudgetPlanner(graph, mesh, cluster, batch, pins, limits)
    if getattr(method, "objective", "time") == "memory":
        return planner.least(budget_bytes)
    return planner.within(budget_bytes, gap, cutoff)


def blaming_pins(
    error: InfeasiblePlanError,
    request: PlanRequest,
    gap: float = TIGHT_GAP,
    cutoff: float = math.inf,
) -> InfeasiblePlanError:
    """The error of `plan_graph`, which names the pins if there is a plan without."""
    pins = request.options.pins
    if not pins:
        return error
    try:
        plan_graph(request.asking(pins={}), gap, cutoff)
    except InfeasiblePlanError:
        return error
    named = " and ".join(f"{key!r}: {spec}" for key, spec in pins.items())
    return error.saying_more(
        f"Without pins there is a plan, but none has {named}; change or drop one."
    )
