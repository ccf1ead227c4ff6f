"""Refusing a step that no plan should bring near a budget, without a search.

The plan that is known to hold the least then says what budget would do: ZeRO-3 is
mostly within a tenth of an even share (`even_share.py`). Where it is not, a plan that
near is searched for, but not for long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..costs.memory import memory_profile
from ..errors import InfeasiblePlanError
from ..graph.op_graph import OpGraph
from ..methods.gather_again import graph_of_plan
from ..methods.methods import Auto, ShardParallel
from ..methods.named_methods import Zero
from ..options import Options
from ..plans.plan import ShardingPlan
from .even_share import even_share_bytes
from .memory_budget import NO_BUDGET
from .memory_users import out_of_reach_error

NEAR_SHARE = 1.1  # times an even share
NEAR_WORK = 15.0  # seconds of work to find a plan that near
METHODS = Zero(3), Zero(3, reshard_after_forward=False)
PlanWith = Callable[[Options], ShardingPlan]
PlanWithin = Callable[[int], ShardingPlan]
_log = logging.getLogger("autopar")


def refuse_far(
    graph: OpGraph,
    free: ShardingPlan,
    options: Options,
    budget_bytes: int,
    plan_with: PlanWith | None,
    plan_within: PlanWithin,
) -> None:
    """Refuses a budget that is out of reach, unless one of a few plans fits it.

    Args:
      graph: the step's.
      free: its cheapest plan without a budget.
      options: what it was planned with.
      budget_bytes: what a device may hold.
      plan_with: plans the step with other options; None if nothing but `free` counts.
      plan_within: looks for a plan within bytes of a device, for `NEAR_WORK` at most.

    Raises:
      InfeasiblePlanError: none of these plans fits.
    """
    plans = [free]
    if plan_with is not None and _is_open(options):
        on_mesh = replace(options, mesh=str(free.mesh), memory_budget=NO_BUDGET)
        plans += _frugal(on_mesh, plan_with)
    share = even_share_bytes(graph, free.mesh.size)
    if _least(plans).predicted.peak_bytes > max(budget_bytes, NEAR_SHARE * share):
        try:
            plans.append(plan_within(int(NEAR_SHARE * share)))
        except InfeasiblePlanError as error:
            if error.least_plan is not None:
                plans.append(error.least_plan)
    least = _least(plans)
    if least.predicted.peak_bytes > budget_bytes:
        profile = memory_profile(graph_of_plan(graph, least), least)
        raise out_of_reach_error(profile, budget_bytes, share)


def _least(plans: Sequence[ShardingPlan]) -> ShardingPlan:
    return min(plans, key=lambda plan: plan.predicted.peak_bytes)


def _is_open(options: Options) -> bool:
    """Whether a method may be chosen."""
    return isinstance(options.method, Auto | ShardParallel) and not options.rules


def _frugal(options: Options, plan_with: PlanWith) -> Iterator[ShardingPlan]:
    for method in METHODS:
        try:
            yield plan_with(replace(options, method=method))
        except (ValueError, NotImplementedError) as error:
            _log.info("%s: %s", method, error)
