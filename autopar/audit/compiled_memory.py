"""Compile in the loop: a plan within a memory budget is believed once it is compiled.

The predicted peak is a model of the compiler's. Where a program needs more than its
budget, the model's error on it is taken as the error on its neighbours: the budget is
lowered by it and the search goes on from what it met; where that does not do three
times, what holds half of the budget is asked for. Where nothing is predicted to
fit, the plan that needs the least is compiled: if its program fits, the budget is
raised by that error, and if not, what it needs is named. Before anything is refused,
the cheapest plan of all is compiled, too: of unlike plans the errors are unlike. What a
plan says of its memory is never read back from its own program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import Any

import jax

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..lowering.programs import SpmdProgram
from ..options import Options
from ..planner.earlier_searches import EarlierSearches
from ..planner.memory_budget import NO_BUDGET
from ..planner.memory_users import OTHER_REMEDIES
from ..planner.planning import Planned
from ..planner.shared_plan import plan_together
from ..plans.parallel_plan import Plan
from ..plans.plan import ShardingPlan
from .memory_use import MemoryUse

MOST_CORRECTIONS = 3
NEAR = 0.5
"""Plans predicted at less than this part of the budget, the error seen before included,
need no compiling."""

MOST_ABOVE = 2.0
"""Where the least plan is predicted at more times the budget, nothing is compiled."""

_log = logging.getLogger("autopar")


def plan_fitting(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    program_of: Callable[[Planned], SpmdProgram],
) -> Planned:
    """A plan that fits its budget, also as compiled where this process has the devices.

    Raises:
      InfeasiblePlanError: as `fit_compiled` and `plan_function`.
    """

    compiled: list[tuple[ShardingPlan, int]] = []
    earlier = EarlierSearches()

    def compiled_bytes(planned: Planned) -> int:
        plan = planned.plan.sharding
        for other, seen_bytes in compiled:
            if _decides_alike(plan, other):
                return seen_bytes
        program = program_of(planned)
        seen_bytes = MemoryUse.of(program.compile(), program.host_bytes).device_bytes
        compiled.append((plan, seen_bytes))
        return seen_bytes

    def plan_again(budget_bytes: int | None) -> Planned:
        some = replace(options, memory_budget=budget_bytes)
        return plan_together(fun, args, kwargs, some, earlier)

    def least_of(error: InfeasiblePlanError) -> Planned | None:
        if error.least_plan is None:
            return None
        own = replace(options, plan=Plan(error.least_plan), memory_budget=None)
        planned = plan_together(fun, args, kwargs, own)
        return planned if _has_devices(planned) else None

    try:
        return _search_fitting(options, compiled_bytes, plan_again, least_of)
    except InfeasiblePlanError as error:
        if options.memory_budget is None or options.plan is not None:
            raise
        is_far = error.far_bound_bytes > MOST_ABOVE * options.memory_budget
        if is_far or not _is_here(options.cluster or Cluster.local()):
            raise
        return _cheapest(error, options.memory_budget, compiled_bytes, plan_again)


def _search_fitting(
    options: Options,
    compiled_bytes: Callable[[Planned], int],
    plan_again: Callable[[int | None], Planned],
    least_of: Callable[[InfeasiblePlanError], Planned | None],
) -> Planned:
    """As `plan_fitting`, of plans that are predicted to fit or hold the least."""
    compiling = compiled_bytes, plan_again, least_of
    try:
        planned = plan_again(options.memory_budget)
    except InfeasiblePlanError as error:
        budget_bytes = options.memory_budget
        if budget_bytes is None:
            raise
        fitting, correction = _overrated(error, budget_bytes, compiled_bytes, least_of)
        try:
            planned = plan_again(ceil(budget_bytes / correction))
            return fit_compiled(planned, budget_bytes, *compiling, correction)
        except InfeasiblePlanError:
            return _corrected(fitting, budget_bytes, correction=1.0)
    if options.plan is not None or not _has_devices(planned):
        return planned
    return fit_compiled(planned, options.budget_on(planned.cluster), *compiling)


def _cheapest(
    error: InfeasiblePlanError,
    budget_bytes: int,
    compiled_bytes: Callable[[Planned], int],
    plan_again: Callable[[int], Planned],
) -> Planned:
    """The cheapest plan of all, which no budget bound, if its program fits.

    Raises:
      InfeasiblePlanError: it does not: `error`, or what it needs where that is less.
    """
    try:
        planned = plan_again(NO_BUDGET)
    except InfeasiblePlanError:
        raise error from None
    is_far = planned.plan.predicted.peak_bytes > MOST_ABOVE * budget_bytes
    if is_far or not _has_devices(planned):
        raise error
    seen_bytes = compiled_bytes(planned)
    if seen_bytes <= budget_bytes:
        return _corrected(planned, budget_bytes, correction=1.0)
    if seen_bytes < (error.least_budget_bytes or inf):
        raise _infeasible(budget_bytes, seen_bytes, error) from None
    raise error


def _decides_alike(plan: ShardingPlan, other: ShardingPlan) -> bool:
    """Whether two plans have one program, whatever was proved of them."""
    if plan.predicted.peak_bytes != other.predicted.peak_bytes:
        return False
    return replace(plan, predicted=other.predicted) == other


def _overrated(
    error: InfeasiblePlanError,
    budget_bytes: int,
    compiled_bytes: Callable[[Planned], int],
    least_of: Callable[[InfeasiblePlanError], Planned | None],
) -> tuple[Planned, float]:
    """The least plan, if its program fits, and what that holds of its prediction.

    Raises:
      InfeasiblePlanError: it does not; names what it needs. Or `error`, if there is no
        such plan, or it is far above the budget.
    """
    least = error.least_budget_bytes
    if least is None or least > MOST_ABOVE * budget_bytes:
        raise error
    planned = least_of(error)
    if planned is None:
        raise error
    seen_bytes = compiled_bytes(planned)
    if seen_bytes > budget_bytes:
        raise _infeasible(budget_bytes, seen_bytes, error) from None
    return planned, seen_bytes / least


def _has_devices(planned: Planned) -> bool:
    """Whether this process has devices of the plan's kind, and enough of them."""
    has_enough = planned.plan.sharding.mesh.size <= jax.device_count()
    return has_enough and _is_here(planned.cluster)


