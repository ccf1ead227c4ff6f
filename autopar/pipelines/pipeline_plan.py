"""Plan a step as a pipeline: trace, cut into stages, plan every stage program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax

from ..clusters.cluster import Cluster
from ..frontend.roles import Roles
from ..frontend.tracing import TracedFunction, trace
from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph, TensorType
from ..lowering.programs import PipelineProgram
from ..methods.methods import PipelineParallel
from ..methods.schedule_choice import has_weight_tasks
from ..microbatches.microbatch_independent import trace_microbatch
from ..microbatches.microbatch_semantics import microbatched
from ..microbatches.microbatch_step import MicrobatchedStep
from ..options import Options
from ..planner.planning import batch_tensors, leaves_of, roles_of
from ..plans.staged_plan import PlannedTransfer
from ..sharding.mesh import MeshShape, parse_mesh
from ..sharding.spec import Spec, local_shape
from .piece_trace import PiecedStep, cut_scans
from .stage_apply import ApplyCut, cut_apply
from .stage_cut import StageCut, cut_stages, scan_lengths
from .stage_lowering import dataflow
from .stage_pins import StagePins
from .stage_programs import PipelineBuilder, PlannedPiece
from .stage_trace import StepParts, trace_parts


@dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """One signature of a step, cut into stages and planned, on no devices.

    `traced` is the step itself; `pieced` the same with scans cut by length, whose leaf
    pieces have slots. `flow` is the dataflow of the planned `pieces`; `specs` are those
    of each slot on each stage that holds it, `types` by slot, `shapes` the mesh of each
    submesh. `next_leaf` is the argument leaf (piece) that each result leaf (piece) is
    the next value of, or None; `unchanged` are result paths that are a leaf as it came,
    with its path.
    """

    traced: TracedFunction
    pieced: PiecedStep
    parts: StepParts
    method: PipelineParallel
    cluster: Cluster
    shapes: tuple[MeshShape, ...]
    flow: PipelineProgram
    pieces: tuple[PlannedPiece, ...]
    specs: Mapping[tuple[str, int], Spec]
    types: Mapping[str, TensorType]
    next_leaf: tuple[int | None, ...]
    unchanged: Mapping[str, str]

    @property
    def has_backward(self) -> bool:
        """Whether any stage has a backward program, as evaluation steps have not."""
        return any(piece.piece.kind == "backward" for piece in self.pieces)

    def submesh(self, stage: int) -> int:
        """The submesh that a stage runs on."""
        return stage % len(self.shapes)

    def slot_bytes(self, slot: str, stage: int) -> int:
        """Bytes of a slot's value on one device of a stage."""
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
        link = self.cluster.host_link if len(hosts) == 1 else self.cluster.network_link
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


def plan_pipeline(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    method: PipelineParallel,
    options: Options,
) -> PlannedPipeline:
    """Trace `fun`, cut it into the stages that `method` asks for and plan them.

    The plans of `options.plan`, if there are any, are used as they are.

    Raises:
      ValueError: more stages than devices or products, or microbatches that do not
        divide the batch.
      BatchCoupledError: the step cannot be cut into microbatches.
      PlanFileError: the plans given are of another step.
      NotImplementedError: what stages cannot do yet; the text names it.
    """
    cluster = options.cluster or Cluster.local()
    shapes = submesh_shapes(method, options, cluster)
    whole = trace(fun, args, kwargs)
    num_stages = method.num_stages or 2
    pieced, step = _microbatched(fun, whole, method, options)
    traced, roles = pieced.traced, pieced.roles
    parts = _tied(trace_parts(traced, step), traced, roles)
    cut = cut_stages(
        parts.microbatch,
        [i.tensor for i in parts.microbatch.inputs if i.path in parts.held],
        num_stages,
        has_weight_tasks(method.schedule, num_stages, step.num_microbatches),
    )
    leaves = dict(zip(whole.input_paths, jax.tree.leaves((args, kwargs)), strict=True))
    read_only = {
        path: leaves[path]
        for path, output in zip(traced.input_paths, roles.next_output, strict=True)
        if output is None and path in leaves
    }
    apply = _cut_apply(parts, cut)
    parts = replace(parts, apply=apply.graph)
    builder = PipelineBuilder(
        parts,
        cut,
        apply,
        cluster,
        [shapes[stage % len(shapes)] for stage in range(num_stages)],
        _next_paths(traced, roles),
        StagePins.checked(
            pieced.by_piece(options.pins, whole), traced.input_paths, read_only
        ),
        None if options.plan is None else options.plan.stages.programs,
        _kept(whole, pieced, options),
    )
    pieces = builder.build()
    next_leaf: list[int | None] = [None] * len(traced.output_paths)
    for leaf, output in enumerate(roles.next_output):
        if output is not None:
            next_leaf[output] = leaf
    return PlannedPipeline(
        whole,
        pieced,
        parts,
        method,
        cluster,
        shapes,
        dataflow(num_stages, step.num_microbatches, builder.slots, pieces),
        tuple(pieces),
        builder.specs,
        builder.types,
        tuple(next_leaf),
        {
            path: leaf
            for path in parts.apply.output_paths
            if (leaf := builder.unchanged(path)) is not None
        },
    )


def _kept(
    whole: TracedFunction, pieced: PiecedStep, options: Options
) -> frozenset[str]:
    """Paths of the leaf pieces whose buffers the user wants to keep."""
    if options.donate_argnums == "auto":
        return frozenset()
    donated = leaves_of(whole, options.donate_argnums, options)
    paths, kept = iter(pieced.traced.input_paths), set()
    for position, lengths in enumerate(pieced.input_lengths):
        own = [next(paths) for _ in lengths or (0,)]
        kept.update(own if position not in donated else ())
    return frozenset(kept)


