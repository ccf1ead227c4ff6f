"""A step cut into microbatches and stages, before anything is planned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..clusters.cluster import Cluster
from ..frontend.roles import Roles
from ..frontend.tracing import TracedFunction
from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph
from ..methods.methods import PipelineParallel
from ..methods.schedule_choice import has_weight_tasks
from ..microbatches.microbatch_independent import trace_microbatch
from ..microbatches.microbatch_semantics import microbatched
from ..microbatches.microbatch_step import MicrobatchedStep
from ..options import Options
from ..planner.planning import batch_tensors, leaves_of, roles_of
from ..sharding.mesh import MeshShape
from .piece_trace import PiecedStep, cut_scans
from .stage_apply import ApplyCut, cut_apply
from .stage_cut import StageCut, cut_stages, scan_lengths
from .stage_pins import StagePins
from .stage_planner import StagePlanner
from .stage_programs import PipelineBuilder
from .stage_trace import StepParts, trace_parts


@dataclass(frozen=True, eq=False)
class CutStep:
    """A step cut into microbatches and stages, and its update; nothing is planned.

    `whole` is the step itself, `pieced` the same with scans cut by length. `leaves` are
    the arguments by path.
    """

    whole: TracedFunction
    pieced: PiecedStep
    step: MicrobatchedStep
    parts: StepParts
    cut: StageCut
    apply: ApplyCut
    leaves: Mapping[str, Any]

    def builder(
        self,
        shapes: Sequence[MeshShape],
        options: Options,
        split: Collection[int] = (),
        planner: StagePlanner | None = None,
    ) -> PipelineBuilder:
        """What plans the programs, on the mesh of each stage.

        State of the stages in `split` lies in as many parts as they have devices.
        """
        cluster = options.cluster or Cluster.local()
        traced, roles = self.pieced.traced, self.pieced.roles
        read_only = {
            path: self.leaves[path]
            for path, output in zip(traced.input_paths, roles.next_output, strict=True)
            if output is None and path in self.leaves
        }
        pins = self.pieced.by_piece(options.pins, self.whole)
        return PipelineBuilder(
            self.parts,
            self.cut,
            self.apply,
            cluster,
            shapes,
            _next_paths(traced, roles),
            StagePins.checked(pins, traced.input_paths, read_only),
            None if options.plan is None else options.plan.stages.programs,
            _kept(self.whole, self.pieced, options),
            frozenset(split),
            planner or StagePlanner(cluster),
        )


def cut_step(
    fun: Callable[..., Any],
    whole: TracedFunction,
    leaves: Sequence[Any],
    method: PipelineParallel,
    options: Options,
) -> CutStep:
    """Cut a traced step as `method` asks for; errors are those of `plan_pipeline`."""
    num_stages = method.num_stages or 2
    pieced, step = _microbatched(fun, whole, method, options)
    parts = _tied(trace_parts(pieced.traced, step), pieced.traced, pieced.roles)
    cut = cut_stages(
        parts.microbatch,
        [i.tensor for i in parts.microbatch.inputs if i.path in parts.held],
        num_stages,
        has_weight_tasks(method.schedule, num_stages, step.num_microbatches),
        method.stage_products,
    )
    apply = _cut_apply(parts, cut)
    by_path = dict(zip(whole.input_paths, leaves, strict=True))
    parts = replace(parts, apply=apply.graph)
    return CutStep(whole, pieced, step, parts, cut, apply, by_path)


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
    lengths = scan_lengths(graph, held, method.num_stages or 2, method.stage_products)

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