def _is_here(cluster: Cluster) -> bool:
    """Whether this process has devices of a cluster's kind."""
    is_own = cluster.ray_hosts is None
    return is_own and cluster.device.kind == Cluster.local().device.kind


def fit_compiled(
    planned: Planned,
    budget_bytes: int,
    compiled_bytes: Callable[[Planned], int],
    plan_again: Callable[[int], Planned],
    least_of: Callable[[InfeasiblePlanError], Planned | None] = lambda _: None,
    correction: float = 1.0,
) -> Planned:
    """The plan, or one solved again, whose compiled program fits.

    Its `predicted.peak_bytes` is corrected by the error of the plans before it.

    Args:
      planned: a plan that is predicted to fit.
      budget_bytes: what a device may hold.
      compiled_bytes: compiles a plan; what its program holds on one device.
      plan_again: plans within another budget.
      least_of: the plan that holds the least, of a search that found none to fit.
      correction: the model's error on another plan.

    Raises:
      InfeasiblePlanError: nothing predicted to fit, error included, or no correction
        brought a program below the budget.
    """
    least = 0
    for corrections in range(MOST_CORRECTIONS + 2):
        model_bytes = planned.plan.predicted.peak_bytes
        if model_bytes * correction < NEAR * budget_bytes:
            return _corrected(planned, budget_bytes, correction)
        seen_bytes = compiled_bytes(planned)
        least = min(least or seen_bytes, seen_bytes)
        if seen_bytes <= budget_bytes:
            return _corrected(planned, budget_bytes, correction)
        correction = max(seen_bytes / model_bytes, correction)
        if corrections > MOST_CORRECTIONS:
            break
        _log.info(
            "%s: compiled for %d bytes a device where %d were predicted and %d are "
            "allowed; planning again",
            *(planned.traced.name, seen_bytes, model_bytes, budget_bytes),
        )
        try:
            lowered = min(budget_bytes / correction, model_bytes * (1 - 1e-3))
            if corrections == MOST_CORRECTIONS:
                lowered = min(lowered, NEAR * budget_bytes)
            planned = plan_again(int(lowered))
        except InfeasiblePlanError as error:
            found = ceil((error.least_budget_bytes or 0) * correction)
            is_near = (error.least_budget_bytes or inf) <= MOST_ABOVE * budget_bytes
            least_plan = least_of(error) if is_near else None
            if least_plan is not None:
                found = compiled_bytes(least_plan)
                if found <= budget_bytes:
                    return _corrected(least_plan, budget_bytes, correction)
            raise _infeasible(budget_bytes, min(least, found), error) from None
    raise _infeasible(budget_bytes, least, None)


def _corrected(planned: Planned, budget_bytes: int, correction: float) -> Planned:
    """The plan with its prediction corrected; its program was seen to fit."""
    predicted = planned.plan.predicted
    peak_bytes = predicted.peak_bytes
    correction = min(correction, budget_bytes / max(peak_bytes, 1))
    predicted = replace(
        predicted,
        peak_bytes=round(peak_bytes * correction),
        budget_bytes=budget_bytes,
        memory_correction=correction,
    )
    sharding = replace(planned.plan.sharding, predicted=predicted)
    return replace(planned, plan=Plan(sharding))


def _infeasible(
    budget_bytes: int, least: int, error: InfeasiblePlanError | None
) -> InfeasiblePlanError:
    users = error.largest_users if error else ""
    return InfeasiblePlanError(
        f"A compiled program must fit the memory budget of {budget_bytes:,} B a "
        f"device, but the least of those compiled or predicted needs {least:,} B; "
        f"give memory_budget={least}, {OTHER_REMEDIES}."
        + (f"\nMost is taken by\n{users}" if users else ""),
        least_budget_bytes=least,
        tightest_constraint="memory of the compiled program",
    )
