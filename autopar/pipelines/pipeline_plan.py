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
from ..frontend.effects import refuse_lost_callbacks
from ..frontend.garbage import without_garbage_collection
from ..frontend.tracing import TracedFunction, trace
from ..graph.op_graph import OpGraph, TensorType
from ..lowering.programs import PipelineProgram
from ..methods.methods import PipelineParallel
from ..methods.place_operators import PlaceOperators
from ..options import Options
from ..planner.update_loops import Updates
from ..plans.staged_plan import PlannedTransfer
from ..sharding.mesh import MeshShape, parse_mesh
from ..sharding.spec import Spec, local_shape
from .chunked_step import PiecedStep
from .cut_programs import PlannedPiece
from .cut_step import CutStep, cut_step, products_by_cost
from .program_plans import PipelineBuilder, StagePlanner
from .stage_cut import StageCut
from .step_parts import StepParts
from .update_cut import ApplyCut


@dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """One signature of a step, cut into stages and planned, on no devices.

    `traced` is the step itself; `pieced` the same with scans cut by length, whose leaf
    pieces have slots. `flow` is the dataflow of the planned `pieces`; `specs` are those
    of each slot on each stage that holds it, `types` by slot, `shapes` the mesh of each
    submesh. `next_leaf` is the argument leaf (piece) that each result leaf (piece) is
    the next value of, or None; `unchanged` are result paths that are a leaf as it came,
    with its path. `bound_seconds` are what no step takes less, in the model of the
    search that found the stages; 0 if they were given. `updates` are the loops over
    updates, from the outermost on, where a call runs the step several times.
    """

    traced: TracedFunction
    pieced: PiecedStep
    parts: StepParts
    method: PipelineParallel | PlaceOperators
    cluster: Cluster
    shapes: tuple[MeshShape, ...]
    flow: PipelineProgram
    pieces: tuple[PlannedPiece, ...]
    specs: Mapping[tuple[str, int], Spec]
    types: Mapping[str, TensorType]
    next_leaf: tuple[int | None, ...]
    unchanged: Mapping[str, str]
    bound_seconds: float = 0.0
    updates: tuple[Updates, ...] = ()

    @property
    def has_backward(self) -> bool:
        """Whether any stage has a backward program, as evaluation steps have not."""
        return any(piece.piece.kind == "backward" for piece in self.pieces)

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
        return frozenset(slot for piece in self.pieces for slot in piece.host_slots)

    def slot_bytes(self, slot: str, stage: int) -> int:
        """Bytes of a slot's value on one device of a stage; 0 if the host has it."""
        if slot in self.host_slots:
            return 0
        kind, sizes = self.types[slot], self.shapes[self.submesh(stage)].axis_sizes
        spec = self.specs[slot, stage]
        return prod(local_shape(kind.shape, spec, sizes)) * kind.itemsize

    def working_bytes(self, submesh: int) -> int:
        """The most that a program of a submesh takes besides its arguments and results.

        Those are values that the schedule holds, in bytes of one device.
        """
        most = 0
        for piece in self.pieces:
            stage = piece.piece.stage
            if self.submesh(stage) == submesh:
                names = {*piece.inputs, *piece.outputs}
                held = sum(self.slot_bytes(name, stage) for name in names)
                most = max(most, piece.plan.predicted.peak_bytes - held)
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


@without_garbage_collection
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
    at_host: Collection[int] = (),
    planner: StagePlanner | None = None,
) -> PlannedPipeline:
    """Trace `fun`, cut it into the stages that `method` asks for and plan them.

    The plans of `options.plan`, if there are any, are used as they are. `whole` is the
    trace of `fun` and `graph` its graph, if they are there; `split` are stages whose
    state lies in as many parts as they have devices, `at_host` those whose optimizer
    state the host keeps if `offload` is "auto", and `planner` knows plans of equal
    programs.

    Raises:
      ValueError: more stages than devices or products, or microbatches that do not
        divide the batch.
      BatchCoupledError: the step cannot be cut into microbatches.
      PlanFileError: the plans given are of another step.
      NotImplementedError: what stages cannot do yet; the text names it.
    """
    cluster = options.cluster or Cluster.local()
    shapes = submesh_shapes(method, options, cluster)
    whole = whole or trace(fun, args, kwargs)
    leaves = jax.tree.leaves((args, kwargs))
    if method.layer_costs is not None:
        products = products_by_cost(whole, method, options)
        method = replace(method, stage_products=products, layer_costs=None)
    made = cut_step(fun, whole, leaves, method, options, graph=graph)
    return _finished(made, method, shapes, options, split, planner, at_host)


