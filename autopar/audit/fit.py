"""Compile in the loop: a plan within a budget is believed once its program is compiled.

The predicted peak is a model of the compiler's. Where a program needs more than its
budget, the model's error on it is taken for that on its neighbours: the budget of the
search is lowered by it, three times at most. Where nothing is predicted to fit, the
plan that needs the least is compiled: if its program fits, the budget of the search is
raised by its error. What a plan says of its memory is the model's figure times the
errors seen before it; it is never read back from its own program.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import Any, Generic, TypeVar

import jax

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..lowering.compiled_program import compile_program
from ..lowering.programs import SpmdProgram
from ..methods.methods import Auto, ShardParallel
from ..options import Options
from ..planner.memory_budget import NO_BUDGET, with_budget
from ..planner.memory_users import OTHER_REMEDIES
from ..planner.planning import Planned, Refused, no_more
from ..planner.shared_plan import plan_together
from ..plans.parallel_plan import Plan
from ..plans.plan import Prediction
from .memory_use import MemoryUse

MOST_CORRECTIONS = 3
NEAR = 0.5
"""Plans predicted at less than this part of the budget need no compiling."""

MOST_ABOVE = 2.0
"""Where the least plan is predicted at more times the budget, nothing is compiled."""

_log = logging.getLogger("autopar")


def plan_fitting(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    program_of: Callable[[Planned], SpmdProgram],
    *,
    refused: Refused = no_more,
    elsewhere_seconds: float = 0.0,
) -> Planned:
    """A plan that fits its budget, also as compiled where this process has the devices.

    Other devices are compiled for, too, if `elsewhere_seconds` are given to a program.
    Where nothing is found to fit, `refused` may say more.

    Raises:
      InfeasiblePlanError: nothing was found to fit.
    """

    def plan(some: Options) -> Candidate[Planned]:
        planned = plan_together(fun, args, kwargs, some, refused)
        plan = planned.plan

        def compiled_bytes(limit_seconds: float) -> int:
            program = program_of(planned)
            compiled = compile_program(program, limit_seconds)
            return MemoryUse.of(compiled, program.host_bytes).device_bytes

        def told(predicted: Prediction) -> Planned:
            sharding = replace(plan.sharding, predicted=predicted)
            return replace(planned, plan=replace(plan, decision=sharding))

        named = planned, planned.traced.name, planned.cluster, plan.sharding.mesh.size
        return Candidate(*named, plan.predicted, compiled_bytes, told)

    if options.plan is not None:
        return plan(options).planned
    return fitting(options, plan, elsewhere_seconds)


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
        given = replace(options, plan=Plan(error.least_plan))
    elif isinstance(options.method, Auto | ShardParallel):
        given = replace(given, method=ShardParallel(objective="memory"))
    planned = plan_together(fun, args, kwargs, given)
    budget_bytes = options.budget_on(planned.cluster)
    decision = with_budget(planned.plan.sharding, budget_bytes)
    plan = replace(planned.plan, decision=decision)
    warnings.warn(
        f"{error}\nThe plan that needs the least is given, and may run out of memory; "
        f"with a `memory_budget` it is refused.",
        stacklevel=2,
    )
    return replace(planned, plan=plan)


_Planned = TypeVar("_Planned")


@dataclass(frozen=True, eq=False)
class Candidate(Generic[_Planned]):
    """A planned step, of one program or of stages, as the loop sees it.

    `compiled_bytes` compiles it, within some seconds where the devices are elsewhere,
    and says what a device holds; `told` is the same plan with another prediction.
    """

    planned: _Planned
    name: str
    cluster: Cluster
    num_devices: int
    predicted: Prediction
    compiled_bytes: Callable[[float], int]
    told: Callable[[Prediction], _Planned]


def fitting(
    options: Options,
    plan: Callable[[Options], Candidate[_Planned]],
    elsewhere_seconds: float = 0.0,
) -> _Planned:
    """The first plan that fits its budget; see `plan_fitting`.

    Raises:
      InfeasiblePlanError: nothing was found to fit.
    """
    return _Fit(options, plan, elsewhere_seconds).fitting()


@dataclass(eq=False)
class _Fit(Generic[_Planned]):
    options: Options
    plan: Callable[[Options], Candidate[_Planned]]
    elsewhere_seconds: float
    correction: float = 1.0
    least_seen: float = inf

    @cached_property
    def budget(self) -> int:
        """What a device may hold, in bytes."""
        return self.options.budget_on(self.options.cluster or Cluster.local())

    def fitting(self) -> _Planned:
        budget = self.budget
        for _ in range(1 + MOST_CORRECTIONS):
            try:
                planned = self.plan(self._corrected_options())
            except InfeasiblePlanError as refused:
                return self._least(refused)
            if not self._is_compiled(planned.num_devices):
                return planned.planned
            model_bytes = planned.predicted.peak_bytes
            if model_bytes * self.correction < NEAR * budget:
                return self._told(planned, budget)
            try:
                seen = self._compiled_bytes(planned)
            except TimeoutError:
                return planned.planned
            if seen <= self._limit(planned.cluster):
                return self._told(planned, budget)
            _log.info(
                "%s: compiled for %d bytes a device where %d were predicted and %d are "
                "allowed; planning again",
                *(planned.name, seen, model_bytes, budget),
            )
            # At least a little less, so that the same plan does not come again.
            self.correction = max(seen / model_bytes, budget / model_bytes * 1.001)
        raise self._refused(budget, None)

    def _limit(self, cluster: Cluster) -> int:
        """What a program may hold: the budget, or all of a device if none was named."""
        is_named = self.options.memory_budget is not None or self.budget == NO_BUDGET
        return self.budget if is_named else cluster.device.memory_bytes

    def _is_compiled(self, num_devices: int) -> bool:
        """Whether programs are compiled: for devices of this process, or elsewhere."""
        cluster, local = self.options.cluster or Cluster.local(), Cluster.local()
        is_own = cluster.ray_hosts is None and num_devices <= jax.device_count()
        is_here = is_own and cluster.device.kind == local.device.kind
        return is_here or self.elsewhere_seconds > 0

    def _corrected_options(self) -> Options:
        if self.correction == 1.0:
            return self.options
        return replace(self.options, memory_budget=int(self.budget / self.correction))

    def _least(self, error: InfeasiblePlanError) -> _Planned:
        """The plan that needs the least, or a quicker one, if its program fits.

        Raises:
          InfeasiblePlanError: it does not, or is too far above to be compiled.
        """
        budget = self.options.memory_budget
        model_bytes = error.least_budget_bytes
        if budget is not None and error.least_plan is None and self.correction > 1.0:
            raise self._refused(budget, error) from error
        if budget is None or model_bytes is None or error.least_plan is None:
            raise error
        is_far = max(model_bytes * self.correction, error.bound_bytes) > (
            MOST_ABOVE * budget
        )
        mesh = error.least_plan.mesh
        if is_far or not self._is_compiled(mesh.size):
            raise error
        given = replace(self.options, plan=Plan(error.least_plan), memory_budget=None)
        least = self.plan(given)
        seen = self._compiled_bytes(least)
        if seen > budget:
            raise self._refused(budget, error)
        had, self.correction = self.correction, seen / model_bytes
        if had > 1.0:  # others were compiled: there is nothing to be had between them
            return self._told(least, budget)
        try:
            quicker = self.plan(self._corrected_options())
        except InfeasiblePlanError:
            return self._told(least, budget)
        if self._compiled_bytes(quicker) <= budget:
            return self._told(quicker, budget)
        return self._told(least, budget)

    def _compiled_bytes(self, planned: Candidate[_Planned]) -> int:
        seen = planned.compiled_bytes(self.elsewhere_seconds or inf)
        self.least_seen = min(self.least_seen, seen)
        return seen

    def _told(self, planned: Candidate[_Planned], budget_bytes: int) -> _Planned:
        """The plan, with its prediction corrected; its program was seen to fit."""
        predicted = planned.predicted
        peak_bytes = predicted.peak_bytes
        correction = min(self.correction, budget_bytes / max(peak_bytes, 1))
        predicted = replace(
            predicted,
            peak_bytes=round(peak_bytes * correction),
            budget_bytes=0 if budget_bytes == NO_BUDGET else budget_bytes,
            memory_correction=correction,
        )
        return planned.told(predicted)

    def _refused(
        self, budget_bytes: int, error: InfeasiblePlanError | None
    ) -> InfeasiblePlanError:
        users = error.largest_users if error else ""
        least = int(self.least_seen)
        return InfeasiblePlanError(
            f"A compiled program must fit the memory budget of {budget_bytes:,} B a "
            f"device, but the least of those compiled needs {least:,} B; give "
            f"memory_budget={least}, {OTHER_REMEDIES}."
            + (f"\nMost is taken by\n{users}" if users else ""),
            least_budget_bytes=least,
            tightest_constraint="memory of the compiled program",
        )
