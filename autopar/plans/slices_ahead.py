"""Loops that gather a slice one iteration before they use it, as their plan says.

Such a loop has a barrier `ahead/next/...` at the last product of its body: behind it
are the slices of the next iteration that its first two products read gathered. They are
carried from iteration to iteration, and the last iteration stands behind the loop, so
that nothing is gathered once more.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..graph.op_graph import Block, Operator, OpGraph
from ..sharding.spec import Spec, is_coarser, num_shards
from .plan import ShardingPlan

AHEAD = "ahead/"
NEXT = f"{AHEAD}next/"


@dataclass(frozen=True)
class SliceAhead:
    """A slice of a loop: its position among the loop's operands, and its copy."""

    position: int
    tensor: int
    spec: Spec


def slices_ahead(
    graph: OpGraph, plan: ShardingPlan, scan: Operator
) -> tuple[SliceAhead, ...]:
    """The slices that a loop gathers ahead; none if its plan does not say so."""
    body = graph.blocks[scan.bodies[0]]
    if not is_ahead(body):
        return ()
    first = scan.params["num_consts"] + scan.params["num_carry"]
    found = []
    for position in range(first, len(body.inputs)):
        tensor = body.inputs[position]
        made, copies = plan.tensors[tensor].spec, plan.tensors[tensor].conversions
        sizes = plan.mesh.axis_sizes
        if len(copies) == 1 and is_coarser(copies[0].target, made, sizes):
            found.append(SliceAhead(position, tensor, copies[0].target))
    return tuple(found)


def is_ahead(body: Block) -> bool:
    """Whether a block is the body of such a loop."""
    return any(op.name.startswith(NEXT) for op in body.operators)


def bytes_ahead(graph: OpGraph, plan: ShardingPlan, scan: Operator) -> int:
    """Bytes on one device that a loop holds besides: slices of two iterations.

    Those of this one stay where they came in, also before and behind their readers.
    """
    return 2 * sum(
        graph.tensors[each.tensor].type.bytes
        // num_shards(each.spec, plan.mesh.axis_sizes)
        for each in slices_ahead(graph, plan, scan)
    )
