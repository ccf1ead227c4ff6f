"""Trace a step again, with a backward pass that makes some residuals again.

Planning and lowering need to know nothing of it: what is done twice is two operators.
Between them lies a barrier on what the second reads, which waits for the cotangent that
is read with it, as in `jax.checkpoint`: the compiler neither merges the two nor does
the second early. The gradients made so far pass it, too: a compiler that makes them as
late as it can would keep what it did again of every segment for them. In loops no
barrier is needed: the two are in different bodies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import jax
from jax import lax

from ..graph.blocks import as_array
from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..graph.phases import Phases, stacked_results
from ..graph.traced_function import TracedFunction
from ..microbatches.retracing import WholeRunner
from .recompute_sets import Group, RecomputeSets, ScanGroup

SCOPE = "rematerialised"


def with_recomputation(
    traced: TracedFunction, graph: OpGraph, sets: RecomputeSets
) -> TracedFunction:
    """`traced`, whose graph is `graph`, with the recomputation that `sets` says."""
    if sets.is_empty:
        return traced

    return _RematRunner(graph, sets).retraced(traced)


class _RematRunner(WholeRunner):
    """Runs a step's operators; backward ones read what was made again."""

    def __init__(self, graph: OpGraph, sets: RecomputeSets) -> None:
        super().__init__(graph)
        self.sets = sets
        self.again: dict[int, Any] = {}  # by tensor, for backward readers
        self.stacked: dict[tuple[int, int], Any] = {}  # by scan, tensor of its body
        self.saved = _saved(graph, sets)
        self.triggers = _triggers(graph, sets)
        self.last_reader = _last_readers(graph, sets)
        self.made: list[int] = []  # by the backward pass, behind the last barrier

    def run_operators(self, operators: Sequence[Operator]) -> None:
        for op in operators:
            for group in self.triggers.get(op.index, ()):
                self.do_again(group, op)
            super().run_operators((op,))
            if op.index in self.sets.backward:
                self.made += op.results

    def operands(self, op: Operator) -> list[Any]:
        if op.index not in self.sets.backward:
            return super().operands(op)
        return [
            self.again[o] if isinstance(o, int) and o in self.again else self.value(o)
            for o in op.operands
        ]

    def do_again(self, group: Group, reader: Operator) -> None:
        """Makes the residuals of a group for its first reader."""
        operands = tensors_of(reader.operands)
        cotangents = [t for t in operands if t in self.sets.cotangents][:1]
        needed = [t for t in self.made if self.last_reader[t] >= reader.index]
        waiting = list(dict.fromkeys([*cotangents, *needed]))
        given = [self.values[t] for t in (*group.reads, *waiting)]
        passed = lax.optimization_barrier(tuple(given))
        self.values.update(zip(waiting, passed[len(group.reads) :], strict=True))
        self.made = []
        outside = dict(self.values)
        self.values.update(zip(group.reads, passed, strict=False))
        with jax.named_scope(SCOPE):
            super().run_operators(group.operators)
        self.again.update({t: self.values[t] for t in group.makes})
        self.values = outside

    def scan(self, op: Operator, operands: Sequence[Any]) -> list[Any]:
        saved = self.saved.get(op.index, ())
        groups = self.sets.scans.get(op.index, ())
        if not saved and not groups:
            return super().scan(op, operands)
        num_consts, num_carry = op.params["num_consts"], op.params["num_carry"]
        body = self.graph.blocks[op.bodies[0]]
        arrays = [as_array(x) for x in operands]
        consts, init = arrays[:num_consts], arrays[num_consts : num_consts + num_carry]
        slices = arrays[num_consts + num_carry :]
        replaced = {p: t for each in groups for p, t in each.slices.items()}
        given = [x for position, x in enumerate(slices) if position not in replaced]
        forward = [self.forward_slices(each) for each in groups]

        def step(carry: list[Any], sliced: Any) -> tuple[list[Any], Any]:
            given, forward = sliced
            for each, read in zip(groups, forward, strict=True):
                self.enter(each, read)
                with jax.named_scope(SCOPE):
                    self.run_operators(each.group.operators)
            rest = iter(given)
            inputs = [
                as_array(self.values[replaced[p]]) if p in replaced else next(rest)
                for p in range(len(slices))
            ]
            outputs = self.run_block(body, [*consts, *carry, *inputs])
            kept = [as_array(self.values[t]) for t in saved]
            return outputs[:num_carry], (outputs[num_carry:], kept)

        carry, (stacked, kept) = lax.scan(
            step,
            init,
            (given, forward),
            length=op.params["length"],
            reverse=op.params["reverse"],
            unroll=op.params["unroll"],
        )
        for tensor, value in zip(saved, kept, strict=True):
            self.stacked[op.index, tensor] = value
        return [*carry, *stacked]

    def forward_slices(self, scan: ScanGroup) -> dict[int, Any]:
        """What a backward loop reads a slice of, by tensor of the forward body."""
        op, body = scan.forward, self.graph.blocks[scan.forward.bodies[0]]
        first = op.params["num_consts"] + op.params["num_carry"]
        sliced = zip(body.inputs[first:], op.operands[first:], strict=True)
        found = {
            t: as_array(self.value(operand))
            for t, operand in sliced
            if t in scan.group.reads
        }
        returned = body.outputs[op.params["num_carry"] :]
        for tensor in scan.saved:
            if tensor in returned:
                result = stacked_results(op)[returned.index(tensor)]
                found[tensor] = self.values[result]
            else:
                found[tensor] = self.stacked[op.index, tensor]
        return found

    def enter(self, scan: ScanGroup, sliced: Mapping[int, Any]) -> None:
        """Gives the body of a forward loop what one of its iterations began with."""
        op, body = scan.forward, self.graph.blocks[scan.forward.bodies[0]]
        num_consts = op.params["num_consts"]
        consts = zip(body.inputs[:num_consts], op.operands[:num_consts], strict=True)
        for tensor, operand in consts:
            if tensor in scan.group.reads:
                self.values[tensor] = as_array(self.value(operand))
        self.values.update(sliced)


