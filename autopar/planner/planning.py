"""From a function and its arguments to a plan: the way of a step through the planner.

plan_step        trace; plan, compile and correct until it fits (`fit.py`)
  plan_traced      microbatches, then variants of the step (`variant_search.py`)
    plan_graph       meshes (`mesh_search.py`), and on each of them
      BudgetPlanner    candidates, the cheapest of which fits (`budget.py`)
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..clusters.cluster import Cluster
from ..costs.user_shard_map import check_shard_maps
from ..errors import InfeasiblePlanError
from ..jax_compat import abstract_value
from ..methods.methods import Auto, ShardParallel
from ..methods.unsplit_state import warn_unsplit_state
from ..option_values import NO_BUDGET
from ..options import Options
from ..plans.plan_check import check_against
from ..plans.staged_plan import sharding_of, with_budget
from .divided_work import warn_repeated_work
from .fit import CompiledFit
from .gather_again import graph_of_plan
from .plan_like import is_of_plan, options_like
from .plan_request import PlanRequest
from .planned import Planned
from .step_forms import form_of_plan, forms_to_try
from .step_variants import StepVariants
from .variant_search import best_variant
from .whole_step import (
    TracedWhole,
    batch_tensors,
    in_microbatches,
    trace_whole,
)

_log = logging.getLogger("autopar")


def plan_step(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    *,
    elsewhere_seconds: float = 0.0,
) -> Planned:
    """A plan that fits its budget, also as compiled where this process has the devices.

    Other devices are compiled for, too, if `elsewhere_seconds` are given to a program.

    Raises:
      InfeasiblePlanError: nothing was found to fit.
    """
    whole = trace_whole(fun, args, kwargs, options)
    if options.plan is not None:
        return plan_traced(whole, options)
    fit = CompiledFit[Planned](options, elsewhere_seconds)
    for some in fit:
        try:
            fit.add(plan_traced(whole, some))
        except ValueError as error:
            fit.add(error)
    planned, predicted = fit.result
    return planned.saying(predicted)


def plan_traced(whole: TracedWhole, options: Options) -> Planned:
    """Plan a traced step by what is predicted of it, or check the plan given.

    Raises:
      InfeasiblePlanError: nothing is predicted to fit.
    """
    cluster = options.cluster or Cluster.local()
    if options.like is not None and options.plan is None:
        return _plan_like(whole, options, cluster)
    traced, graph = in_microbatches(whole, options)
    batch = batch_tensors(traced, graph, options)
    request = PlanRequest(graph, whole.leaves, batch, cluster, options)
    request = request.with_placed_pins()
    step = StepVariants(traced, graph, whole.roles, batch)
    if options.plan is not None:
        plan = sharding_of(options.plan)
        variant = form_of_plan(step, plan).of_plan(plan)
        graph = graph_of_plan(variant.graph, plan)
        check_shard_maps(graph, plan.mesh)
        check_against(plan, graph)
    else:
        forms = forms_to_try(step, options, cluster.num_devices)
        chosen = best_variant(forms, request)
        variant = chosen.variant
        plan = with_budget(chosen.plan, options.budget_on(cluster))
        graph = graph_of_plan(variant.graph, plan)
        batch = batch_tensors(variant.traced, variant.graph, options)
        warn_unsplit_state(options.method, variant.graph, plan, batch)
        is_free = isinstance(options.method, Auto | ShardParallel)
        if is_free and not (request.options.pins or options.rules):
            warn_repeated_work(graph, plan, batch)
    types = tuple(abstract_value(var.aval) for var in whole.traced.jaxpr.jaxpr.invars)
    return Planned(variant.traced, graph, whole.roles, plan, cluster, types, options)


def _plan_like(whole: TracedWhole, options: Options, cluster: Cluster) -> Planned:
    """The step with what can stay of the plan `options.like`, or that very plan."""
    own = options_like(options, whole.graph, cluster)
    if is_of_plan(options, cluster):
        try:
            same = replace(own, pins={}, plan=options.like)
            return replace(plan_traced(whole, same), options=own)
        except ValueError:  # it is of another step
            pass
    try:
        return plan_traced(whole, own)
    except InfeasiblePlanError as error:
        _log.warning(
            "%s: no plan keeps the arguments as in the plan given as `like`, so all is "
            "planned anew: %s",
            *(whole.graph.name, error),
        )
        return plan_traced(whole, replace(own, pins=options.pins))


def plan_of_least_memory(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    error: InfeasiblePlanError,
) -> Planned:
    """The plan that needs the least, where nothing fits devices as they are; it warns.

    Raises:
      InfeasiblePlanError: `error`, where a budget was given, or memory is not to blame.
    """
    is_memory = error.least_plan is not None or error.bound_bytes
    if options.memory_budget is not None or not is_memory:
        raise error
    given = replace(options, memory_budget=NO_BUDGET)
    if error.least_plan is not None:
        given = replace(options, plan=error.least_plan)
    elif isinstance(options.method, Auto | ShardParallel):
        given = replace(given, method=ShardParallel(objective="memory"))
    planned = plan_traced(trace_whole(fun, args, kwargs, options), given)
    budget = options.budget_on(planned.cluster)
    warnings.warn(
        f"{error}\nThe plan that needs the least is given, and may run out of memory; "
        f"with a `memory_budget` it is refused.",
        stacklevel=2,
    )
    plan = with_budget(planned.plan, budget)
    return replace(planned, plan=plan, options=options)
