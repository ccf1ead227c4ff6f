"""Pipelines within a memory budget, and what takes the memory of a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InfeasiblePlanError
from ..frontend.tracing import trace
from ..methods.methods import PipelineParallel
from ..options import Options
from ..plans.explain import format_bytes
from ..plans.parallel_plan import Plan
from .pipeline_plan import PlannedPipeline, plan_pipeline
from .stage_planner import StagePlanner

_PARTS = {
    "state": "parameters and optimizer state",
    "gradient": "gradients",
    "activation": "values between programs",
    "batch": "batch",
}


def fitting_pipeline(
    call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]],
    method: PipelineParallel,
    options: Options,
    price: Callable[[PlannedPipeline], Plan],
) -> PlannedPipeline:
    """The pipeline that `method` asks for, whose stages fit into the budget, if given.

    Stages that do not fit are planned again with their state in as many parts as they
    have devices.

    Raises:
      InfeasiblePlanError: a stage does not fit; names it and what takes its memory.
    """
    budget = options.memory_budget
    if budget is None or options.plan is not None:
        return plan_pipeline(*call, method, options)
    whole = trace(*call)
    planner = StagePlanner(options.cluster) if options.cluster else None
    split: set[int] = set()
    while True:
        planned = plan_pipeline(
            *call, method, options, whole=whole, split=split, planner=planner
        )
        peaks = price(planned).stages.peak_bytes
        full = {submesh for submesh, peak in enumerate(peaks) if peak > budget}
        if not full:
            return planned
        stages = range(planned.flow.num_stages)
        more = {stage for stage in stages if planned.submesh(stage) in full} - split
        if not more:
            raise _infeasible(planned, peaks, budget)
        split |= more


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
    planned: PlannedPipeline, peaks: Sequence[int], budget: int
) -> InfeasiblePlanError:
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
        f"with its state split over {planned.shapes[submesh]}: {parts} (of one "
        f"microbatch; the schedule holds more); use more stages or microbatches, or "
        f"jax.checkpoint, or let stages be searched: autopar.PipelineParallel().",
        max(peaks),
        f"memory of {where}",
    )