def finish_pipeline(
    *,
    whole: TracedFunction,
    pieced: PiecedStep,
    parts: StepParts,
    cut: StageCut,
    apply: ApplyCut,
    method: PipelineParallel | PlaceOperators,
    cluster: Cluster,
    shapes: tuple[MeshShape, ...],
    options: Options,
    leaves: Mapping[str, Any] | None = None,
) -> PlannedPipeline:
    """Plan every program of a step that is cut already; `leaves` are those by path."""
    parts = replace(parts, apply=apply.graph)
    made = CutStep(whole, pieced, parts.step, parts, cut, apply, leaves or {})
    return _finished(made, method, shapes, replace(options, cluster=cluster), (), None)


def _finished(
    made: CutStep,
    method: PipelineParallel | PlaceOperators,
    shapes: tuple[MeshShape, ...],
    options: Options,
    split: Collection[int],
    planner: StagePlanner | None,
    at_host: Collection[int] = (),
) -> PlannedPipeline:
    builder = builder_of(made, method, shapes, options, split, planner, at_host)
    pieces = builder.build()
    refuse_lost_callbacks(made.step.graph, (piece.graph for piece in pieces))
    return assembled(made, method, shapes, builder, pieces)


def builder_of(
    made: CutStep,
    method: PipelineParallel | PlaceOperators,
    shapes: tuple[MeshShape, ...],
    options: Options,
    split: Collection[int],
    planner: StagePlanner | None,
    at_host: Collection[int] = (),
) -> PipelineBuilder:
    """What plans the programs of a step that is cut, on the submeshes of `shapes`."""
    submeshes = [stage % len(shapes) for stage in range(made.cut.num_stages)]
    builder = made.builder(
        [shapes[submesh] for submesh in submeshes],
        *(options, split, planner),
        method.inside if isinstance(method, PipelineParallel) else None,
        at_host,
    )
    ends = accumulate(shape.size for shape in shapes)
    devices = [
        range(end - shape.size, end) for end, shape in zip(ends, shapes, strict=True)
    ]
    builder.devices = [devices[submesh] for submesh in submeshes]
    if builder.cluster.parts:
        builder.clusters = [
            cluster_around(builder.cluster, each.start, len(each))
            for each in builder.devices
        ]
    return builder


def assembled(
    made: CutStep,
    method: PipelineParallel | PlaceOperators,
    shapes: tuple[MeshShape, ...],
    builder: PipelineBuilder,
    pieces: Sequence[PlannedPiece],
) -> PlannedPipeline:
    """The pipeline of the programs that `builder` planned."""
    num_stages, traced = made.cut.num_stages, made.pieced.traced
    next_leaf: list[int | None] = [None] * len(traced.output_paths)
    for leaf, output in enumerate(made.pieced.roles.next_output):
        if output is not None:
            next_leaf[output] = leaf
    return PlannedPipeline(
        made.whole,
        made.pieced,
        made.parts,
        method,
        builder.cluster,
        shapes,
        PipelineProgram(
            num_stages,
            made.step.num_microbatches,
            builder.slots,
            tuple(piece.running(_refuse_to_run) for piece in pieces),
            shardings={},
            zeros={},
        ),
        tuple(pieces),
        builder.specs,
        builder.types,
        tuple(next_leaf),
        {
            path: leaf
            for path in made.parts.apply.output_paths
            if (leaf := builder.unchanged(path)) is not None
        },
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
        hosts = cluster.num_hosts if cluster.ray_hosts is not None else 1
        uneven = dealt_out(number, hosts, devices // hosts)
        raise ValueError(
            f"Devices are dealt out evenly, but {devices} devices cannot be to "
            f"{number} submeshes; say how, for example stage_meshes="
            f"{[f'x:{size}' for size in uneven]}, or use "
            f"{_nearest_divisor(devices, number) * method.stages_per_submesh} stages."
        )
    share = devices // number
    if cluster.ray_hosts is not None:
        HostGroups.of([share] * number, inside)
    shape = MeshShape(("x",), (share,))
    if options.mesh is not None:
        shape = parse_mesh(options.mesh, share)
    return (shape,) * number


def _nearest_divisor(num_devices: int, number: int) -> int:
    divisors = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
    return min(divisors, key=lambda n: (abs(n - number), n), default=1)
