"""Trace a step again with its scans over layers cut by length into chains of scans.

Each chunk of such a scan is then one operator that a pipeline can put on a stage, and
each chunk of a stacked leaf an argument of its own, with its own home.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from ..frontend.dead_code import dead_code_eliminated
from ..graph.blocks import as_array
from ..graph.build_graph import SCAN
from ..graph.dependencies import leading_to
from ..graph.op_graph import Operand, Operator, OpGraph
from ..graph.traced_function import Roles, TracedFunction
from ..jax_compat import equation_context, user_context
from ..microbatches.extremes import JOINS
from ..microbatches.retracing import WholeRunner
from ..rules.base import Shard, bind_shard, is_inexact
from ..sharding.pins import spellings
from ..sharding.spec import REPLICATED, Spec, axes_of_dim
from .chunk_flow import (
    PASSING,
    ChunkFlow,
    Cut,
    accumulating_carries,
    light_makers,
    unchanged_carries,
)

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class _ChunkShard(Shard):
    """What a rule may ask while it binds its primitive on chunk `index`."""

    cut: Cut
    index: int

    def local(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        (state,) = spec
        if state < 0:
            return shape
        size = shape[state] // self.cut.num_layers * self.cut.lengths[self.index]
        return (*shape[:state], size, *shape[state + 1 :])

    def block_index(self, axes: Sequence[int]) -> jax.Array:
        return jnp.int32(self.index if axes else 0)

    def offset(self, spec: Spec, dim: int, local_size: int) -> jax.Array:
        if not axes_of_dim(spec, dim):
            return jnp.int32(0)
        first, end = self.cut.borders()[self.index]
        return jnp.int32(first * (local_size // (end - first)))


class ChunkRunner(WholeRunner):
    """Runs the outermost block with some of its tensors in chunks."""

    def __init__(self, graph: OpGraph, flow: ChunkFlow) -> None:
        super().__init__(graph)
        self.flow = flow
        self.chunks: dict[int, tuple[Any, ...]] = {}
        self.sliced: dict[tuple[int, Cut], tuple[Any, ...]] = {}

    def run_operators(self, operators: Sequence[Operator]) -> None:
        for op in operators:
            with jax.named_scope(self.scope(op)), user_context(op.eqn):
                self.run(op)

    def run(self, op: Operator) -> None:
        """Write the results of an operator, whole or in chunks."""
        lengths = self.flow.operator_lengths.get(op.index)
        if op.kind in PASSING:
            self.pass_on(op)
        elif lengths is None:
            results = self.execute(op, self.operands(op))
            self.values.update(zip(op.results, results, strict=True))
        elif op.kind == SCAN:
            self.run_chunks(op, lengths)
        else:
            self.run_by_chunk(op, lengths)

    def value(self, operand: Operand) -> Any:
        """The whole of a tensor, or a literal."""
        if isinstance(operand, int) and operand in self.chunks:
            if operand not in self.values:
                dim = self.flow.cut[operand].dim
                self.values[operand] = lax.concatenate(self.chunks[operand], dim)
        return super().value(operand)

    def chunks_of(self, operand: Operand, cut: Cut) -> tuple[Any, ...]:
        """The chunks of a tensor, taken from the whole if it does not lie so."""
        if isinstance(operand, int) and self.flow.cut.get(operand) == cut:
            return self.chunks[operand]
        whole = as_array(self.value(operand))
        if not isinstance(operand, int):
            return _slices(whole, cut)
        if (operand, cut) not in self.sliced:
            self.sliced[operand, cut] = _slices(whole, cut)
        return self.sliced[operand, cut]

    def pass_on(self, op: Operator) -> None:
        """A barrier for what is whole, and one for chunk k of all that is cut."""
        passed = list(zip(op.operands, op.results, strict=True))
        whole = [(o, result) for o, result in passed if result not in self.flow.cut]
        if whole:
            results = self.execute(op, [self.value(operand) for operand, _ in whole])
            for (_, result), value in zip(whole, results, strict=True):
                self.values[result] = value
        cut = [
            (self.chunks_of(o, self.flow.cut[result]), result)
            for o, result in passed
            if result in self.flow.cut
        ]
        for k in range(max((len(chunks) for chunks, _ in cut), default=0)):
            those = [(chunks[k], t) for chunks, t in cut if k < len(chunks)]
            values = self.execute(op, [chunk for chunk, _ in those])
            for (_, result), value in zip(those, values, strict=True):
                self.chunks[result] = (*self.chunks.get(result, ()), value)

    def run_by_chunk(self, op: Operator, lengths: Lengths) -> None:
        """The operator on each chunk; sums of chunks are closed at once."""
        factor = self.flow.factor[op.index]
        operands = [
            self.chunks_of(operand, Cut(state, lengths))
            if state >= 0
            else (self.value(operand),) * len(lengths)
            for operand, state in zip(op.operands, factor.operands, strict=True)
        ]
        made = []
        for k in range(len(lengths)):
            shard = _ChunkShard.of([factor], [len(lengths)], Cut(0, lengths), k)
            with equation_context(op.eqn):
                made.append(bind_shard(op, [chunks[k] for chunks in operands], shard))
        for position, (result, state) in enumerate(
            zip(op.results, factor.results, strict=True)
        ):
            chunks = [results[position] for results in made]
            if state >= 0:
                self.chunks[result] = tuple(chunks)
            else:
                self.values[result] = _joined(chunks, state, op)

    def run_chunks(self, op: Operator, lengths: Lengths) -> None:
        """A chain of scans; each takes its chunks and hands its carries on."""
        num_consts, num_carry = op.params["num_consts"], op.params["num_carry"]
        first_slice = num_consts + num_carry
        operands = [as_array(x) for x in map(self.value, op.operands[:first_slice])]
        consts, start = operands[:num_consts], operands[num_consts:]
        cut = Cut(0, lengths)
        slices = [self.chunks_of(o, cut) for o in op.operands[first_slice:]]
        restarted = unchanged_carries(self.graph, op)
        summed = accumulating_carries(self.graph, op)
        order = range(len(lengths))
        carry, stacked = list(start), {}
        for k in reversed(order) if op.params["reverse"] else order:
            chunk = replace(op, params={**op.params, "length": lengths[k]})
            given = [
                start[i] if i in restarted | summed else carry[i]
                for i in range(num_carry)
            ]
            results = self.scan(chunk, [*consts, *given, *(p[k] for p in slices)])
            is_first = not stacked
            stacked[k] = results[num_carry:]
            for i in range(num_carry):
                if i in summed and not is_first:
                    carry[i] = lax.add(carry[i], results[i])
                elif i not in restarted:
                    carry[i] = results[i]
        self.values.update(zip(op.results[:num_carry], carry, strict=True))
        for position, result in enumerate(op.results[num_carry:]):
            self.chunks[result] = tuple(stacked[k][position] for k in order)
        self.unstack(op, slices)

    def unstack(self, op: Operator, slices: Sequence[tuple[Any, ...]]) -> None:
        """What a scan stacks and only makes of its slices is made outside of it.

        Casts and broadcasts of parameters that the backward pass reads are then no
        residuals of every microbatch: a stage makes them where it reads them.
        """
        body, num_carry = self.graph.blocks[op.bodies[0]], op.params["num_carry"]
        first = op.params["num_consts"] + num_carry
        sliced = {
            tensor: chunks
            for tensor, outer, chunks in zip(
                *(body.inputs[first:], op.operands[first:], slices), strict=True
            )
            if is_inexact(self.graph.tensors[tensor].type)
            and outer not in self.flow.examples
        }
        makers = light_makers(body, sliced) if sliced else {}

        def make(wanted: int, *given: Any) -> Any:
            """One layer's tensor from the slices of its parameters."""
            runner = WholeRunner(self.graph)
            runner.values.update(zip(sliced, given, strict=True))
            operators = [*dict.fromkeys(makers.values())]
            runner.run_operators(leading_to([wanted], operators))
            return runner.values[wanted]

        for output, result in zip(
            body.outputs[num_carry:], op.results[num_carry:], strict=True
        ):
            if not isinstance(output, int):
                continue
            if output in sliced:
                self.chunks[result] = sliced[output]
            elif output in makers:
                self.chunks[result] = tuple(
                    jax.vmap(functools.partial(make, output))(*given)
                    for given in zip(*sliced.values(), strict=True)
                )


