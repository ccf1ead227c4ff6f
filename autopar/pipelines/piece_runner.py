"""Run a step with some of its tensors in pieces, and its cut scans chunk by chunk."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..graph.build_graph import SCAN
from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operand, Operator, OpGraph
from ..jax_compat import equation_context, user_context
from ..lowering.blocks import as_array
from ..microbatches.extremes import JOINS
from ..microbatches.microbatch_runners import WholeRunner
from ..rules.base import Shard, bind_unchanged, is_inexact, rule_of
from ..sharding.mesh import MeshShape
from ..sharding.spec import REPLICATED, Spec, axes_of_dim
from .piece_flow import PASSING, Cut, PieceFlow
from .scan_bodies import accumulating_carries, light_makers, unchanged_carries

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class _PieceShard(Shard):
    """What a rule may ask while it binds its primitive on piece `index`."""

    cut: Cut
    index: int

    def operand_shape(self, op: Operator, position: int) -> tuple[int, ...]:
        state = self.operand_specs[position][0]
        return self._local(op.operand_types[position].shape, state)

    def result_shape(self, op: Operator, position: int = 0) -> tuple[int, ...]:
        state = self.result_specs[position][0]
        return self._local(op.result_types[position].shape, state)

    def block_index(self, axes: Sequence[int]) -> jax.Array:
        return jnp.int32(self.index if axes else 0)

    def offset(self, spec: Spec, dim: int, local_size: int) -> jax.Array:
        if not axes_of_dim(spec, dim):
            return jnp.int32(0)
        first, end = self.cut.borders()[self.index]
        return jnp.int32(first * (local_size // (end - first)))

    def _local(self, shape: tuple[int, ...], state: int) -> tuple[int, ...]:
        if state < 0:
            return shape
        size = shape[state] // self.cut.num_layers * self.cut.lengths[self.index]
        return (*shape[:state], size, *shape[state + 1 :])


class PieceRunner(WholeRunner):
    """Runs the outermost block with some of its tensors in pieces."""

    def __init__(self, graph: OpGraph, flow: PieceFlow) -> None:
        super().__init__(graph)
        self.flow = flow
        self.pieces: dict[int, tuple[Any, ...]] = {}
        self.sliced: dict[tuple[int, Cut], tuple[Any, ...]] = {}

    def run_outermost(self) -> None:
        for op in self.graph.blocks[0].operators:
            with jax.named_scope(self.scope(op)), user_context(op.eqn):
                self.run(op)

    def run(self, op: Operator) -> None:
        """Write the results of an operator, whole or in pieces."""
        lengths = self.flow.operator_lengths.get(op.index)
        if op.kind in PASSING:
            self.pass_on(op)
        elif lengths is None:
            results = self.execute(op, self.operands(op))
            self.values.update(zip(op.results, results, strict=True))
        elif op.kind == SCAN:
            self.run_chunks(op, lengths)
        else:
            self.run_pieces(op, lengths)

    def value(self, operand: Operand) -> Any:
        """The whole of a tensor, or a literal."""
        if isinstance(operand, int) and operand in self.pieces:
            if operand not in self.values:
                dim = self.flow.cut[operand].dim
                self.values[operand] = lax.concatenate(self.pieces[operand], dim)
        return super().value(operand)

    def cut_pieces(self, operand: Operand, cut: Cut) -> tuple[Any, ...]:
        """The pieces of a tensor, taken from the whole if it does not lie so."""
        if isinstance(operand, int) and self.flow.cut.get(operand) == cut:
            return self.pieces[operand]
        whole = as_array(self.value(operand))
        if not isinstance(operand, int):
            return _slices(whole, cut)
        if (operand, cut) not in self.sliced:
            self.sliced[operand, cut] = _slices(whole, cut)
        return self.sliced[operand, cut]

    def pass_on(self, op: Operator) -> None:
        """A barrier for what is whole, and one for piece k of all that is cut."""
        passed = list(zip(op.operands, op.results, strict=True))
        whole = [(o, result) for o, result in passed if result not in self.flow.cut]
        if whole:
            results = self.execute(op, [self.value(operand) for operand, _ in whole])
            for (_, result), value in zip(whole, results, strict=True):
                self.values[result] = value
        cut = [
            (self.cut_pieces(o, self.flow.cut[result]), result)
            for o, result in passed
            if result in self.flow.cut
        ]
        for k in range(max((len(pieces) for pieces, _ in cut), default=0)):
            those = [(pieces[k], t) for pieces, t in cut if k < len(pieces)]
            values = self.execute(op, [piece for piece, _ in those])
            for (_, result), value in zip(those, values, strict=True):
                self.pieces[result] = (*self.pieces.get(result, ()), value)

    def run_pieces(self, op: Operator, lengths: Lengths) -> None:
        """The operator on each piece; sums of pieces are closed at once."""
        factor = self.flow.factor[op.index]
        mesh = MeshShape(("layers",), (len(lengths),))
        specs = (
            tuple((s,) for s in factor.operands),
            tuple((s,) for s in factor.results),
        )
        operands = [
            self.cut_pieces(operand, Cut(state, lengths))
            if state >= 0
            else (self.value(operand),) * len(lengths)
            for operand, state in zip(op.operands, factor.operands, strict=True)
        ]
        rule = rule_of(op)
        bind = rule.bind if rule is not None else bind_unchanged
        made = []
        for k in range(len(lengths)):
            shard = _PieceShard(mesh, (factor,), *specs, Cut(0, lengths), k)
            with equation_context(op.eqn):
                made.append(bind(op, [pieces[k] for pieces in operands], shard))
        for position, (result, state) in enumerate(
            zip(op.results, factor.results, strict=True)
        ):
            pieces = [results[position] for results in made]
            if state >= 0:
                self.pieces[result] = tuple(pieces)
            else:
                self.values[result] = _joined(pieces, state, op)

    def run_chunks(self, op: Operator, lengths: Lengths) -> None:
        """A chain of scans; each takes its pieces and hands its carries on."""
        num_consts, num_carry = op.params["num_consts"], op.params["num_carry"]
        first_slice = num_consts + num_carry
        operands = [as_array(x) for x in map(self.value, op.operands[:first_slice])]
        consts, start = operands[:num_consts], operands[num_consts:]
        cut = Cut(0, lengths)
        slices = [self.cut_pieces(o, cut) for o in op.operands[first_slice:]]
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
            self.pieces[result] = tuple(stacked[k][position] for k in order)
        self.unstack(op, slices)

    def unstack(self, op: Operator, slices: Sequence[tuple[Any, ...]]) -> None:
        """What a scan stacks and only makes of its slices is made outside of it.

        Casts and broadcasts of parameters that the backward pass reads are then no
        residuals of every microbatch: a stage makes them where it reads them.
        """
        body, num_carry = self.graph.blocks[op.bodies[0]], op.params["num_carry"]
        first = op.params["num_consts"] + num_carry
        sliced = {
            tensor: pieces
            for tensor, outer, pieces in zip(
                *(body.inputs[first:], op.operands[first:], slices), strict=True
            )
            if is_inexact(self.graph.tensors[tensor].type)
            and outer not in self.flow.examples
        }
        makers = light_makers(body, sliced) if sliced else {}
        for output, result in zip(
            body.outputs[num_carry:], op.results[num_carry:], strict=True
        ):
            if not isinstance(output, int):
                continue
            if output in sliced:
                self.pieces[result] = sliced[output]
            elif output in makers:
                make = functools.partial(self.make_slice, makers, sliced, output)
                self.pieces[result] = tuple(
                    jax.vmap(make)(*given)
                    for given in zip(*sliced.values(), strict=True)
                )

    def make_slice(
        self,
        makers: Mapping[int, Operator],
        sliced: Iterable[int],
        wanted: int,
        *given: Any,
    ) -> Any:
        """One layer's tensor from the slices of its parameters."""
        needed, waiting = set(), [wanted]
        while waiting:
            op = makers.get(waiting.pop())
            if op is not None and op.index not in needed:
                needed.add(op.index)
                waiting.extend(tensors_of(op.operands))
        runner = WholeRunner(self.graph)
        runner.values.update(zip(sliced, given, strict=True))
        found = {op.index: op for op in makers.values() if op.index in needed}
        runner.run_operators(list(found.values()))
        return runner.values[wanted]


def _slices(whole: jax.Array, cut: Cut) -> tuple[jax.Array, ...]:
    grain = whole.shape[cut.dim] // cut.num_layers
    return tuple(
        lax.slice_in_dim(whole, first * grain, end * grain, axis=cut.dim)
        for first, end in cut.borders()
    )


def _joined(pieces: Sequence[Any], state: int, op: Operator) -> Any:
    """Partial results in one, from the stage on that has the first to be known."""
    if state == REPLICATED:
        return pieces[0]
    ordered = list(reversed(pieces)) if "transpose(" in op.name else list(pieces)
    total = ordered[0]
    for piece in ordered[1:]:
        total = JOINS[state](total, piece)
    return total