def submesh_shapes(
    method: PipelineParallel, options: Options, cluster: Cluster
) -> tuple[MeshShape, ...]:
    """The mesh of each submesh; `mesh` is the shape of one, if all are alike.

    Raises:
      ValueError: the devices cannot be dealt out so.
    """
    number, devices = method.num_submeshes, cluster.num_devices
    if number > devices:
        raise ValueError(
            f"Every submesh of a pipeline needs a device, but got {number} submeshes "
            f"and {devices} devices; use at most num_stages="
            f"{devices * method.stages_per_submesh}."
        )
    if method.stage_meshes is not None:
        shapes = tuple(parse_mesh(mesh) for mesh in method.stage_meshes)
        if sum(shape.size for shape in shapes) > devices:
            raise ValueError(
                f"The submeshes of a pipeline share no device, but `stage_meshes` need "
                f"{sum(shape.size for shape in shapes)} and there are {devices}; make "
                f"some smaller."
            )
        return shapes
    if cluster.ray_hosts and cluster.num_hosts % number:
        raise ValueError(
            f"`num_stages` must divide the number of Ray hosts for now, as a stage is "
            f"whole hosts there, but got {number} stages and {cluster.num_hosts} "
            f"hosts; ask for others with Cluster.ray(num_hosts=)."
        )
    if devices % number:
        raise ValueError(
            f"Devices are dealt out evenly, but {devices} devices cannot be to "
            f"{number} submeshes; say how, for example stage_meshes="
            f"{_uneven(devices, number)}, or use "
            f"{_nearest_divisor(devices, number) * method.stages_per_submesh} stages."
        )
    share = devices // number
    shape = MeshShape(("x",), (share,))
    if options.mesh is not None:
        shape = parse_mesh(options.mesh, share)
    return (shape,) * number


def _uneven(num_devices: int, number: int) -> list[str]:
    """Submeshes of powers of two, as large as fit: they divide most arrays."""
    sizes = [1] * number
    while True:
        smallest = min(range(number), key=lambda i: sizes[i])
        if sum(sizes) + sizes[smallest] > num_devices:
            return [f"x:{size}" for size in sizes]
        sizes[smallest] *= 2


def _nearest_divisor(num_devices: int, number: int) -> int:
    divisors = [n for n in range(2, num_devices + 1) if num_devices % n == 0]
    return min(divisors, key=lambda n: (abs(n - number), n), default=1)


def _microbatched(
    fun: Callable[..., Any],
    whole: TracedFunction,
    method: PipelineParallel,
    options: Options,
) -> tuple[PiecedStep, MicrobatchedStep]:
    """The step with its scans over layers cut by length, cut into microbatches."""
    roles = roles_of(whole)
    graph = build_graph(whole, roles)
    number = method.num_microbatches or options.num_microbatches
    batch = batch_tensors(whole, graph, options)
    held = [i.tensor for i in graph.inputs if i.tensor not in batch]
    lengths = scan_lengths(graph, held, method.num_stages or 2)

    def pieced_of(traced: TracedFunction, graph: OpGraph) -> PiecedStep:
        if not lengths:
            return PiecedStep.uncut(traced, roles)
        return cut_scans(traced, graph, roles, lengths, batch)

    def trace_part() -> TracedFunction:
        part = trace_microbatch(fun, whole, graph, batch, number)
        return pieced_of(part, build_graph(part, roles)).traced

    pieced = pieced_of(whole, graph)
    of_pieces = build_graph(pieced.traced, pieced.roles) if lengths else graph
    paths = {graph.tensors[tensor].name for tensor in batch}
    step = microbatched(
        trace_part,
        of_pieces,
        pieced.roles,
        [i.tensor for i in of_pieces.inputs if i.path in paths],
        number,
        options.microbatch_semantics,
        sums_stay_apart=True,
    )
    return pieced, step


def _cut_apply(parts: StepParts, cut: StageCut) -> ApplyCut:
    """The update on the stages of the parameters and sums."""
    of_apply = {i.path: i.tensor for i in parts.apply.inputs}
    names = {t.index: t.name for t in parts.microbatch.tensors}
    made_by = dict(
        zip(parts.microbatch.output_paths, parts.microbatch.outputs, strict=True)
    )
    last = cut.num_stages - 1
    sums = {name: made_by[name] for name in parts.sums}
    updated = {i.path for i in parts.apply.inputs if i.output is not None}
    read_only = [name for name in parts.held if name not in updated]
    return cut_apply(
        parts.apply,
        {of_apply[names[tensor]]: stage for tensor, stage in cut.home.items()},
        {
            of_apply[name]: cut.made_on[operand][0]
            if isinstance(operand, int) and operand in cut.made_on
            else last
            for name, operand in sums.items()
        },
        frozenset(of_apply[name] for name in (*parts.prepared, *read_only)),
        last,
    )


def _next_paths(traced: TracedFunction, roles: Roles) -> dict[str, str]:
    """The result path of every state leaf."""
    return {
        path: traced.output_paths[output]
        for path, output in zip(traced.input_paths, roles.next_output, strict=True)
        if output is not None
    }


def _tied(parts: StepParts, traced: TracedFunction, roles: Roles) -> StepParts:
    """The apply graph told which output is the next value of which input."""
    outputs = _next_paths(traced, roles)
    position = {path: i for i, path in enumerate(parts.apply.output_paths)}
    inputs = tuple(
        replace(i, output=position[outputs[i.path]])
        if outputs.get(i.path) in position
        else i
        for i in parts.apply.inputs
    )
    return replace(parts, apply=replace(parts.apply, inputs=inputs))
