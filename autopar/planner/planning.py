"""Plan a function for one signature: trace, roles, graph, microbatches, solve."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import jax

from .. import rules as _rules
from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..frontend.roles import Roles
from ..frontend.tracing import TracedFunction, trace
from ..graph.build_graph import PINS, build_graph
from ..graph.constraints import check_returned_pins, warn_ignored_constraints
from ..graph.op_graph import OpGraph
from ..graph.user_shard_map import check_shard_maps, user_mesh
from ..jax_compat import abstract_value
from ..methods.gather_again import gathering_again, graph_of_plan
from ..methods.layout_rules import LayoutRules
from ..methods.methods import Auto, ShardParallel
from ..methods.named_methods import (
    Megatron,
    ThreeD,
    gathers_again,
    restrictions_of,
)
from ..methods.restrictions import Limit
from ..methods.unsplit_state import warn_unsplit_state
from ..options import Options
from ..plans.parallel_plan import Plan
from ..plans.plan import TriedPlan
from ..plans.plan_file import check_against
from ..sharding.mesh import MeshShape, parse_mesh
from ..sharding.pins import resolve_pins, warn_idle_pins
from ..state.placements import mesh_of_leaves, placed_pins, placement_pins
from .attention_choice import ring_limits
from .auto_layout import auto_layout
from .budget import BudgetPlanner
from .divided_work import dividing_first, warn_repeated_work
from .intra_op import IntraOpSolution, warn_fallbacks
from .memory_budget import NO_BUDGET, with_budget
from .memory_search import Chosen, choose_variant
from .mesh_search import (
    MANY_OPERATORS,
    TIGHT_GAP,
    SearchLimits,
    least_seconds,
    plan_below,
    search_meshes,
)
from .mesh_shapes import default_mesh, mesh_shapes
from .padding_choice import PaddedVariants
from .pin_conflicts import PinsByKey, blame_pins
from .plan_cache import CacheEntry, cache_entry
from .plan_like import memory_choices, plan_like, without_like
from .step_variants import StepVariant, StepVariants
from .transfers_ahead import graph_sent_ahead, send_ahead
from .whole_step import (
    TracedWhole,
    batch_by_name,
    batch_tensors,
    donated_by_name,
    in_microbatches,
    roles_of,
)

_log = logging.getLogger("autopar")
assert _rules  # imported so that every rule registers


@dataclass(frozen=True, eq=False)
class Planned:
    """One signature of a function: its trace, graph, plan and argument types."""

    traced: TracedFunction
    graph: OpGraph
    roles: Roles
    plan: Plan
    cluster: Cluster
    argument_types: tuple[jax.ShapeDtypeStruct, ...]

    def summary(self) -> str:
        """One line: the mesh, and what was taken as state and batch."""
        roles = self.roles.summary(self.traced.input_paths)
        return f"{self.traced.name} on {self.plan.sharding.mesh}: {roles}"

    def donated(self, options: Options) -> tuple[int, ...]:
        """Positions of the leaves whose buffers the step may reuse."""
        if options.donate_argnums == "auto":
            roles = enumerate(self.roles.roles)
            return tuple(i for i, role in roles if role == "state")
        return tuple(donated_by_name(self.traced, options))


Refused = Callable[[InfeasiblePlanError, TracedWhole], InfeasiblePlanError]


def no_more(error: InfeasiblePlanError, _: TracedWhole) -> InfeasiblePlanError:
    """The error as it is."""
    return error


def plan_function(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    refused: Refused = no_more,
) -> Planned:
    """Trace `fun` on its dynamic arguments and plan it, or check the plan given.

    Where nothing fits, `refused` may say more.
    """
    traced = trace(fun, args, kwargs)
    avals = [var.aval for var in traced.jaxpr.jaxpr.invars]
    named = donated_by_name(traced, options), batch_by_name(traced, options)
    roles = roles_of(traced, *named)
    whole = TracedWhole(fun, traced, build_graph(traced, roles), roles)
    traced, graph = in_microbatches(whole, options)
    cluster = options.cluster or Cluster.local()
    leaves = jax.tree.leaves((args, kwargs))
    options = with_placed_pins(options, graph, leaves, cluster)
    warn_idle_pins(options.pins, [each.path for each in graph.inputs])
    batch = batch_tensors(traced, graph, options)
    variants = PaddedVariants(traced, graph, roles, batch)
    plan = options.plan
    if plan is None:
        without_budget: list[tuple[OpGraph, Plan]] = []

        def plan_variant(
            variant: StepVariant, budget_bytes: int, cutoff: float = math.inf
        ) -> Plan:
            graph, some = variant.graph, replace(options, memory_budget=budget_bytes)
            batch = batch_tensors(variant.traced, graph, options)
            for other, plan in without_budget:
                if other is graph and plan.predicted.peak_bytes <= budget_bytes:
                    return plan  # the cheapest of all fits

            def plan_with(some: Options, limits: Sequence[Limit] = ()) -> Plan:
                return plan_graph(graph, leaves, batch, cluster, some, limits)

            liked = None
            if some.like is not None:
                liked = plan_like(graph, cluster, some, plan_with)
                some = without_like(some, cluster)
            plan = liked or plan_or_blame_pins(
                *(graph, leaves, batch, cluster, some), cutoff=cutoff
            )
            if budget_bytes == NO_BUDGET:
                without_budget.append((graph, plan))
            return plan

        budget_bytes = options.budget_on(cluster)
        remat, offload = memory_choices(options)

        def choose(some: StepVariants) -> Chosen:
            return choose_variant(some, remat, offload, budget_bytes, plan_variant)

        def free(variant: StepVariant) -> Plan:
            return plan_variant(variant, NO_BUDGET)

        try:
            chosen = variants.choose(options, cluster.num_devices, choose, free)
        except InfeasiblePlanError as error:
            raise refused(error, whole) from None
        variant = chosen.variant
        decision = with_budget(chosen.plan.sharding, budget_bytes)
        plan = replace(chosen.plan, decision=decision)
        batch = batch_tensors(variant.traced, variant.graph, options)
        warn_unsplit_state(options.method, variant.graph, plan.sharding, batch)
    else:
        variant = variants.of_plan(plan.sharding).of_plan(plan.sharding)
    traced, graph = variant.traced, graph_of_plan(variant.graph, plan.sharding)
    is_free = isinstance(options.method, Auto | ShardParallel) and options.plan is None
    if is_free and not (options.pins or options.rules):
        warn_repeated_work(graph, plan.sharding, batch)
    if cluster.overlaps and options.plan is None:
        sent = send_ahead(graph, plan.sharding, options.budget_on(cluster))
        plan = replace(plan, decision=sent)
    graph = graph_sent_ahead(graph, plan.sharding)
    if options.plan is not None:
        check_shard_maps(graph, plan.sharding.mesh)
        check_against(plan.sharding, graph)
    types = tuple(map(abstract_value, avals))
    return Planned(traced, graph, roles, plan, cluster, types)


def plan_or_blame_pins(
    graph: OpGraph,
    leaves: Sequence[Any],
    batch: Sequence[int],
    cluster: Cluster,
    options: Options,
    gap: float = TIGHT_GAP,
    cutoff: float = math.inf,
) -> Plan:
    """As `plan_graph`; where no plan exists, the error names the fewest pins to blame.

    Raises:
      InfeasiblePlanError: no plan exists.
    """

    def plan_with(pins: PinsByKey) -> Plan:
        some = replace(options, pins=pins)
        place = graph, leaves, batch, cluster
        return plan_graph(*place, some, gap=gap, cutoff=cutoff)

    try:
        return plan_with(options.pins)
    except InfeasiblePlanError as error:
        raise blame_pins(error, options.pins, plan_with) from None


def plan_graph(
    graph: OpGraph,
    leaves: Sequence[Any],
    batch: Sequence[int],
    cluster: Cluster,
    options: Options,
    limits: Sequence[Limit] = (),
    gap: float = TIGHT_GAP,
    cutoff: float = math.inf,
) -> Plan:
    """The cheapest plan of a step's graph, over all meshes where none is named.

    `leaves` are those of the step's arguments, and `batch` the graph's inputs that are
    split with the batch. On a mesh that is named the plan is within `gap` of the best.
    Plans of `cutoff` seconds are of no use: where none is better, it is any and need
    not fit. Plans with `limits` on single choices, or a wider gap, are not cached.
    """
    start = perf_counter()
    if gathers_again(options.method):
        graph = gathering_again(graph)
    warn_fallbacks(graph)
    mesh = _mesh_shape(options, cluster, graph, leaves)
    if mesh is not None:
        check_shard_maps(graph, mesh)
        warn_ignored_constraints(graph, mesh)
    entry = CacheEntry(None)
    if not limits:
        entry = cache_entry(graph, leaves, batch, cluster, options)
    known = entry.load(graph)
    if known is not None:
        seconds = perf_counter() - start
        _log.info("%s: plan from %s in %.1f s", graph.name, entry.path, seconds)
        return known

    budget_bytes = options.budget_on(cluster)
    for_memory = getattr(options.method, "objective", "time") == "memory"

    def plan_on(
        mesh: MeshShape, gap: float, cutoff: float = math.inf
    ) -> IntraOpSolution:
        placed = placement_pins(leaves, graph, mesh)
        pinned = resolve_pins(options.pins, graph, mesh)
        check_returned_pins(graph, pinned, mesh)
        pins = {**placed, **pinned}
        method = options.method
        if isinstance(method, LayoutRules) and method.is_auto:
            own = restrictions_of(None, options.rules, graph, mesh, batch)
            place = graph, mesh, cluster, batch, budget_bytes
            found = auto_layout(method, *place, pins=pins, limits=(*own, *limits))
            return found.solution
        own = restrictions_of(method, options.rules, graph, mesh, batch)
        left = (*own, *ring_limits(graph, options), *limits)
        planner = BudgetPlanner(graph, mesh, cluster, batch, pins, left)
        if for_memory:
            return planner.least(budget_bytes)
        if budget_bytes == NO_BUDGET:
            return planner.free(gap, cutoff)
        return planner.within(budget_bytes, gap, cutoff)

    tried: tuple[TriedPlan, ...] = ()
    if mesh is None:
        shapes = dividing_first(graph, mesh_shapes(cluster))
        is_long = len(graph.operators()) >= MANY_OPERATORS
        ends = SearchLimits(least_seconds(graph, cluster), cutoff, is_long)
        search = search_meshes(cluster, plan_on, shapes, ends)
        _log.info("%s: %s", graph.name, search)
        solution, tried = search.solution, search.others()
    else:
        solution, _ = plan_below(plan_on, mesh, gap, cutoff)
    _log.info(
        "%s: planned %d operators in %.1f s, gap %.3g%%",
        graph.name,
        len(graph.operators()),
        perf_counter() - start,
        100 * solution.assignment.gap,
    )
    plan = Plan(solution.plan, tried=tried)
    if gap <= TIGHT_GAP and plan.predicted.step_seconds < cutoff:
        entry.store(plan)
    return plan


def with_placed_pins(
    options: Options, graph: OpGraph, leaves: Sequence[Any], cluster: Cluster
) -> Options:
    """The options, with specs for pins that keep arguments where they lie.

    Raises:
      ValueError: such an argument lies on no mesh, or on another.
    """
    mesh = None
    if options.mesh is not None:
        mesh = parse_mesh(options.mesh, cluster.num_devices)
    paths = [each.path for each in graph.inputs]
    return replace(options, pins=placed_pins(options.pins, paths, leaves, mesh))


def _mesh_shape(
    options: Options, cluster: Cluster, graph: OpGraph, leaves: Sequence[Any]
) -> MeshShape | None:
    """The mesh that the user, the step or the arguments name; None: search for one."""
    if options.mesh is not None:
        return parse_mesh(options.mesh, cluster.num_devices)
    named = user_mesh(graph) or mesh_of_leaves(leaves, cluster.num_devices)
    if named is not None:
        return named
    if isinstance(options.method, Megatron | ThreeD):
        return options.method.mesh(cluster.num_devices)
    names_axes = any(entry for spec in options.pins.values() for entry in spec or ())
    has_pins = any(op.kind in PINS for op in graph.operators())
    is_free = isinstance(options.method, Auto | ShardParallel)
    is_free &= getattr(options.method, "objective", "time") == "time"
    if names_axes or has_pins or options.rules or not is_free:
        return default_mesh(cluster)
    return None
