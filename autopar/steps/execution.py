"""What runs a plan: the devices of this process, or the hosts of a Ray cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

from autopar.runtime.checkpoint import restore as restore
from autopar.runtime.checkpoint import save as save
from autopar.runtime.checkpoints_export import export_weights as export_weights
from autopar.runtime.checkpoints_kept import Checkpoint as Checkpoint
from autopar.runtime.checkpoints_kept import Checkpoints as Checkpoints
from autopar.runtime.emit import emit
from autopar.runtime.local import MISSED as MISSED
from autopar.runtime.local import DirectCalls as DirectCalls
from autopar.runtime.local import LocalExecutable, NotDirect, ReadyCall, run_once
from autopar.runtime.ray_actors import cluster_left as cluster_left
from autopar.runtime.ray_executables import RayExecutable, RayPipelineExecutable
from autopar.runtime.schedule import (
    Schedule,
    Task,
    eager_1f1b,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
)
from autopar.runtime.simulate import HeldByTask, Simulation, held_by_task, simulate_step
from autopar.runtime.timeline import StepTrace
from autopar.runtime.worker import PipelineExecutable

from ..clusters.cluster import Cluster
from ..frontend.constant_leaves import ResultTree
from ..graph.effects import refuse_callbacks
from ..graph.garbage import without_garbage_collection
from ..lowering.device_mesh import submesh_of
from ..methods.schedule_choice import rows_of, schedule_name
from ..pipelines.pipeline import PipelinedStep, lower_pipeline
from ..pipelines.pipeline_plan import PlannedPipeline
from ..pipelines.state_init import InitProgram, PlacedInit, init_programs, made_state
from ..planner.planned import Planned
from ..plans.staged_plan import StagedPlan, StageProgramPlan, total_prediction
from ..targets.compile_service import refuse_call

Executable = LocalExecutable | RayExecutable | PipelinedStep


def executable_of(planned: Planned) -> LocalExecutable | RayExecutable:
    """What runs a planned step.

    Raises:
      NotImplementedError: the step cannot go to other hosts; says why.
    """
    cluster = planned.cluster
    if cluster.ray_hosts is None:
        return LocalExecutable(planned.program_here)
    refuse_callbacks(planned.graph)
    state = [i for i in planned.roles.next_output if i is not None]
    return RayExecutable(planned.program_here, cluster, state)


def ready_call(executable: Executable, tree: ResultTree) -> ReadyCall:
    """What runs a call from its leaves to its results.

    Raises:
      NotDirect: such calls take Python.
    """
    if not isinstance(executable, LocalExecutable) or not executable.is_direct:
        raise NotDirect
    return ReadyCall(executable, tree.before_release)


def pipelined_step(planned: PlannedPipeline) -> PipelinedStep:
    """A planned pipeline, lowered, with what executes it.

    Raises:
      ValueError: there are too few devices.
      NotImplementedError: the step cannot go to other hosts; says why.
    """
    cluster, schedule = planned.cluster, schedule_of(planned)
    if cluster.ray_hosts is None:
        pipeline = lower_pipeline(planned)
        execute = PipelineExecutable(pipeline.program, schedule)
        return PipelinedStep(pipeline, execute, _recorder(planned, execute))
    for each in planned.programs:
        refuse_callbacks(each.graph)
    pipeline = lower_pipeline(planned)
    codes = [each.program for each in pipeline.lowered]
    sizes = [shape.size for shape in planned.shapes]
    execute = RayPipelineExecutable(pipeline.program, codes, schedule, cluster, sizes)
    return PipelinedStep(pipeline, execute, _recorder(planned, execute))


def compiled_only(planned: PlannedPipeline) -> PipelinedStep:
    """A planned pipeline, lowered for a cluster that is not here.

    Raises:
      TargetError: a submesh does not fit the hosts.
    """
    pipeline = lower_pipeline(planned, is_absent=True)

    def refuse(*_: Any) -> NoReturn:
        refuse_call(str(pipeline.target))

    return PipelinedStep(pipeline, refuse, refuse)


def _recorder(
    planned: PlannedPipeline, execute: PipelineExecutable | RayPipelineExecutable
) -> Callable[..., Any]:
    """Runs a step like `execute`, and returns its trace besides."""

    def record(state: Any, batch: Any) -> tuple[Any, Any, StepTrace]:
        new_state, results, measured = execute.record(state, batch)
        predicted = simulation_of(planned).timeline
        name = planned.traced.name
        return new_state, results, StepTrace(name, predicted, measured)

    return record


def end_workers(steps: Sequence[Executable]) -> None:
    """End the workers of steps that run on Ray clusters, with the arrays they keep."""
    for step in steps:
        runs = step.execute if isinstance(step, PipelinedStep) else step
        if isinstance(runs, RayExecutable | RayPipelineExecutable):
            runs.close()


@without_garbage_collection()
def staged_plan(planned: PlannedPipeline) -> StagedPlan:
    """The plan of a pipeline, whose time and memory a simulated step says."""
    method, flow = planned.method, planned.flow
    programs = tuple(
        StageProgramPlan(each.stage, each.cut.kind, each.plan)
        for each in planned.programs
    )
    simulation = simulation_of(planned)
    correction = planned.memory_correction
    peak_bytes = tuple(
        round((held + planned.working_bytes(submesh)) * correction)
        for submesh, held in enumerate(simulation.peak_bytes)
    )
    predicted = total_prediction(
        programs,
        len(planned.shapes),
        flow.num_microbatches,
        max(peak_bytes),
        simulation.timeline.makespan_seconds,
        simulation.timeline.bubble_fraction,
        planned.bound_seconds,
    )
    return StagedPlan(
        planned.traced.name,
        planned.cluster.name,
        flow.num_stages,
        flow.num_microbatches,
        schedule_name(method.schedule),
        method.microbatch_semantics,
        planned.shapes,
        programs,
        planned.transfers(),
        tuple(" ".join(map(str, row)) for row in schedule_of(planned).rows),
        peak_bytes,
        replace(predicted, memory_correction=correction),
        tuple(method.stage_products or ()),
    )


def simulation_of(planned: PlannedPipeline) -> Simulation:
    """A step of the planned stage programs, at their predicted times."""
    seconds: defaultdict[tuple[int, str], float] = defaultdict(float)
    for each in planned.programs:
        key = each.stage, each.cut.kind
        seconds[key] += each.plan.predicted.step_seconds
    transfer_seconds = cache(planned.transfer_seconds)
    return simulate_step(
        planned.flow,
        schedule_of(planned),
        lambda task: seconds[task.stage, task.kind],
        lambda send: transfer_seconds(send.value.slot, send.source, send.target),
        planned.slot_bytes,
    )


def held_by_submesh(planned: PlannedPipeline) -> tuple[tuple[HeldByTask, ...], ...]:
    """What one device of each submesh holds while it runs each of its tasks."""
    lists = emit(planned.flow, schedule_of(planned))
    return tuple(held_by_task(list_, planned.slot_bytes) for list_ in lists)


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
    submesh, sizes = submesh_of(mesh)
    return RayExecutable(init.program, cluster, everything, submesh, sizes)(given)


def schedule_of(planned: PlannedPipeline) -> Schedule:
    """The schedule that the method asks for; without a backward pass, forwards only."""
    sizes = planned.flow.num_stages, planned.flow.num_microbatches
    wanted = planned.method.schedule
    if not isinstance(wanted, str):
        rows = [row.split() for row in rows_of(wanted, *sizes)]
        tasks = tuple(tuple(map(Task.parse, row)) for row in rows)
        return Schedule(schedule_name(wanted), *sizes, tasks)
    if wanted == "interleaved":
        return interleaved(*sizes, len(planned.shapes))
    if not planned.has_backward:
        return forward_only(*sizes)
    return _SCHEDULES[wanted](*sizes)


_SCHEDULES = {
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "gpipe": gpipe,
    "zb_h1": zero_bubble_h1,
    "zb_h2": zero_bubble_h2,
}
