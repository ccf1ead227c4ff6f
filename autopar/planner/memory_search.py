"""Which variant of a step to run: what to make again and to offload, if memory binds.

Each variant's plan without a budget bounds all its plans from below, and is the best of
them if it fits. So few variants are solved within the budget: those that do not fit as
they are, and would be cheaper than the cheapest that does. Of unrolled segments the
fewest are made again, and of the optimizer's state the fewest leaves offloaded (those
used furthest in the future first), that let the plan without a budget fit. Those that
are nearest the budget come first: they are solved soonest, and what they take ends the
solution of others as soon as its bound is that high.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from ..costs.memory import memory_profile
from ..errors import InfeasiblePlanError
from ..methods.gather_again import graph_of_plan
from ..plans.parallel_plan import Plan
from ..plans.plan import ShardingPlan, TriedPlan
from ..rematerialisation.remat import LEVELS, Remat
from .memory_budget import NO_BUDGET
from .memory_users import infeasible_error
from .step_variants import (
    Offload,
    StepVariant,
    StepVariants,
    nothing_to_offload,
)

PlanVariant = Callable[[StepVariant, int, float], Plan]
_log = logging.getLogger("autopar")


@dataclass(frozen=True, eq=False)
class Chosen:
    """A variant and its plan, which says what it makes again."""

    variant: StepVariant
    plan: Plan

    @property
    def seconds(self) -> float:
        return self.plan.predicted.step_seconds


def choose_variant(
    variants: StepVariants,
    remat: str | None,
    offload: Offload | None,
    budget_bytes: int,
    plan_variant: PlanVariant,
) -> Chosen:
    """The cheapest variant that fits, and its plan.

    Args:
      variants: of the step.
      remat: None, "auto", or the text of a `Remat`.
      offload: None, or what the option says.
      budget_bytes: what a device may hold.
      plan_variant: the cheapest plan of a variant within a budget; any, if none takes
        less than some seconds.

    Raises:
      ValueError: a remat or an offload was asked for that changes nothing.
      InfeasiblePlanError: nothing fits.
    """
    if offload == "optimizer_state" and not variants.offloadable:
        raise ValueError(nothing_to_offload(variants.graph.name))
    fixed = None if remat in (None, "auto") else Remat.parse(str(remat))
    if "auto" not in (remat, offload):
        at_host = variants.asked_for(offload)
        variant = variants.make(fixed, at_host)
        if fixed and not variant.num_segments:
            raise ValueError(_nothing_again(variants, fixed))
        return _chosen(variant, plan_variant(variant, budget_bytes, inf))
    levels: list[Remat | None] = [fixed]
    if remat == "auto":
        levels += [Remat(level) for level in LEVELS]
    search = _Search(variants, offload, budget_bytes, plan_variant)
    return search.run(levels)


class _Search:
    def __init__(
        self,
        variants: StepVariants,
        offload: Offload | None,
        budget_bytes: int,
        plan_variant: PlanVariant,
    ) -> None:
        self.variants = variants
        self.offload: Offload | None = offload
        self.budget_bytes, self.plan_variant = budget_bytes, plan_variant
        self.best: Chosen | None = None
        self.bounds: list[float] = []
        self.unfit: list[Chosen] = []
        self.errors: list[InfeasiblePlanError] = []
        self.tried: dict[str, TriedPlan] = {}

    def run(self, levels: Sequence[Remat | None]) -> Chosen:
        for remat in levels:
            fits = self.try_level(remat)
            if fits and remat is None and not self.needs_host():
                break  # all others do more work
        self.solve_within()
        if self.best is None:
            raise self.infeasible()
        found, mine = self.with_gap(self.best), self.best.plan.predicted
        others = (each for each in self.tried.values() if each.predicted != mine)
        tried = (*found.plan.tried, *others)
        return replace(found, plan=replace(found.plan, tried=tried))

    def needs_host(self) -> bool:
        """Whether the cheapest so far has to move state."""
        return self.best is not None and self.best.variant.num_at_host > 0

    def try_level(self, remat: Remat | None) -> bool:
        """Whether a variant with `remat` fits as it is."""
        variant = self.variants.make(remat, self.always_at_host())
        if remat is not None and not variant.num_segments:
            return False
        if self.fits(variant):
            self.fewest_segments(variant)
            return True
        everything = self.variants.offloadable
        if self.offload != "auto" or not everything:
            return False
        if not self.fits(self.variants.make(remat, everything)):
            return False

        def fits_with(number: int) -> bool:
            variant = self.variants.make(remat, everything[:number])
            return self.fits(variant, is_trial=True)

        _least(len(everything), fits_with)
        return True

    def always_at_host(self) -> tuple[int, ...]:
        return self.variants.asked_for(self.offload)

    def fewest_segments(self, variant: StepVariant) -> None:
        remat = variant.remat
        if remat is None or remat.num_segments is not None:
            return

        def fits_with(number: int) -> bool:
            some = replace(remat, num_segments=number)
            variant = self.variants.make(some, self.always_at_host())
            return self.fits(variant, is_trial=True)

        _least(variant.num_segments, fits_with)

    def fits(self, variant: StepVariant, *, is_trial: bool = False) -> bool:
        """Whether the cheapest plan of a variant fits; the best that does is kept.

        One that does not is solved within the budget later, unless it `is_trial`.
        """
        found = _chosen(variant, self.plan_variant(variant, NO_BUDGET, inf))
        predicted = found.plan.predicted
        _log.info(
            "%s: %.4g s, %d B a device without a budget",
            *(variant, predicted.step_seconds, predicted.peak_bytes),
        )
        self.note(found)
        if predicted.peak_bytes > self.budget_bytes:
            if not is_trial:
                self.unfit.append(found)
            return False
        self.take(found)
        return True

    def note(self, found: Chosen) -> None:
        """Keeps what a plan takes, for advice."""
        variant = found.variant
        title = f'remat="{variant.remat}"' if variant.remat else "no remat"
        title += ' with offload="auto"' * bool(variant.num_at_host)
        self.tried[title] = TriedPlan(title, found.plan.predicted)

    def take(self, found: Chosen) -> None:
        self.bounds.append(_bound(found))
        if self.best is None or found.seconds < self.best.seconds:
            self.best = found

    def solve_within(self) -> None:
        """Solves the variants within the budget that could be cheaper."""
        for free in sorted(self.unfit, key=_seconds_times_bytes):
            if free.seconds >= self.least_seconds:
                continue
            sharding = free.plan.sharding
            if sharding.mesh.size == 1:  # there is no other way to split it
                profile = memory_profile(
                    graph_of_plan(free.variant.graph, sharding), sharding
                )
                error = infeasible_error(profile, self.budget_bytes)
                self.errors.append(_of_variant(error, free.variant))
                continue
            try:
                plan = self.plan_below(free.variant)
            except InfeasiblePlanError as error:
                self.errors.append(_of_variant(error, free.variant))
                continue
            self.note(_chosen(free.variant, plan))
            self.take(_chosen(free.variant, plan))

    @property
    def least_seconds(self) -> float:
        """What a plan must take less than to be of use."""
        return self.best.seconds if self.best else inf

    def plan_below(self, variant: StepVariant) -> Plan:
        """The cheapest plan of a variant that fits; any, if it is not the best so far.

        Raises:
          InfeasiblePlanError: none fits.
        """
        plan = self.plan_variant(variant, self.budget_bytes, self.least_seconds)
        predicted = plan.predicted
        is_less = predicted.step_seconds < self.least_seconds
        if is_less and predicted.peak_bytes > self.budget_bytes:
            return self.plan_variant(variant, self.budget_bytes, inf)
        return plan

    def infeasible(self) -> InfeasiblePlanError:
        """The error of the variant that needs the least."""
        return min(self.errors, key=lambda each: each.least_budget_bytes or inf)

    def with_gap(self, best: Chosen) -> Chosen:
        """The gap against the least bound of all variants that were not ruled out."""
        gap = max(0.0, 1.0 - min(self.bounds) / best.seconds)
        return _with_gap(best, gap)


def _chosen(variant: StepVariant, plan: Plan) -> Chosen:
    return Chosen(variant, replace(plan, decision=_of(variant, plan.sharding)))


def _of(variant: StepVariant, plan: ShardingPlan) -> ShardingPlan:
    """The plan, which says what variant of the step it is of."""
    has = variant.remat and variant.num_segments
    remat = str(variant.remat) if has else ""
    return replace(plan, remat=remat, padding=variant.padding)


def _of_variant(
    error: InfeasiblePlanError, variant: StepVariant
) -> InfeasiblePlanError:
    """The error, whose least plan says what variant it is of."""
    if error.least_plan is not None:
        error.least_plan = _of(variant, error.least_plan)
    return error


def _seconds_times_bytes(free: Chosen) -> float:
    return free.seconds * free.plan.predicted.peak_bytes


def _bound(found: Chosen) -> float:
    return found.seconds * (1.0 - found.plan.predicted.optimality_gap)


def _with_gap(best: Chosen, gap: float) -> Chosen:
    sharding = best.plan.sharding
    predicted = replace(sharding.predicted, optimality_gap=gap)
    decision = replace(sharding, predicted=predicted)
    return replace(best, plan=replace(best.plan, decision=decision))


def _least(most: int, is_enough: Callable[[int], bool]) -> int:
    """The least number from 1 up that is enough, given that `most` is."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def _nothing_again(variants: StepVariants, remat: Remat) -> str:
    return (
        f"`remat` makes values of the forward pass again, but in "
        f"{variants.graph.name} {remat} finds none that the backward pass reads: "
        f"nothing is differentiated, all of it is in one segment, or jax.checkpoint is "
        f"there already; leave `remat` out."
    )