def _saved(graph: OpGraph, sets: RecomputeSets) -> dict[int, tuple[int, ...]]:
    """What each forward loop stacks besides what it returns, by operator."""
    found: dict[int, dict[int, None]] = {}
    for each in (each for groups in sets.scans.values() for each in groups):
        returned = graph.blocks[each.forward.bodies[0]].outputs
        returned = returned[each.forward.params["num_carry"] :]
        new = dict.fromkeys(t for t in each.saved if t not in returned)
        found.setdefault(each.forward.index, {}).update(new)
    return {index: tuple(tensors) for index, tensors in found.items()}


def _last_readers(graph: OpGraph, sets: RecomputeSets) -> dict[int, float]:
    """The index of the operator that reads each cotangent last; inf for results."""
    found = dict.fromkeys(sets.cotangents, -1.0)
    for block in graph.blocks:
        for op in block.operators:
            read = [t for t in tensors_of(op.operands) if t in found]
            found.update(dict.fromkeys(read, float(op.index)))
        found.update({t: inf for t in tensors_of(block.outputs) if t in found})
    return found


def _triggers(graph: OpGraph, sets: RecomputeSets) -> dict[int, list[Group]]:
    """The groups whose residuals an operator is the first to read."""
    found: dict[int, list[Group]] = {}
    for block, groups in sets.groups.items():
        waiting = {t: group for group in groups for t in group.makes}
        for op in Phases.of(graph.blocks[block]).backward:
            for tensor in tensors_of(op.operands):
                group = waiting.get(tensor)
                if group is not None:
                    found.setdefault(op.index, []).append(group)
                    for each in group.makes:
                        del waiting[each]
    return found