def _slices(whole: jax.Array, cut: Cut) -> tuple[jax.Array, ...]:
    grain = whole.shape[cut.dim] // cut.num_layers
    return tuple(
        lax.slice_in_dim(whole, first * grain, end * grain, axis=cut.dim)
        for first, end in cut.borders()
    )


def _joined(chunks: Sequence[Any], state: int, op: Operator) -> Any:
    """Partial results in one, from the stage on that has the first to be known."""
    if state == REPLICATED:
        return chunks[0]
    ordered = list(reversed(chunks)) if "transpose(" in op.name else list(chunks)
    total = ordered[0]
    for chunk in ordered[1:]:
        total = JOINS[state](total, chunk)
    return total


T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ChunkedStep:
    """A step whose stacked leaves come in chunks along dim 0.

    `traced` has an input and an output for every chunk, in the order of the leaves;
    `input_lengths` and `output_lengths` say how each leaf of the original step is cut,
    None if it is whole.
    """

    traced: TracedFunction
    roles: Roles
    input_lengths: tuple[Lengths | None, ...]
    output_lengths: tuple[Lengths | None, ...]

    @property
    def next_paths(self) -> dict[str, str]:
        """The result path of every state leaf, by its path."""
        paths = zip(self.traced.input_paths, self.roles.next_output, strict=True)
        outputs = self.traced.output_paths
        return {path: outputs[i] for path, i in paths if i is not None}

    @classmethod
    def uncut(cls, traced: TracedFunction, roles: Roles) -> ChunkedStep:
        """A step with no scan to cut: every leaf is whole."""
        inputs, outputs = len(traced.input_paths), len(traced.output_paths)
        return cls(traced, roles, (None,) * inputs, (None,) * outputs)

    def by_chunk(self, by_path: Mapping[str, T], whole: TracedFunction) -> dict[str, T]:
        """What is said of leaves of `whole`, the original step, by path of a chunk."""
        known = {name for path in whole.input_paths for name in spellings(path)}
        found = {key: value for key, value in by_path.items() if key not in known}
        for path, chunks in self.chunks_by_path(whole).items():
            for name in spellings(path):
                if name in by_path:
                    found.update(dict.fromkeys(chunks, by_path[name]))
        return found

    def chunks_by_path(self, whole: TracedFunction) -> dict[str, tuple[str, ...]]:
        """The paths of the chunks of each leaf of `whole`, the original step."""
        chunks = iter(self.traced.input_paths)
        counts = map(_num_chunks, self.input_lengths)
        return {
            path: tuple(itertools.islice(chunks, count))
            for path, count in zip(whole.input_paths, counts, strict=True)
        }


