"""Pipelines within a memory budget, and what takes the memory of a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..clusters.cluster import Cluster
from ..errors import InfeasiblePlanError
from ..frontend.tracing import trace
from ..methods.methods import PipelineParallel
from ..options import Options
from ..plans.explain import format_bytes
from ..plans.parallel_plan import Plan
from ..rematerialisation.remat import LEVELS, Level, Remat
from .pipeline_plan import PlannedPipeline, plan_pipeline
from .stage_planner import StagePlanner

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
Price = Callable[[PlannedPipeline], Plan]

_PARTS = {
    "state": "parameters and optimizer state",
    "gradient": "gradients",
    "activation": "values between programs",
    "batch": "batch",
}


def fitting_pipeline(
    call: Call, method: PipelineParallel, options: Options, price: Price
) -> PlannedPipeline:
    """The pipeline that `method` asks for, whose stages fit into the budget.

    Stages that do not fit are planned again with their state in as many parts as they
    have devices, with what only the update reads in the host's memory, or both. With
    `remat="auto"` it is the fastest of those that make nothing again, and of those of
    each level that have the fewest stages do so.

    Raises:
      InfeasiblePlanError: a stage does not fit; names it and what takes its memory.
    """
    is_auto = "auto" in (options.remat, options.offload)
    if options.plan is not None or not (options.memory_budget or is_auto):
        return plan_pipeline(*call, method, options)
    return _Fitting(call, method, options, price).best()


class _Fitting:
    """A pipeline whose stages are to fit; `tries` are those that were planned."""

    def __init__(
        self, call: Call, method: PipelineParallel, options: Options, price: Price
    ) -> None:
        self.call, self.method, self.options = call, method, options
        self.price = price
        cluster = options.cluster or Cluster.local()
        self.budget_bytes = options.budget_on(cluster)
        self.planner = StagePlanner(cluster)
        self.whole = trace(*call)
        self.tries: list[_Tried] = []

    def best(self) -> PlannedPipeline:
        """The fastest that fits; errors are those of `fitting_pipeline`."""
        remat = self.options.remat
        if remat != "auto":
            self.fits(remat)
        elif not self.fits(None):  # all others do more work
            for level in LEVELS:
                if self.fits(level):
                    self.fewest_stages(level)
        fitting = [each for each in self.tries if not each.full]
        if fitting:
            return min(fitting, key=lambda each: each.seconds).planned
        least = min(self.tries, key=lambda each: max(each.peaks))
        raise _infeasible(least.planned, least.plan, self.budget_bytes)

    def fits(self, remat: str | None) -> bool:
        """Whether all stages fit as they are; those that do not are changed."""
        plain = self.plan(remat)
        if plain.full:
            for moves in self._moves():
                self.escalate(plain, *moves)
        return not plain.full

    def _moves(self) -> list[tuple[bool, bool]]:
        """Whether state is split, and whether the host keeps the optimizer's."""
        if self.options.offload == "auto":
            return [(True, False), (False, True), (True, True)]
        return [(True, False)]

    def escalate(self, tried: _Tried, is_split: bool, is_at_host: bool) -> None:
        """Stages that are too full are changed until all fit or none is left."""
        changed: frozenset[int] = frozenset()
        while more := tried.full - changed:
            changed |= more
            none = frozenset[int]()
            tried = self.plan(
                tried.remat,
                changed if is_split else none,
                changed if is_at_host else none,
            )

    def fewest_stages(self, level: Level) -> None:
        """The least number of stages that make residuals again and fit."""
        low, high = 0, self.method.num_stages or 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.plan(str(Remat(level, middle))).full:
                low = middle
            else:
                high = middle

    def plan(
        self,
        remat: str | None,
        split: frozenset[int] = frozenset(),
        at_host: frozenset[int] = frozenset(),
    ) -> _Tried:
        """The pipeline with the state of some stages changed."""
        planned = plan_pipeline(
            *self.call,
            self.method,
            replace(self.options, remat=remat),
            whole=self.whole,
            split=split,
            at_host=at_host,
            planner=self.planner,
        )
        plan = self.price(planned)
        peaks = plan.stages.peak_bytes
        full = {i for i, peak in enumerate(peaks) if peak > self.budget_bytes}
        stages = range(planned.flow.num_stages)
        found = _Tried(
            planned,
            plan,
            remat,
            plan.predicted.step_seconds,
            peaks,
            frozenset(stage for stage in stages if planned.submesh(stage) in full),
        )
        self.tries.append(found)
        return found


@dataclass(frozen=True, eq=False)
class _Tried:
    """A pipeline with what it takes, and the stages that do not fit."""

    planned: PlannedPipeline
    plan: Plan
    remat: str | None
    seconds: float
    peaks: tuple[int, ...]
    full: frozenset[int]


def held_bytes(planned: PlannedPipeline, submesh: int) -> dict[str, int]:
    """Bytes that one device of a submesh holds, by what for; one microbatch of each."""
    found: dict[str, int] = {}
    for name, stage in planned.specs:
        slot = planned.flow.slots.get(name)
        if planned.submesh(stage) != submesh or slot is None or slot.kind not in _PARTS:
            continue
        text = _PARTS[slot.kind]
        found[text] = found.get(text, 0) + planned.slot_bytes(name, stage)
    found["work inside of programs"] = planned.working_bytes(submesh)
    return found


def _infeasible(
    planned: PlannedPipeline, plan: Plan, budget: int
) -> InfeasiblePlanError:
    peaks = plan.stages.peak_bytes
    submesh = int(np.argmax(peaks))
    stages = [
        str(stage)
        for stage in range(planned.flow.num_stages)
        if planned.submesh(stage) == submesh
    ]
    held = sorted(held_bytes(planned, submesh).items(), key=lambda item: -item[1])
    parts = ", ".join(f"{text} {format_bytes(number)}" for text, number in held)
    where = f"stage{'s' * (len(stages) > 1)} {' and '.join(stages)}"
    return InfeasiblePlanError(
        f"Every stage must fit into `memory_budget`, {format_bytes(budget)} a device, "
        f"but {where} of {planned.traced.name!r} needs {format_bytes(peaks[submesh])} "
        f"at the least, split over {planned.shapes[submesh]}: {parts} (of one "
        f"microbatch; the schedule holds more, and most at the marked task: "
        f"{plan.stages.marked_row(submesh)}); use more stages or microbatches, or "
        f"jax.checkpoint, or let stages be searched: autopar.PipelineParallel().",
        max(peaks),
        f"memory of {where}",
    )
