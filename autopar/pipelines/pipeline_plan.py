"""Plan a step as a pipeline: trace, cut into stages, plan every stage program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any

import jax

from ..clusters.cluster import Cluster
from ..clusters.joined import cluster_around
from ..clusters.ray_hosts import HostGroups, dealt_out
from ..frontend.tracing import trace
from ..graph.effects import refuse_lost_callbacks
from ..graph.garbage import without_garbage_collection
from ..graph.op_graph import OpGraph, TensorType
from ..graph.traced_function import TracedFunction
from ..lowering.programs import PipelineProgram
from ..methods.methods import PipelineParallel
from ..methods.place_operators import PlaceOperators
from ..options import Options
from ..plans.plan import Prediction
from ..plans.staged_plan import PlannedTransfer, stages_of
from ..sharding.mesh import MeshShape, parse_mesh
from ..sharding.spec import Spec, local_shape
from ..transforms.update_loops import Updates
from .cut_step import CutStep, cut_step, products_by_cost
from .program_plans import (
    PlannedProgram,
    PlannedPrograms,
    ProgramPlanner,
    plan_programs,
)
from .stage_demands import StageDemands, stage_demands


@dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """One signature of a step, cut into stages and planned, on no devices.

    `shapes` are the meshes of the submeshes. `bound_seconds` are what no step takes
    less, in the model of the search that found the stages or by the stages' own
    problems if they were given; 0 if no bound is known.
    `updates` are the loops over updates, from the outermost on, where a call runs the
    step several times. `memory_correction` is the error of predicted bytes that was
    seen where programs were compiled; `one_program` what the whole step takes on all
    devices, where that was planned beside it.
    """

    made: CutStep
    plans: PlannedPrograms
    method: PipelineParallel | PlaceOperators
    cluster: Cluster
    shapes: tuple[MeshShape, ...]
    bound_seconds: float = 0.0
    updates: tuple[Updates, ...] = ()
    memory_correction: float = 1.0
    one_program: Prediction | None = None

    @property
    def traced(self) -> TracedFunction:
        """The step itself."""
        return self.made.whole

    @property
    def programs(self) -> tuple[PlannedProgram, ...]:
        """The stage programs, in order."""
        return self.plans.programs

    @property
    def specs(self) -> Mapping[tuple[str, int], Spec]:
        """The spec of each slot on each stage that holds it."""
        return self.plans.specs

    @property
    def types(self) -> Mapping[str, TensorType]:
        """The type of each slot."""
        return self.plans.types

    @cached_property
    def flow(self) -> PipelineProgram:
        """The dataflow of the programs, to emit and simulate, not to run."""
        return PipelineProgram(
            self.made.cut.num_stages,
            self.made.parts.step.num_microbatches,
            self.made.programs.slots,
            tuple(each.running(_refuse_to_run) for each in self.programs),
            shardings={},
            zeros={},
        )

    @cached_property
    def next_leaf(self) -> tuple[int | None, ...]:
        """The argument leaf (chunk) that each result leaf (chunk) is the next value of,
        or None."""
        chunked = self.made.chunked
        found: list[int | None] = [None] * len(chunked.traced.output_paths)
        for leaf, output in enumerate(chunked.roles.next_output):
            if output is not None:
                found[output] = leaf
        return tuple(found)

    @property
    def has_backward(self) -> bool:
        """Whether any stage has a backward program, as evaluation steps have not."""
        return any(each.cut.kind == "backward" for each in self.programs)

    def submesh(self, stage: int) -> int:
        """The submesh that a stage runs on."""
        return stage % len(self.shapes)

    def cluster_of(self, submesh: int) -> Cluster:
        """What a submesh is of: the part of the cluster that all its devices are of."""
        first = sum(shape.size for shape in self.shapes[:submesh])
        return cluster_around(self.cluster, first, self.shapes[submesh].size)

    @cached_property
    def host_slots(self) -> frozenset[str]:
        """What stages keep in the host's memory between their programs."""
        return frozenset(slot for each in self.programs for slot in each.host_slots)

    def slot_bytes(self, slot: str, stage: int) -> int:
        """Bytes of a slot's value on one device of a stage; 0 if the host has it."""
        if slot in self.host_slots:
            return 0
        kind, spec = self.types[slot], self.specs[slot, stage]
        sizes = self.shapes[self.submesh(stage)].axis_sizes
        return prod(local_shape(kind.shape, spec, sizes)) * kind.itemsize

    def working_bytes(
        self, submesh: int, compiled: Mapping[PlannedProgram, int] | None = None
    ) -> int:
        """The most that a program of a submesh takes besides its arguments and results.

        Those are values that the schedule holds, in bytes of one device. `compiled` are
        the bytes of compiled programs; those predicted if left out.
        """
        most = 0
        for each in self.programs:
            if self.submesh(each.stage) == submesh:
                names = {*each.inputs, *each.outputs}
                held = sum(self.slot_bytes(name, each.stage) for name in names)
                peak_bytes = each.plan.predicted.peak_bytes
                if compiled is not None:
                    peak_bytes = compiled[each]
                most = max(most, peak_bytes - held)
        return most

    def transfer_seconds(self, slot: str, source: int, target: int) -> float:
        """Predicted seconds for a slot's value from one stage's devices to another's.

        Every device of the smaller side takes part.
        """
        here, there = self.submesh(source), self.submesh(target)
        if here == there:
            return 0.0
        first = [sum(s.size for s in self.shapes[:i]) for i in (here, there)]
        hosts = {device // self.cluster.devices_per_host for device in first}
        link = self.cluster.network_link
        if len(hosts) == 1:
            link = self.cluster_of(here).host_link
        width = min(self.shapes[here].size, self.shapes[there].size)
        bytes_ = self.types[slot].bytes / width
        return link.alpha_seconds + bytes_ / (link.bandwidth * link.efficiency)

    def transfers(self) -> tuple[PlannedTransfer, ...]:
        """What goes from submesh to submesh in a step, and how often."""
        flow = self.flow
        applied = {
            name for p in flow.programs if p.kind == "apply" for name in p.outputs
        }
        found: dict[tuple[str, int, int], PlannedTransfer] = {}
        for program in flow.programs:
            for name in program.inputs:
                slot, target = flow.slots[name], program.stage
                is_here = self.submesh(slot.stage) == self.submesh(target)
                if is_here or slot.kind == "batch":
                    continue
                is_once = slot.kind in ("state", "gradient") or name in applied
                found[name, slot.stage, target] = PlannedTransfer(
                    name,
                    slot.stage,
                    target,
                    self.types[name].bytes,
                    1 if is_once else flow.num_microbatches,
                )
        return tuple(found.values())


@without_garbage_collection()
def plan_pipeline(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    method: PipelineParallel,
    options: Options,
    *,
    whole: TracedFunction | None = None,
    graph: OpGraph | None = None,
    split: Collection[int] = (),
    planner: ProgramPlanner | None = None,
) -> PlannedPipeline:
    """Trace `fun`, cut it into the stages that `method` asks for and plan them.

    The plans of `options.plan`, if there are any, are used as they are. `whole` is the
    trace of `fun` and `graph` its graph, if they are there; `split` are stages whose
    state lies in as many parts as they have devices, and `planner` knows plans of equal
    programs.

    Raises:
      ValueError: more stages than devices or products, or microbatches that do not
        divide the batch.
      BatchCoupledError: the step cannot be cut into microbatches.
      PlanFileError: the plans given are of another step.
      NotImplementedError: what stages cannot do yet; the text names it.
    """
    shapes = submesh_shapes(method, options, options.cluster or Cluster.local())
    whole = whole or trace(fun, args, kwargs)
    leaves = jax.tree.leaves((args, kwargs))
    if method.layer_costs is not None:
        products = products_by_cost(whole, method, options)
        method = replace(method, stage_products=products, layer_costs=None)
    made = cut_step(fun, whole, method, options, graph=graph)
    demands = demands_of(made, leaves, method, shapes, options, split)
    return planned_on(made, demands, method, shapes, options, planner)


def planned_on(
    made: CutStep,
    demands: StageDemands,
    method: PipelineParallel | PlaceOperators,
    shapes: tuple[MeshShape, ...],
    options: Options,
    planner: ProgramPlanner | None = None,
) -> PlannedPipeline:
    """Every program of a step that is cut, planned on the submeshes of `shapes`."""
    cluster = options.cluster or Cluster.local()
    given = None if options.plan is None else stages_of(options.plan)
    planner = planner or ProgramPlanner()
    planned = plan_programs(made.programs, demands, planner, given and given.programs)
    graphs = (each.graph for each in planned.programs)
    refuse_lost_callbacks(made.parts.step.graph, graphs)
    place = made, planned, method, cluster, shapes
    if given is None:
        return PlannedPipeline(*place, _least_seconds(made, planned, method, shapes))
    known = given.predicted
    bound = known.step_seconds / (1 + known.optimality_gap)
    return PlannedPipeline(*place, bound, memory_correction=known.memory_correction)


def _least_seconds(
    made: CutStep,
    planned: PlannedPrograms,
    method: PipelineParallel | PlaceOperators,
    shapes: Sequence[MeshShape],
) -> float:
    """What no plans of these stages take less under a schedule of ours; 0 if unknown.

    A submesh does the work of all microbatches. Where it does all of one stage before
    it waits again, the first reaches it through the stages before it, and the cotangent
    of the last goes back through these.
    """
    schedule, least = method.schedule, planned.least_seconds
    if not isinstance(schedule, str) or not isinstance(method, PipelineParallel):
        return 0.0
    number, stages = made.parts.step.num_microbatches, range(made.cut.num_stages)
    by_stage = [least.get(stage, 0.0) for stage in stages]
    if schedule in ("gpipe", "1f1b", "eager_1f1b"):
        return max(number * by_stage[s] + sum(by_stage[:s]) for s in stages)
    return number * max(sum(by_stage[i :: len(shapes)]) for i in range(len(shapes)))


def demands_of(
    made: CutStep,
    leaves: Sequence[Any],
    method: PipelineParallel | PlaceOperators,
    shapes: tuple[MeshShape, ...],
    options: Options,
    split: Collection[int] = (),
) -> StageDemands:
    """What is asked of the programs of a step that is cut, on the submeshes `shapes`.

    `leaves` are the arguments of the step.
    """
    submeshes = [stage % len(shapes) for stage in range(made.cut.num_stages)]
    ends = accumulate(shape.size for shape in shapes)
    devices = [
        range(end - shape.size, end) for end, shape in zip(ends, shapes, strict=True)
    ]
    return stage_demands(
        *(made, leaves, options),
        [shapes[submesh] for submesh in submeshes],
        [devices[submesh] for submesh in submeshes],
        split,
        method.inside if isinstance(method, PipelineParallel) else None,
    )


def _refuse_to_run(_: Sequence[object]) -> list[object]:
    raise AssertionError("a planned pipeline has no code until it is lowered")


def submesh_shapes(
    method: PipelineParallel, options: Options, cluster: Cluster
) -> tuple[MeshShape, ...]:
    """The mesh of each submesh; `mesh` is the shape of one, if all are alike.

    Raises:
      ValueError: the devices cannot be dealt out so.
      NotImplementedError: on Ray, a submesh is a part of two hosts.
    """
    number, devices = method.num_submeshes, cluster.num_devices
    if number > devices:
        raise ValueError(
            f"Every submesh of a pipeline needs a device, but got {number} submeshes "
            f"and {devices} devices; use at most num_stages="
            f"{devices * method.stages_per_submesh}."
        )
    inside = cluster.devices_per_host
    if method.stage_meshes is not None:
        shapes = tuple(parse_mesh(mesh) for mesh in method.stage_meshes)
        if method.inside and sum(shape.size for shape in shapes) != devices:
            raise ValueError(
                f"`data` times `tensor` times `pipeline` must be the number of "
                f"devices, but {number} stages of {shapes[0]} have {devices}; use "
                f"other sizes."
            )
        if sum(shape.size for shape in shapes) > devices:
            raise ValueError(
                f"The submeshes of a pipeline share no device, but `stage_meshes` need "
                f"{sum(shape.size for shape in shapes)} and there are {devices}; make "
                f"some smaller."
            )
        if cluster.ray_hosts is not None:
            HostGroups.of([shape.size for shape in shapes], inside)
        return shapes
    if devices % number:
        shares = [f"x:{each}" for each in dealt_out(number, cluster.num_hosts, inside)]
        raise ValueError(
            f"Devices are dealt out evenly, but {devices} devices cannot be to "
            f"{number} submeshes; say how with `stage_meshes`, such as {shares}, or "
            f"use a number that divides them."
        )
    share = devices // number
    if cluster.ray_hosts is not None:
        HostGroups.of([share] * number, inside)
    shape = MeshShape(("x",), (share,))
    if options.mesh is not None:
        shape = parse_mesh(options.mesh, share)
    return (shape,) * number