def cut_scans(
    traced: TracedFunction,
    graph: OpGraph,
    roles: Roles,
    lengths: Mapping[int, Lengths],
    fixed: Sequence[int],
) -> ChunkedStep:
    """The step with some scans cut into chunks of `lengths`, by operator of `graph`.

    Scans that read what a cut scan stacked (its backward pass) are cut alike. `fixed`
    are input tensors that stay whole: the batch. Values are those of the step itself;
    carries that only add up from zero do so in each chunk and are summed.
    """
    flow = ChunkFlow(graph, lengths, frozenset(fixed))
    flow.run()
    leaf_cut = [flow.cut.get(i.tensor) for i in graph.inputs]
    num_arguments = len(traced.input_paths)
    rows = [
        _rows(cut, graph.tensors[i.tensor].type.shape)
        for cut, i in zip(leaf_cut, graph.inputs, strict=True)
    ][:num_arguments]
    outputs = _output_cuts(graph, flow)

    def step(*leaves: Any) -> list[Any]:
        runner, given = ChunkRunner(graph, flow), iter(leaves)
        for graph_input, cut in zip(graph.inputs, leaf_cut, strict=True):
            if cut is None:
                runner.values[graph_input.tensor] = next(given)
            else:
                chunks = tuple(next(given) for _ in cut.lengths)
                runner.chunks[graph_input.tensor] = chunks
        runner.run_operators(graph.blocks[0].operators)
        results: list[Any] = []
        for operand, cut in zip(graph.outputs, outputs, strict=True):
            if cut is None:
                results.append(as_array(runner.value(operand)))
            else:
                results.extend(runner.chunks_of(operand, cut))
        return results

    types = [
        kind
        for var, lengths in zip(traced.jaxpr.jaxpr.invars, rows, strict=True)
        for kind in _chunk_types(var.aval, lengths)
    ]
    result_rows = [
        _rows(cut, var.aval.shape)
        for cut, var in zip(outputs, traced.jaxpr.jaxpr.outvars, strict=True)
    ]
    constants = [as_array(value) for value in traced.jaxpr.consts]
    closed = jax.make_jaxpr(lambda *leaves: step(*leaves, *constants))(*types)
    return ChunkedStep(
        TracedFunction(
            traced.name,
            dead_code_eliminated(closed),
            jax.tree.structure(((0,) * len(types), {})),
            jax.tree.structure((0,) * len(closed.out_avals)),
            _chunk_paths(traced.input_paths, rows),
            _chunk_paths(traced.output_paths, result_rows),
        ),
        _chunked_roles(roles, rows, result_rows),
        tuple(rows),
        tuple(result_rows),
    )


