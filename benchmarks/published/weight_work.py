"""Which work of a backward pass only gradients wait for: what zero bubble puts off.

An operator is weight work if all that its results reach lies in its own unit and ends
in a sum of gradients; what another unit or the next layer reads is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.graph.build_graph import SCAN
from autopar.graph.op_graph import Operator, OpGraph


def weight_tensors(
    graph: OpGraph, loop: Operator, unit_of: Mapping[int, int]
) -> frozenset[int]:
    """Results of the weight work of a loop over microbatches.

    Forward work that only weight work reads is among them: a caller knows its phase.

    Args:
      loop: the scan over microbatches, which carries the sums of gradients.
      unit_of: the unit of each tensor.
    """
    found: set[int] = set()
    _visit(graph, loop.bodies[0], (), unit_of, found)
    return frozenset(found)


def _visit(
    graph: OpGraph,
    index: int,
    leaving: Iterable[int],
    unit_of: Mapping[int, int],
    found: set[int],
) -> None:
    """Adds those of a block, of whose outputs those at `leaving` are read elsewhere.

    In the body of a loop over layers, what the next layer reads is a carry; outside of
    one, what another unit reads is known by its unit.
    """
    block = graph.blocks[index]
    awaited = {block.outputs[position] for position in leaving}
    returned = set(block.outputs)
    for op in reversed(block.operators):
        operands = [each for each in op.operands if isinstance(each, int)]
        if op.kind == SCAN:
            carried = set(range(op.params["num_carry"]))
            read = {k for k, result in enumerate(op.results) if result in awaited}
            _visit(graph, op.bodies[0], carried | read, {}, found)
            awaited.update(operands)
            continue
        is_awaited = bool(op.bodies) or any(result in awaited for result in op.results)
        if not is_awaited:
            found.update(op.results)
        if set(op.results) <= returned and not is_awaited:
            continue  # a sum of gradients
        units = {unit_of[each] for each in op.results if each in unit_of}
        awaited.update(
            operand
            for operand in operands
            if is_awaited or (units and unit_of.get(operand) not in {None, *units})
        )
