"""Which variant of a step to run: its form, what is made again, what is offloaded.

Each form (`step_forms.py`) is tried whose plan without a budget may be quicker than the
best so far. Of each, parts may be made again and state offloaded, if memory binds. A
variant's plan without a budget bounds all its plans from below, and is the best of them
if it fits. So few variants are solved within the budget: those that do not fit as they
are, and would be cheaper than the cheapest that does. Of unrolled segments the fewest
are made again, and of the optimizer's state the fewest leaves offloaded (those used
furthest in the future first), that let the plan without a budget fit. Those that are
nearest the budget come first: they are solved soonest, and what they take ends the
solution of others as soon as its bound is that high.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias, TypeVar

from ..costs.memory import memory_profile
from ..errors import InfeasiblePlanError
from ..option_values import LEVELS, NO_BUDGET, Remat
from ..plans.plan import ShardingPlan, TriedPlan
from .gather_again import graph_of_plan
from .graph_plan import blaming_pins, plan_graph
from .memory_users import infeasible_error
from .plan_request import PlanRequest
from .questions import Questions
from .step_variants import StepVariant, StepVariants, nothing_to_offload
from .whole_step import batch_tensors

_log = logging.getLogger("autopar")
_T = TypeVar("_T")
# A variant, its budget, and the seconds that a plan must stay below to be of use.
_Question = tuple[StepVariant, int, float]
_Asking: TypeAlias = Generator[_Question, "Chosen", _T]
# A variant, and how to make one of fewer segments or leaves than it has.
_Series = tuple[StepVariant, Callable[[int], StepVariant], int]


@dataclass(frozen=True, eq=False)
class Chosen:
    """A variant and its plan, which says what it makes again."""

    variant: StepVariant
    plan: ShardingPlan

    @property
    def seconds(self) -> float:
        return self.plan.predicted.step_seconds

    @property
    def peak_bytes(self) -> int:
        return self.plan.predicted.peak_bytes

    @property
    def bound(self) -> float:
        return self.seconds * (1.0 - self.plan.predicted.optimality_gap)

    def tried(self) -> TriedPlan:
        """What it takes, for advice."""
        remat, at_host = self.variant.remat, self.variant.num_at_host
        title = f'remat="{remat}"' if remat else "no remat"
        title += ' with offload="auto"' * bool(at_host)
        return TriedPlan(title, self.plan.predicted)


def best_variant(forms: Iterable[StepVariants], request: PlanRequest) -> Chosen:
    """The cheapest variant of a step that fits, and its plan.

    Args:
      forms: of the step, those first that are tried first.
      request: the step, with the budget and what to make again and to offload.

    Raises:
      ValueError: a remat or an offload was asked for that changes nothing.
      InfeasiblePlanError: nothing fits; that of the step as it is.
    """
    search = _VariantSearch(request)
    variants = Questions(search.best(forms))
    while variants.asked is not None:
        variant, budget_bytes, cutoff = variants.asked
        found = search.known(variant, budget_bytes)
        if found is None:
            own = search.request_of(variant, budget_bytes)
            try:
                found = search.noted(variant, plan_graph(own, cutoff=cutoff), own)
            except InfeasiblePlanError as error:
                found = blaming_pins(error, own, cutoff=cutoff)
            except ValueError as error:
                found = error
        variants.answer(found)
    return variants.result


class _VariantSearch:
    def __init__(self, request: PlanRequest) -> None:
        self.request, self.options = request, request.options
        self.budget_bytes = self.options.budget_on(request.cluster)
        self.free: list[Chosen] = []

    def known(self, variant: StepVariant, budget_bytes: int) -> Chosen | None:
        """A plan without a budget that fits: it is the cheapest within one, too."""
        for known in self.free:
            is_same = known.variant.graph is variant.graph
            if is_same and known.peak_bytes <= budget_bytes:
                return Chosen(variant, _of(variant, known.plan))
        return None

    def request_of(self, variant: StepVariant, budget_bytes: int) -> PlanRequest:
        batch = batch_tensors(variant.traced, variant.graph, self.options)
        own = replace(self.request, graph=variant.graph, batch=batch)
        return own.asking(memory_budget=budget_bytes)

    def noted(
        self, variant: StepVariant, plan: ShardingPlan, request: PlanRequest
    ) -> Chosen:
        found = Chosen(variant, _of(variant, plan))
        if request.options.memory_budget == NO_BUDGET:
            self.free.append(found)
        return found

    def best(self, forms: Iterable[StepVariants]) -> _Asking[Chosen]:
        refused: ValueError | None = None
        best: tuple[Chosen, StepVariants] | None = None
        for form in forms:
            try:
                if best is not None:
                    free = yield form.make(None), NO_BUDGET, inf
                    if free.bound >= best[0].seconds:
                        continue
                found = yield from self.of_form(form)
            except ValueError as error:  # nothing fits, or a method must split examples
                if not form.padding:
                    refused = error
                continue
            is_plainer = False
            if best is not None:
                words = found.seconds, form, best[0].seconds, best[1]
                _log.info("%s: %.4g s %s, %.4g s %s", form.graph.name, *words)
                is_plainer = found.seconds == best[0].seconds and not form.padding
            if best is None or found.seconds < best[0].seconds or is_plainer:
                best = found, form
        if best is None:
            assert refused is not None, "a step has a form"
            raise refused
        return best[0]

    def of_form(self, form: StepVariants) -> _Asking[Chosen]:
        """The cheapest variant of one form that fits."""
        remat, offload = self.options.remat, self.options.offload
        if offload == "optimizer_state" and not form.offloadable:
            raise ValueError(nothing_to_offload(form.graph.name))
        fixed = None if remat in (None, "auto") else Remat.parse(remat)
        if "auto" not in (remat, offload):
            variant = form.make(fixed, form.asked_for(offload))
            if fixed and not variant.num_segments:
                raise ValueError(_nothing_again(form, fixed))
            return (yield variant, self.budget_bytes, inf)
        levels: list[Remat | None] = [fixed]
        if remat == "auto":
            levels += [Remat(level) for level in LEVELS]
        return (yield from self.searched(form, levels))

    def searched(
        self, form: StepVariants, levels: Sequence[Remat | None]
    ) -> _Asking[Chosen]:
        """The cheapest variant that fits, of those of a level and offloads."""
        tried: list[Chosen] = []
        unfit: list[Chosen] = []
        for remat in levels:
            for variant, fewer, most in self.series(form, remat):
                free = yield variant, NO_BUDGET, inf
                words = variant, free.seconds, free.peak_bytes
                _log.info("%s: %.4g s, %d B a device without a budget", *words)
                tried.append(free)
                if free.peak_bytes <= self.budget_bytes:
                    tried += yield from self.fewest(fewer, most)
                    break
                unfit.append(free)
            if not unfit:
                break  # all others do more work
        fitting = [each for each in tried if each.peak_bytes <= self.budget_bytes]
        errors: list[InfeasiblePlanError] = []
        for free in sorted(unfit, key=lambda each: each.seconds * each.peak_bytes):
            least = min((each.seconds for each in fitting), default=inf)
            if free.seconds >= least:
                continue
            try:
                fitting.append((yield from self.within(free, least)))
            except InfeasiblePlanError as error:
                if error.least_plan is not None:
                    error.least_plan = _of(free.variant, error.least_plan)
                errors.append(error)
        if not fitting:
            raise min(errors, key=lambda each: each.least_budget_bytes or inf)
        best = min(fitting, key=lambda each: each.seconds)
        bound = min(each.bound for each in fitting)
        mine = best.plan.predicted
        by_title = {each.tried().title: each.tried() for each in (*tried, *fitting)}
        others = [each for each in by_title.values() if each.predicted != mine]
        predicted = replace(mine, optimality_gap=max(0.0, 1.0 - bound / best.seconds))
        tried_plans = *best.plan.tried, *others
        plan = replace(best.plan, predicted=predicted, tried=tried_plans)
        return replace(best, plan=plan)

    def series(self, form: StepVariants, remat: Remat | None) -> Iterator[_Series]:
        """The variants of a level, those first that are taken if they fit."""
        offload = self.options.offload
        at_host = form.asked_for(offload)
        variant = form.make(remat, at_host)
        if remat is None:
            yield variant, lambda n: variant, 0
        elif variant.num_segments:
            most = variant.num_segments if remat.num_segments is None else 0
            yield (
                variant,
                lambda n: form.make(replace(remat, num_segments=n), at_host),
                most,
            )
        else:
            return
        leaves = form.offloadable
        if offload == "auto" and leaves:
            yield (
                form.make(remat, leaves),
                lambda n: form.make(remat, leaves[:n]),
                len(leaves),
            )

    def fewest(
        self, fewer: Callable[[int], StepVariant], most: int
    ) -> _Asking[list[Chosen]]:
        """Plans of fewer segments or leaves than `most`, to the least that fits."""
        low, high, plans = 0, most, list[Chosen]()
        while high - low > 1:
            middle = (low + high) // 2
            found = yield fewer(middle), NO_BUDGET, inf
            plans.append(found)
            fits = found.peak_bytes <= self.budget_bytes
            low, high = (low, middle) if fits else (middle, high)
        return plans

    def within(self, free: Chosen, least: float) -> _Asking[Chosen]:
        """The cheapest plan of a variant that fits; any, if none is below `least`.

        Raises:
          InfeasiblePlanError: none fits.
        """
        variant = free.variant
        if free.plan.mesh.size == 1:  # there is no other way to split it
            profile = memory_profile(graph_of_plan(variant.graph, free.plan), free.plan)
            raise infeasible_error(profile, self.budget_bytes)
        found = yield variant, self.budget_bytes, least
        if found.seconds < least and found.peak_bytes > self.budget_bytes:
            found = yield variant, self.budget_bytes, inf
        return found


def _of(variant: StepVariant, plan: ShardingPlan) -> ShardingPlan:
    """The plan, which says what variant of the step it is of."""
    has = variant.remat and variant.num_segments
    remat = str(variant.remat) if has else ""
    return replace(plan, remat=remat, padding=variant.padding)


def _nothing_again(variants: StepVariants, remat: Remat) -> str:
    return (
        f"`remat` makes values of the forward pass again, but in "
        f"{variants.graph.name} {remat} finds none that the backward pass reads: "
        f"nothing is differentiated, all of it is in one segment, or jax.checkpoint is "
        f"there already; leave `remat` out."
    )