def _rows(cut: Cut | None, shape: Sequence[int]) -> Lengths | None:
    """The size of dim 0 of each chunk; a layer may have several rows."""
    if cut is None:
        return None
    return tuple(shape[0] // cut.num_layers * length for length in cut.lengths)


def _chunk_types(aval: Any, rows: Lengths | None) -> list[jax.ShapeDtypeStruct]:
    if rows is None:
        weak = aval.weak_type
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)]
    return [jax.ShapeDtypeStruct((n, *aval.shape[1:]), aval.dtype) for n in rows]


def _chunk_paths(
    paths: Sequence[str], rows: Sequence[Lengths | None]
) -> tuple[str, ...]:
    """`params['w'][0:6]` for the chunk of rows 0 to 5."""
    found: list[str] = []
    for path, lengths in zip(paths, rows, strict=True):
        if lengths is None:
            found.append(path)
        else:
            borders = Cut(0, lengths).borders()
            found.extend(f"{path}[{first}:{end}]" for first, end in borders)
    return tuple(found)


def _output_cuts(graph: OpGraph, flow: ChunkFlow) -> list[Cut | None]:
    """The cut of every result: that of the leaf it is the next value of, or its own."""
    cuts = [flow.cut_of(operand) for operand in graph.outputs]
    cuts = [cut if cut is not None and cut.dim == 0 else None for cut in cuts]
    for graph_input in graph.inputs:
        if graph_input.output is not None:
            cuts[graph_input.output] = flow.cut_of(graph_input.tensor)
    return cuts


def _chunked_roles(
    roles: Roles,
    inputs: Sequence[Lengths | None],
    outputs: Sequence[Lengths | None],
) -> Roles:
    first = [0, *itertools.accumulate(map(_num_chunks, outputs))]
    found, next_output = [], []
    for rows, role, output in zip(inputs, roles.roles, roles.next_output, strict=True):
        for chunk in range(_num_chunks(rows)):
            found.append(role)
            next_output.append(None if output is None else first[output] + chunk)
    return Roles(tuple(found), tuple(next_output), roles.notes)


def _num_chunks(rows: Lengths | None) -> int:
    return 1 if rows is None else len(rows)
