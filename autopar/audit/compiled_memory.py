"""Compile in the loop: a plan within a memory budget is believed once it is compiled.

The predicted peak is a model of the compiler's. Where a program needs more than its
budget, the model's error on it is taken as the error on its neighbours: the budget is
lowered by it and the problem solved again. What a plan says of its memory is never read
back from its own program.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

import jax

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..lowering.programs import SpmdProgram
from ..options import Options
from ..planner.planning import Planned, budget_of
from ..planner.shared_plan import plan_together
from ..plans.parallel_plan import Plan
from .memory_use import MemoryUse

MOST_CORRECTIONS = 3
NEAR = 0.5
"""Plans predicted at less than this part of the budget, the error seen before included,
need no compiling."""

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
    planned = plan_together(fun, args, kwargs, options)
    if options.plan is not None or not _has_devices(planned):
        return planned

    def compiled_bytes(planned: Planned) -> int:
        program = program_of(planned)
        return MemoryUse.of(program.compile(), program.host_bytes).device_bytes

    def plan_again(budget_bytes: int) -> Planned:
        return plan_together(
            fun, args, kwargs, replace(options, memory_budget=budget_bytes)
        )

    budget_bytes = budget_of(options, planned.cluster)
    return fit_compiled(planned, budget_bytes, compiled_bytes, plan_again)


def _has_devices(planned: Planned) -> bool:
    """Whether this process has devices of the plan's kind, and enough of them."""
    cluster = planned.cluster
    return (
        cluster.ray_hosts is None
        and planned.plan.sharding.mesh.size <= jax.device_count()
        and cluster.device.kind == Cluster.local().device.kind
    )


def fit_compiled(
    planned: Planned,
    budget_bytes: int,
    compiled_bytes: Callable[[Planned], int],
    plan_again: Callable[[int], Planned],
) -> Planned:
    """The plan, or one solved again, whose compiled program fits.

    Its `predicted.peak_bytes` is corrected by the error of the plans before it.

    Args:
      planned: a plan that is predicted to fit.
      budget_bytes: what a device may hold.
      compiled_bytes: compiles a plan; what its program holds on one device.
      plan_again: plans within another budget.

    Raises:
      InfeasiblePlanError: nothing predicted to fit, error included, or no correction
        brought a program below the budget.
    """
    correction = 1.0
    least = 0
    for round_number in range(MOST_CORRECTIONS + 1):
        model_bytes = planned.plan.predicted.peak_bytes
        if model_bytes * correction < NEAR * budget_bytes:
            return _corrected(planned, budget_bytes, correction)
        seen_bytes = compiled_bytes(planned)
        least = min(least or seen_bytes, seen_bytes)
        if seen_bytes <= budget_bytes:
            return _corrected(planned, budget_bytes, correction)
        correction = max(seen_bytes / model_bytes, correction)
        if round_number == MOST_CORRECTIONS:
            break
        _log.info(
            "%s: compiled for %d bytes a device where %d were predicted and %d are "
            "allowed; planning again",
            *(planned.traced.name, seen_bytes, model_bytes, budget_bytes),
        )
        try:
            lowered = min(budget_bytes / correction, model_bytes * (1 - 1e-3))
            planned = plan_again(int(lowered))
        except InfeasiblePlanError as error:
            found = ceil((error.least_budget_bytes or 0) * correction)
            raise _infeasible(budget_bytes, min(least, found), str(error)) from None
    raise _infeasible(budget_bytes, least, "")


def _corrected(planned: Planned, budget_bytes: int, correction: float) -> Planned:
    predicted = planned.plan.predicted
    predicted = replace(
        predicted,
        peak_bytes=round(predicted.peak_bytes * correction),
        budget_bytes=budget_bytes,
        memory_correction=correction,
    )
    sharding = replace(planned.plan.sharding, predicted=predicted)
    return replace(planned, plan=Plan(sharding))


def _infeasible(budget_bytes: int, least: int, reason: str) -> InfeasiblePlanError:
    return InfeasiblePlanError(
        f"A compiled program must fit the memory budget of {budget_bytes:,} B a "
        f"device, but the least of those compiled or predicted needs {least:,} B; "
        f"give memory_budget={least}. {reason}".rstrip(),
        least_budget_bytes=least,
        tightest_constraint="memory of the compiled program",
    )
