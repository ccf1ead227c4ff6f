"""What runs a plan: the devices of this process, or the hosts of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autopar.runtime.emit import emit
from autopar.runtime.local import LocalExecutable, run_once
from autopar.runtime.ray_executable import RayExecutable
from autopar.runtime.ray_pipeline import RayPipelineExecutable
from autopar.runtime.schedule import (
    Schedule,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
)
from autopar.runtime.simulate import simulate
from autopar.runtime.worker import PipelineExecutable

from .clusters.cluster import Cluster
from .clusters.device_mesh import submesh_of
from .frontend.effects import refuse_callbacks
from .lowering.programs import SpmdProgram
from .pipelines.pipeline import PipelinedStep, lower_pipeline
from .pipelines.pipeline_plan import PlannedPipeline
from .planner.planning import Planned
from .plans.parallel_plan import Plan
from .plans.staged_plan import StagedPlan, StageProgramPlan, total_prediction
from .state.state_init import InitProgram, PlacedInit, init_programs, made_state

Executable = LocalExecutable | RayExecutable | PipelinedStep


def executable_of(
    planned: Planned, lower: Callable[[Planned], SpmdProgram]
) -> LocalExecutable | RayExecutable:
    """What runs a planned step, which `lower` lowers.

    Raises:
      NotImplementedError: the step cannot go to other hosts; says why.
    """
    cluster = planned.cluster
    if cluster.ray_hosts is None:
        return LocalExecutable(lower(planned))
    refuse_callbacks(planned.graph)
    state = [i for i in planned.roles.next_output if i is not None]
    return RayExecutable(lower(planned), cluster, state)


def pipelined_step(planned: PlannedPipeline) -> PipelinedStep:
    """A planned pipeline, lowered, with what executes it.

    Raises:
      ValueError: there are too few devices.
      NotImplementedError: the step cannot go to other hosts; says why.
    """
    cluster, schedule = planned.cluster, schedule_of(planned)
    if cluster.ray_hosts is None:
        pipeline = lower_pipeline(planned)
        return PipelinedStep(pipeline, PipelineExecutable(pipeline.program, schedule))
    for piece in planned.pieces:
        refuse_callbacks(piece.graph)
    pipeline = lower_pipeline(planned)
    codes = [piece.program for piece in pipeline.pieces]
    execute = RayPipelineExecutable(pipeline.program, codes, schedule, cluster)
    return PipelinedStep(pipeline, execute)


def end_workers(steps: Sequence[Executable]) -> None:
    """End the workers of steps that run on Ray clusters, with the arrays they keep."""
    for step in steps:
        runs = step.execute if isinstance(step, PipelinedStep) else step
        if isinstance(runs, RayExecutable | RayPipelineExecutable):
            runs.close()


def staged_plan(planned: PlannedPipeline) -> Plan:
    """The plan of a pipeline, whose time and memory a simulated step says."""
    schedule = schedule_of(planned)
    method, flow = planned.method, planned.flow
    programs = tuple(
        StageProgramPlan(piece.piece.stage, piece.piece.kind, piece.plan)
        for piece in planned.pieces
    )
    seconds = {
        (stage, kind): sum(
            each.sharding.predicted.step_seconds
            for each in programs
            if (each.stage, each.kind) == (stage, kind)
        )
        for stage, kind in {(each.stage, each.kind) for each in programs}
    }
    simulation = simulate(
        emit(flow, schedule),
        lambda task: seconds[task.stage, task.kind],
        lambda send: planned.transfer_seconds(
            send.value.slot, send.source, send.target
        ),
        planned.slot_bytes,
    )
    peak_bytes = tuple(
        held + planned.working_bytes(submesh)
        for submesh, held in enumerate(simulation.peak_bytes)
    )
    return Plan(
        StagedPlan(
            planned.traced.name,
            planned.cluster.name,
            flow.num_stages,
            flow.num_microbatches,
            method.schedule,
            method.microbatch_semantics,
            planned.shapes,
            programs,
            planned.transfers(),
            tuple(" ".join(map(str, row)) for row in schedule.rows),
            peak_bytes,
            total_prediction(
                programs,
                len(planned.shapes),
                flow.num_microbatches,
                max(peak_bytes),
                simulation.timeline.makespan_seconds,
                simulation.timeline.bubble_fraction,
            ),
        )
    )


def run_init(placed: PlacedInit, cluster: Cluster) -> Any:
    """The state, made by one program for each mesh."""
    made = {
        each: _run_init_program(each, placed.init.values, cluster)
        for each in init_programs(placed, cluster)
    }
    return made_state(placed.init, made)


def _run_init_program(
    init: InitProgram, values: Sequence[Any], cluster: Cluster
) -> Sequence[Any]:
    given = [values[i] for i in init.inputs]
    if cluster.ray_hosts is None:
        return run_once(init.program, given)
    mesh = init.program.output_shardings[0].mesh
    everything = range(len(init.outputs))
    submesh, groups = submesh_of(mesh), cluster.num_devices // mesh.size
    return RayExecutable(init.program, cluster, everything, submesh, groups)(given)


def schedule_of(planned: PlannedPipeline) -> Schedule:
    """The schedule that the method asks for; without a backward pass, forwards only."""
    sizes = planned.flow.num_stages, planned.flow.num_microbatches
    if planned.method.schedule == "interleaved":
        return interleaved(*sizes, planned.method.num_submeshes)
    if not planned.has_backward:
        return forward_only(*sizes)
    return {"1f1b": one_f_one_b, "gpipe": gpipe}[planned.method.schedule](*sizes)
