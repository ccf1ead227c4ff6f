"""Loops that carry a count of examples beside heavy work, taken apart into two.

A chunked loss carries the sum of losses and the number of tokens that count. The number
divides the gradients of every microbatch, so it is made before the loop over them, from
the whole batch: a scan of its own makes that cheap.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ..graph.build_graph import SCAN, build_graph
from ..graph.dependencies import leading_to, made_from, read_by, tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..graph.traced_function import Roles, TracedFunction
from ..graph.work import holds_heavy_work
from ..microbatches.retracing import WholeRunner


def with_counts_apart(
    traced: TracedFunction, graph: OpGraph, roles: Roles, batch: Sequence[int]
) -> tuple[TracedFunction, OpGraph]:
    """`traced` and its `graph`, with scans of their own for light carries.

    `batch` are its inputs that hold examples; what is carried of others stays.
    """
    counts = _counts(graph, batch)
    if not counts:
        return traced, graph

    apart = _CountingRunner(graph, counts).retraced(traced)
    return apart, build_graph(apart, roles)


class _CountingRunner(WholeRunner):
    """Runs a scan twice, once for its counts; what neither returns is dead code."""

    def __init__(self, graph: OpGraph, counts: dict[int, set[int]]) -> None:
        super().__init__(graph)
        self.counts = counts

    def scan(self, op: Operator, operands: Sequence[Any]) -> list[Any]:
        results = super().scan(op, operands)
        counts = self.counts.get(op.index)
        if counts:
            again = super().scan(op, operands)
            results = [again[i] if i in counts else r for i, r in enumerate(results)]
        return results


def _counts(graph: OpGraph, batch: Sequence[int]) -> dict[int, set[int]]:
    """The carries that are counts, by scan of the outermost block."""
    operators, found = graph.blocks[0].operators, dict[int, set[int]]()
    of_batch = made_from(batch, operators)
    for op in operators:
        if op.kind == SCAN and not op.eqn.effects and holds_heavy_work(graph, op):
            carries = range(op.params["num_carry"])
            counts = {i for i in carries if _is_count(graph, op, i, of_batch)}
            found.update({op.index: counts} if counts else {})
    return found


def _is_count(
    graph: OpGraph, op: Operator, carry: int, of_batch: Collection[int]
) -> bool:
    """Whether a carry is made of examples without heavy work."""
    (block,) = (graph.blocks[body] for body in op.bodies)
    first = op.params["num_consts"]
    inputs = {tensor: i for i, tensor in enumerate(block.inputs)}
    carries, operators, reads = {carry}, (), set[int]()
    while True:
        outputs = tensors_of(block.outputs[i] for i in carries)
        operators = leading_to(outputs, block.operators)
        reads = {inputs[t] for t in (*read_by(operators), *outputs) if t in inputs}
        reached = carries | {
            i - first for i in reads if 0 <= i - first < op.params["num_carry"]
        }
        if reached == carries:
            break
        carries = reached
    return (
        any(op.operands[i] in of_batch for i in reads)
        and bool(operators)
        and not any(holds_heavy_work(graph, each) for each in operators)
    )
