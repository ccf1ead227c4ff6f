"""The program of a planned step: on devices of this process, or to be compiled only."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import jax
from jax.sharding import AbstractMesh, Mesh

from .clusters.device_mesh import absent_mesh, device_mesh
from .frontend.tracing import weak_outputs
from .lowering.lowered_pipeline import CompiledPipeline, LoweredPipeline
from .lowering.lowered_step import Lowered
from .lowering.programs import SpmdProgram, build_program
from .options import Options
from .planner.planning import Planned
from .plans.compiled_figures import CompiledFigures
from .sharding.resharding import Resharder
from .targets.target import Target, is_compiled_elsewhere


def program_here(planned: Planned, options: Options) -> SpmdProgram:
    """The program on devices of this process, or of the hosts of a Ray cluster.

    Raises:
      ValueError: there are too few devices.
    """
    shape = planned.plan.sharding.mesh
    return _built(planned, options, device_mesh(shape, options.mesh, planned.cluster))


def target_program(planned: Planned, options: Options) -> SpmdProgram | None:
    """The program for a cluster that is not here; None if its devices are here
    or its compiler is not installed. One of several kinds is run here, if it can be.

    Raises:
      TargetError: the mesh does not fit the hosts, or there are several kinds.
    """
    cluster, shape = planned.cluster, planned.plan.sharding.mesh
    if not is_compiled_elsewhere(cluster, options.mesh):
        return None
    if cluster.parts and shape.size <= jax.device_count():
        return None
    target = Target.of(cluster, shape.size)
    mesh = absent_mesh(shape, target.name, target.platform)
    return replace(_built(planned, options, mesh), target=target)


def lowered_step(
    planned: Planned, program: SpmdProgram, only_arrays: bool = False
) -> Lowered:
    """A planned step with its program, in the words of `jax.stages`."""
    plan, traced = planned.plan, planned.traced
    cluster = planned.cluster
    return Lowered(program, plan, traced, planned.graph, only_arrays, cluster)


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


def _built(
    planned: Planned, options: Options, mesh: Mesh | AbstractMesh
) -> SpmdProgram:
    sharding = planned.plan.sharding
    return build_program(
        planned.graph,
        sharding,
        Resharder(sharding.mesh, planned.cluster),
        mesh,
        planned.argument_types,
        planned.traced.jaxpr.consts,
        planned.donated(options),
        weak_outputs(planned.traced),
    )
