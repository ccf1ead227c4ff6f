"""A step cut into microbatches and stages, before anything is planned.

Forward and backward of a stage are different programs, so what backward makes again
needs no barrier: the operators of the forward pass that lead from what is kept to the
residuals are put before those of the backward pass. A stage that makes everything again
keeps its inputs alone, as a cell of GPipe does (Huang et al. 2019, section 2.3). Loops
over layers that keep something of their body are transformed before the step is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..graph.build_graph import build_graph
from ..graph.dependencies import read_by
from ..graph.op_graph import OpGraph
from ..graph.traced_function import TracedFunction
from ..methods.methods import PipelineParallel
from ..methods.schedule_choice import has_weight_tasks
from ..microbatches.microbatch_independent import microbatched, trace_microbatch
from ..microbatches.microbatches import MicrobatchedStep
from ..option_values import Remat
from ..options import Options
from ..planner.whole_step import batch_tensors, roles_of
from ..plans.staged_plan import stages_of
from ..rematerialisation.recompute_sets import group_of, recompute_sets
from ..rematerialisation.remat_trace import with_recomputation
from ..transforms.chunked_step import ChunkedStep, cut_scans
from ..transforms.counts_apart import with_counts_apart
from .cut_programs import CutPrograms, cut_programs
from .stage_cut import StageCut, cut_stages, forward_order, scan_lengths
from .step_parts import StepParts, trace_parts
from .update_cut import ApplyCut, cut_apply


@dataclass(frozen=True, eq=False)
class CutStep:
    """A step cut into microbatches and stages, and its update; nothing is planned.

    `whole` is the step itself, `chunked` the same with scans cut by length.
    """

    whole: TracedFunction
    chunked: ChunkedStep
    parts: StepParts
    cut: StageCut
    apply: ApplyCut

    @cached_property
    def programs(self) -> CutPrograms:
        """The stage programs, none of them planned."""
        next_paths = self.chunked.next_paths
        return cut_programs(self.parts, self.cut, self.apply, next_paths)


def cut_step(
    fun: Callable[..., Any],
    whole: TracedFunction,
    method: PipelineParallel,
    options: Options,
    in_place: bool = False,
    graph: OpGraph | None = None,
) -> CutStep:
    """Cut a traced step as `method` asks for; errors are those of `plan_pipeline`.

    `in_place`: its parts are not traced, see `trace_parts`. `graph` is that of `whole`,
    if it is there.
    """
    num_stages = method.num_stages or 2
    chunked, step = _microbatched(fun, whole, method, options, graph)
    parts = trace_parts(step, in_place)
    parts = _tied(parts, chunked.next_paths)
    cut = cut_stages(
        parts.microbatch,
        [i.tensor for i in parts.microbatch.inputs if i.path in parts.held],
        num_stages,
        has_weight_tasks(method.schedule, num_stages, step.num_microbatches),
        method.stage_products,
    )
    remat = remat_of(options)
    if remat is not None:
        graph = parts.microbatch
        examples = [i.tensor for i in graph.inputs if i.path not in parts.held]
        number = remat.num_segments or _num_recomputing(method, num_stages)
        number = min(number, num_stages)
        cut = with_recomputed_stages(cut, graph, examples, remat, number)
    apply = _cut_apply(parts, cut)
    cut = _with_homes(cut, parts, apply)
    return CutStep(whole, chunked, replace(parts, apply=apply.graph), cut, apply)


def remat_of(options: Options) -> Remat | None:
    """What the user asked for, or what the given plan was made with."""
    given = [options.remat or ""]
    if options.plan is not None:
        given = [each.sharding.remat for each in stages_of(options.plan).programs]
    return next((Remat.parse(text) for text in given if text), None)


def _num_recomputing(method: PipelineParallel, num_stages: int) -> int:
    """How many stages make residuals again, where the user did not say.

    In 1F1B the backward task of the last stage is always the next one.
    """
    return num_stages - (method.schedule in ("1f1b", "eager_1f1b"))


def products_by_cost(
    whole: TracedFunction, method: PipelineParallel, options: Options
) -> tuple[int, ...]:
    """The products of each stage that balance the method's `layer_costs`.

    Raises:
      ValueError: fewer products than stages, or another number of costs.
    """
    assert method.num_stages is not None and method.layer_costs is not None
    graph = build_graph(whole, roles_of(whole))
    batch = batch_tensors(whole, graph, options)
    held = [i.tensor for i in graph.inputs if i.tensor not in batch]
    return forward_order(graph, held).balanced(method.num_stages, method.layer_costs)


def _microbatched(
    fun: Callable[..., Any],
    whole: TracedFunction,
    method: PipelineParallel,
    options: Options,
    graph: OpGraph | None,
) -> tuple[ChunkedStep, MicrobatchedStep]:
    """The step with its scans over layers cut by length, cut into microbatches."""
    roles = roles_of(whole)
    plain, traced = graph or build_graph(whole, roles), whole
    number = method.num_microbatches or options.num_microbatches
    batch = batch_tensors(whole, plain, options)
    remat = remat_of(options)

    def with_loops(
        traced: TracedFunction, graph: OpGraph
    ) -> tuple[TracedFunction, OpGraph]:
        if remat is None:
            return traced, graph
        traced = with_recomputed_loops(traced, graph, batch, remat)
        return traced, build_graph(traced, roles)

    whole, graph = traced, plain
    if options.microbatch_semantics == "exact":
        whole, graph = with_counts_apart(traced, plain, roles, batch)
    whole, graph = with_loops(whole, graph)
    held = [i.tensor for i in graph.inputs if i.tensor not in batch]
    lengths = scan_lengths(graph, held, method.num_stages or 2, method.stage_products)

    def chunked_of(traced: TracedFunction, graph: OpGraph) -> ChunkedStep:
        if not lengths:
            return ChunkedStep.uncut(traced, roles)
        return cut_scans(traced, graph, roles, lengths, batch)

    def trace_part() -> TracedFunction:
        part = trace_microbatch(fun, traced, plain, batch, number)
        return chunked_of(*with_loops(part, build_graph(part, roles))).traced

    chunked = chunked_of(whole, graph)
    of_chunks = build_graph(chunked.traced, chunked.roles) if lengths else graph
    paths = {graph.tensors[tensor].name for tensor in batch}
    step = microbatched(
        trace_part,
        of_chunks,
        chunked.roles,
        [i.tensor for i in of_chunks.inputs if i.path in paths],
        number,
        options.microbatch_semantics,
        sums_stay_apart=True,
    )
    return chunked, step


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


def _with_homes(cut: StageCut, parts: StepParts, apply: ApplyCut) -> StageCut:
    """The cut with state at home where the update has it."""
    of_apply = {i.path: i.tensor for i in parts.apply.inputs}
    names = {t.index: t.name for t in parts.microbatch.tensors}
    home = {
        tensor: apply.home.get(of_apply[names[tensor]], stage)
        for tensor, stage in cut.home.items()
    }
    return cut if home == cut.home else replace(cut, home=home)


def _tied(parts: StepParts, outputs: Mapping[str, str]) -> StepParts:
    """The apply graph told which output is the next value of which input."""
    position = {path: i for i, path in enumerate(parts.apply.output_paths)}
    inputs = tuple(
        replace(i, output=position[outputs[i.path]])
        if outputs.get(i.path) in position
        else i
        for i in parts.apply.inputs
    )
    return replace(parts, apply=replace(parts.apply, inputs=inputs))


def with_recomputed_loops(
    traced: TracedFunction, graph: OpGraph, batch: Sequence[int], remat: Remat
) -> TracedFunction:
    """A step whose backward loops over layers do again what the level does of a body.

    "full" leaves loops as they are: the whole loop is done again by the stage.
    `batch` are the inputs of `graph`, the graph of `traced`, that hold examples.
    """
    if remat.level == "full":
        return traced
    sets = recompute_sets(graph, batch, remat)
    none = frozenset[int]()
    loops = replace(sets, groups={}, backward=none, cotangents=none)
    return with_recomputation(traced, graph, loops)


def with_recomputed_stages(
    cut: StageCut, graph: OpGraph, examples: Sequence[int], remat: Remat, number: int
) -> StageCut:
    """The stages, of which the first `number` make residuals again in their backward.

    `examples` are the inputs of `graph` that hold examples.
    """
    backward = list(cut.backward)
    for stage in range(number):
        forward = cut.forward[stage]
        made = {t for op in forward for t in op.results}
        reads = dict.fromkeys(read_by([*backward[stage], *cut.weight[stage]]))
        inputs = set(read_by(forward)) - made
        group = group_of(
            *(graph, examples, remat, forward),
            wanted=[t for t in reads if t in made],
            known={t for t in inputs if t in graph.blocks[0].inputs},
        )
        if group is not None:
            chosen = {op.index for op in (*group, *backward[stage])}
            backward[stage] = tuple(
                op for op in graph.blocks[0].operators if op.index in chosen
            )
    return replace(cut, backward=tuple(backward))
