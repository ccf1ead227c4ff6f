"""What the body of a scan does with its carries and slices."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..graph.build_graph import STRUCTURED
from ..graph.dependencies import tensors_of
from ..graph.op_graph import Block, Operand, Operator, OpGraph
from ..planner.strategies import is_heavy_operator
from ..rules.elementwise import is_zero


def accumulating_carries(graph: OpGraph, op: Operator) -> frozenset[int]:
    """Carries of a scan that start at zero and that an iteration only adds to.

    Each piece of the scan may start such a sum at zero, and the sums are added.
    """
    made_by = {t: o for o in graph.blocks[op.block].operators for t in o.results}
    body = graph.blocks[op.bodies[0]]
    first = op.params["num_consts"]
    return frozenset(
        i
        for i in range(op.params["num_carry"])
        if _starts_at_zero(op.operands[first + i], made_by)
        and _is_added_to(body.inputs[first + i], i, op, graph)
    )


def _starts_at_zero(operand: Operand, made_by: Mapping[int, Operator]) -> bool:
    maker = made_by.get(operand) if isinstance(operand, int) else None
    if maker is not None and maker.kind == "broadcast_in_dim":
        return is_zero(maker.operands[0])
    return is_zero(operand)


def _is_added_to(tensor: int, carry: int, op: Operator, graph: OpGraph) -> bool:
    """Whether a carry reaches its next value through sums, and nothing else."""
    body = graph.blocks[op.bodies[0]]
    while True:
        readers = [o for o in body.operators for t in o.operands if t == tensor]
        returned = [i for i, t in enumerate(body.outputs) if t == tensor]
        if not readers:
            return returned == [carry]
        if returned or len(readers) > 1 or readers[0].kind not in ("add", "add_any"):
            return False
        (tensor,) = readers[0].results


def unchanged_carries(graph: OpGraph, op: Operator) -> frozenset[int]:
    """Carries that every iteration hands on as they are."""
    body, first = graph.blocks[op.bodies[0]], op.params["num_consts"]
    return frozenset(
        i
        for i in range(op.params["num_carry"])
        if body.outputs[i] == body.inputs[first + i]
    )


def light_makers(body: Block, slices: Collection[int]) -> dict[int, Operator]:
    """Operators of a body that are no products and read its `slices` alone, by result.

    In executed order; what they make of a slice does not depend on other iterations.
    """
    known, makers = set(slices), {}
    for op in body.operators:
        is_light = op.kind not in STRUCTURED and not is_heavy_operator(op)
        if (
            is_light
            and op.kind != "random_bits"
            and known.issuperset(tensors_of(op.operands))
        ):
            known.update(op.results)
            makers.update(dict.fromkeys(op.results, op))
    return makers
