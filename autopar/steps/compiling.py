"""What compilers make of a planned step: as `jax.stages` has it, and as figures."""

from __future__ import annotations

from math import inf

import jax

from ..planner.planned import Planned
from ..report.compiled_figures import CompiledFigures
from .lowered_pipeline import CompiledPipeline, LoweredPipeline
from .lowered_step import Lowered
from .parallel_plan import Plan


def lowered_step(planned: Planned, only_arrays: bool = False) -> Lowered:
    """A planned step with its program, in the words of `jax.stages`."""
    traced, graph, cluster = planned.traced, planned.graph, planned.cluster
    plan = Plan(planned.plan)
    return Lowered(planned.program, plan, traced, graph, only_arrays, cluster)


def compiled_figures(
    lowered: Lowered | LoweredPipeline, limit_seconds: float = inf
) -> CompiledFigures | str:
    """What compilers make of a lowered step; why it stays modelled, past the limit.

    Raises:
      TargetError: the compiler of an absent cluster refuses a program.
    """
    try:
        compiled = lowered.compile(limit_seconds)
    except TimeoutError as error:
        return f"modelled, not compiled: {error}"
    replayed = None
    if isinstance(compiled, CompiledPipeline):
        pipeline = compiled.lowered.step.pipeline
        name, audits = pipeline.target, compiled.audit().audits
        targets = [each.program.target for each in pipeline.lowered]
        programs = [each.compile() for each in pipeline.lowered]
    else:
        targets = [compiled.lowered.program.target]
        name, audits = targets[0], (("", compiled.audit()),)
        programs = [compiled.compiled]
        replayed = compiled.predicted
    devices = jax.devices()
    here = f"{len(devices)} x {devices[0].device_kind}"
    seconds = sum(getattr(each, "compile_seconds", 0.0) for each in programs)
    memory_bytes = min((each.memory_bytes for each in targets if each), default=0)
    figures = str(name or here), audits, seconds, memory_bytes
    return CompiledFigures(*figures, replayed)


def fitting_figures(lowered: Lowered | LoweredPipeline) -> CompiledFigures | str:
    """As `compiled_figures`, of programs that fit their devices.

    Raises:
      InfeasiblePlanError: one does not.
    """
    figures = compiled_figures(lowered)
    if isinstance(figures, CompiledFigures):
        figures.check_fits()
    return figures
