"""Which variant of a step to run: padded or not, its attention, what is made again.

A step has several forms: examples that the devices do not divide are padded to a number
that they do, and attention may be one operator. Each form is tried whose plan without a
budget may be quicker than the best so far.

Of each form, parts may be made again and state offloaded, if memory binds. A variant's
plan without a budget bounds all its plans from below, and is the best of them if it
fits. So few variants are solved within the budget: those that do not fit as they are,
and would be cheaper than the cheapest that does. Of unrolled segments the fewest are
made again, and of the optimizer's state the fewest leaves offloaded (those used
furthest in the future first), that let the plan without a budget fit. Those that are
nearest the budget come first: they are solved soonest, and what they take ends the
solution of others as soon as its bound is that high.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeVar

from ..costs.memory import memory_profile
from ..errors import InfeasiblePlanError
from ..methods.gather_again import graph_of_plan
from ..option_values import LEVELS, NO_BUDGET, Offload, Remat
from ..plans.plan import ShardingPlan, TriedPlan
from .memory_users import infeasible_error
from .step_variants import StepVariant, StepVariants, nothing_to_offload

_log = logging.getLogger("autopar")
_T = TypeVar("_T")
Asking = Generator["Question", None, _T]


@dataclass(frozen=True, eq=False)
class Question:
    """What is the cheapest plan of a variant within a budget?

    Any, if none takes less than `cutoff` seconds.
    """

    variant: StepVariant
    budget_bytes: int
    cutoff: float = inf


@dataclass(frozen=True, eq=False)
class Chosen:
    """A variant and its plan, which says what it makes again."""

    variant: StepVariant
    plan: ShardingPlan

    @property
    def seconds(self) -> float:
        return self.plan.predicted.step_seconds

    @property
    def bound(self) -> float:
        return self.seconds * (1.0 - self.plan.predicted.optimality_gap)


class VariantSearch:
    """Questions, one after the other, as the answers to those before ask.

    Each is answered by `add` before the next. When there are no more, `chosen` is the
    cheapest variant that fits.

    Args:
      forms: of the step, those first that are tried first.
      remat: None, "auto", or the text of a `Remat`.
      offload: None, or what the option says.
      budget_bytes: what a device may hold.

    Raises (where it goes on):
      ValueError: a remat or an offload was asked for that changes nothing.
      InfeasiblePlanError: nothing fits; that of the step as it is.
    """

    def __init__(
        self,
        forms: Iterable[StepVariants],
        remat: str | None,
        offload: Offload | None,
        budget_bytes: int,
    ) -> None:
        self.forms, self.remat = forms, remat
        self.offload: Offload | None = offload
        self.budget_bytes = budget_bytes
        self.chosen: Chosen | None = None
        self._answer: ShardingPlan | ValueError | None = None
        self._free: list[Chosen] = []

    def add(self, answer: ShardingPlan | ValueError) -> None:
        """Notes the plan that was asked for, or why there is none."""
        self._answer = answer

    def __iter__(self) -> Iterator[Question]:
        refused: ValueError | None = None
        best_form: StepVariants | None = None
        is_plainer = False
        for form in self.forms:
            try:
                if self.chosen is not None:
                    free = yield from self._ask(Question(form.make(None), NO_BUDGET))
                    if free.bound >= self.chosen.seconds:
                        continue
                found = yield from self._of_form(form)
            except ValueError as error:  # nothing fits, or a method must split examples
                if not form.padding:
                    refused = error
                continue
            best = self.chosen
            if best is not None:
                words = found.seconds, form, best.seconds, best_form
                _log.info("%s: %.4g s %s, %.4g s %s", form.graph.name, *words)
                is_plainer = found.seconds == best.seconds and not form.padding
            if best is None or found.seconds < best.seconds or is_plainer:
                self.chosen, best_form = found, form
        if self.chosen is None:
            assert refused is not None, "a step has a form"
            raise refused

    def _ask(self, question: Question) -> Asking[Chosen]:
        """The answer, or one known: a plan without a budget that fits is the cheapest.

        Raises:
          ValueError: the answer, where it is no plan.
        """
        variant = question.variant
        for known in self._free:
            peak_bytes = known.plan.predicted.peak_bytes
            is_same = known.variant.graph is variant.graph
            if is_same and peak_bytes <= question.budget_bytes:
                return Chosen(variant, _of(variant, known.plan))
        yield question
        if not isinstance(self._answer, ShardingPlan):
            assert self._answer is not None, "a question is answered by `add`"
            raise self._answer
        found = Chosen(variant, _of(variant, self._answer))
        if question.budget_bytes == NO_BUDGET:
            self._free.append(found)
        return found

    def _of_form(self, variants: StepVariants) -> Asking[Chosen]:
        """The cheapest variant of one form that fits."""
        remat, offload = self.remat, self.offload
        if offload == "optimizer_state" and not variants.offloadable:
            raise ValueError(nothing_to_offload(variants.graph.name))
        fixed = None if remat in (None, "auto") else Remat.parse(str(remat))
        if "auto" not in (remat, offload):
            variant = variants.make(fixed, variants.asked_for(offload))
            if fixed and not variant.num_segments:
                raise ValueError(_nothing_again(variants, fixed))
            return (yield from self._ask(Question(variant, self.budget_bytes)))
        levels: list[Remat | None] = [fixed]
        if remat == "auto":
            levels += [Remat(level) for level in LEVELS]
        return (yield from _FormSearch(self, variants).run(levels))


class _FormSearch:
    """The search of what one form makes again and offloads."""

    def __init__(self, search: VariantSearch, variants: StepVariants) -> None:
        self.search, self.variants = search, variants
        self.offload: Offload | None = search.offload
        self.budget_bytes = search.budget_bytes
        self.best: Chosen | None = None
        self.bounds: list[float] = []
        self.unfit: list[Chosen] = []
        self.errors: list[InfeasiblePlanError] = []
        self.tried: dict[str, TriedPlan] = {}

    def run(self, levels: Sequence[Remat | None]) -> Asking[Chosen]:
        for remat in levels:
            fits = yield from self.try_level(remat)
            if fits and remat is None and not self.needs_host():
                break  # all others do more work
        yield from self.solve_within()
        if self.best is None:
            raise min(self.errors, key=lambda each: each.least_budget_bytes or inf)
        gap = max(0.0, 1.0 - min(self.bounds) / self.best.seconds)
        plan, mine = self.best.plan, self.best.plan.predicted
        others = (each for each in self.tried.values() if each.predicted != mine)
        predicted = replace(mine, optimality_gap=gap)
        plan = replace(plan, predicted=predicted, tried=(*plan.tried, *others))
        return replace(self.best, plan=plan)

    def needs_host(self) -> bool:
        """Whether the cheapest so far has to move state."""
        return self.best is not None and self.best.variant.num_at_host > 0

    def try_level(self, remat: Remat | None) -> Asking[bool]:
        """Whether a variant with `remat` fits as it is."""
        at_host = self.variants.asked_for(self.offload)
        variant = self.variants.make(remat, at_host)
        if remat is not None and not variant.num_segments:
            return False
        if (yield from self.fits(variant)):
            if remat is not None and remat.num_segments is None:
                yield from self.fewest(
                    lambda n: self.variants.make(
                        replace(remat, num_segments=n), at_host
                    ),
                    variant.num_segments,
                )
            return True
        everything = self.variants.offloadable
        if self.offload != "auto" or not everything:
            return False
        if not (yield from self.fits(self.variants.make(remat, everything))):
            return False
        yield from self.fewest(
            lambda n: self.variants.make(remat, everything[:n]), len(everything)
        )
        return True

    def fewest(self, variants: Callable[[int], StepVariant], most: int) -> Asking[None]:
        """Tries variants by number, of which that of `most` fits, down to the least."""
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            fits = yield from self.fits(variants(middle), is_trial=True)
            low, high = (low, middle) if fits else (middle, high)

    def fits(self, variant: StepVariant, *, is_trial: bool = False) -> Asking[bool]:
        """Whether the cheapest plan of a variant fits; the best that does is kept.

        One that does not is solved within the budget later, unless it `is_trial`.
        """
        found = yield from self.search._ask(Question(variant, NO_BUDGET))
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
        self.bounds.append(found.bound)
        if self.best is None or found.seconds < self.best.seconds:
            self.best = found

    def solve_within(self) -> Asking[None]:
        """Solves the variants within the budget that could be cheaper."""
        for free in sorted(self.unfit, key=_seconds_times_bytes):
            if free.seconds >= self.least_seconds:
                continue
            try:
                if free.plan.mesh.size == 1:  # there is no other way to split it
                    graph = graph_of_plan(free.variant.graph, free.plan)
                    profile = memory_profile(graph, free.plan)
                    raise infeasible_error(profile, self.budget_bytes)
                found = yield from self.below(free.variant)
            except InfeasiblePlanError as error:
                if error.least_plan is not None:
                    error.least_plan = _of(free.variant, error.least_plan)
                self.errors.append(error)
            else:
                self.note(found)
                self.take(found)

    @property
    def least_seconds(self) -> float:
        """What a plan must take less than to be of use."""
        return self.best.seconds if self.best else inf

    def below(self, variant: StepVariant) -> Asking[Chosen]:
        """The cheapest plan of a variant that fits; any, if it is not the best so far.

        Raises:
          InfeasiblePlanError: none fits.
        """
        asked = Question(variant, self.budget_bytes, self.least_seconds)
        found = yield from self.search._ask(asked)
        is_less = found.seconds < self.least_seconds
        if is_less and found.plan.predicted.peak_bytes > self.budget_bytes:
            found = yield from self.search._ask(replace(asked, cutoff=inf))
        return found


def _of(variant: StepVariant, plan: ShardingPlan) -> ShardingPlan:
    """The plan, which says what variant of the step it is of."""
    has = variant.remat and variant.num_segments
    remat = str(variant.remat) if has else ""
    return replace(plan, remat=remat, padding=variant.padding)


def _seconds_times_bytes(free: Chosen) -> float:
    return free.seconds * free.plan.predicted.peak_bytes


def _nothing_again(variants: StepVariants, remat: Remat) -> str:
    return (
        f"`remat` makes values of the forward pass again, but in "
        f"{variants.graph.name} {remat} finds none that the backward pass reads: "
        f"nothing is differentiated, all of it is in one segment, or jax.checkpoint is "
        f"there already; leave `remat` out."
    )
