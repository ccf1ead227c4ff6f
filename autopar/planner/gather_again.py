"""Parameters that the backward pass may gather again, instead of keeping them whole.

A barrier is put between a parameter and its backward readers. It changes no value and
costs nothing, but it is a tensor with a spec of its own: split, so that what was
gathered for the forward pass is dropped and gathered again, or whole, so that it is
kept. Where a plan has such a barrier, compilers join no two gathers around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ..graph.build_graph import BARRIER, SCAN
from ..graph.op_graph import Block, Operand, Operator, OpGraph, Tensor
from ..graph.paired_operators import GATHERED_AGAIN
from ..graph.work import accumulation_dtype
from ..plans.plan import ShardingPlan
from ..sharding.state_flow import Flow

_BACKWARD = "transpose("  # how jax.grad names what it transposes


def gathering_again(graph: OpGraph) -> OpGraph:
    """The graph with a barrier before the backward readers of each parameter.

    Parameters are what is made of state and no example, floating, and read by both
    passes of one block: unrolled layers, or a loop's constants. What a loop over layers
    slices is gathered in each of its iterations anyway. A graph that has its barriers,
    or needs none, is returned as it is.
    """
    if _is_gathering_again(op.name for op in graph.operators()):
        return graph
    builder = _Builder(graph)
    blocks = tuple(map(builder.block, graph.blocks))
    if len(builder.tensors) == len(graph.tensors):
        return graph
    changed = replace(graph, tensors=tuple(builder.tensors), blocks=blocks)
    changed.verify()
    return changed


def graph_of_plan(graph: OpGraph, plan: ShardingPlan) -> OpGraph:
    """The graph that a plan is of: with barriers, if the plan has them."""
    if _is_gathering_again(op.name for op in plan.operators):
        return gathering_again(graph)
    return graph


def _is_gathering_again(names: Iterator[str]) -> bool:
    return any(name.startswith(GATHERED_AGAIN) for name in names)


class _Builder:
    def __init__(self, graph: OpGraph) -> None:
        self.tensors = list(graph.tensors)
        self.next_index = 1 + max((op.index for op in graph.operators()), default=0)
        inputs, flow = graph.inputs, Flow(graph)
        of_state = flow.made_of([i.tensor for i in inputs if i.role == "state"])
        others = [i.tensor for i in inputs if i.role not in ("state", "constant")]
        self.parameters = {
            tensor
            for tensor in of_state - flow.made_of(others)
            if _is_float(graph.tensors[tensor])
        }

    def block(self, block: Block) -> Block:
        """A block with its barriers, each right before the first that reads it."""
        forward, backward = _reads_by_phase(block, self.parameters)
        again: dict[int, int] = {}
        operators: list[Operator] = []
        for op in block.operators:
            if op.index in backward:
                for tensor in sorted(backward[op.index] & forward):
                    if tensor not in again:
                        operators.append(self.barrier(tensor, op))
                        again[tensor] = operators[-1].results[0]
                operands = tuple(
                    again.get(o, o) if isinstance(o, int) else o for o in op.operands
                )
                op = replace(op, operands=operands)
            operators.append(op)
        return replace(block, operators=tuple(operators))

    def barrier(self, tensor: int, reader: Operator) -> Operator:
        source = self.tensors[tensor]
        name = f"{GATHERED_AGAIN}{source.name}"
        result = len(self.tensors)
        self.tensors.append(Tensor(result, name, source.type, source.block))
        self.next_index += 1
        return Operator(
            index=self.next_index - 1,
            name=name,
            kind=BARRIER,
            params={},
            operands=(tensor,),
            results=(result,),
            operand_types=(source.type,),
            result_types=(source.type,),
            block=source.block,
            eqn=reader.eqn,
            source=reader.source,
        )


def _reads_by_phase(
    block: Block, parameters: set[int]
) -> tuple[set[int], dict[int, set[int]]]:
    """The parameters that forward operators read, and those of each backward one.

    Barriers of the user's remat, which gather again by themselves, are neither; nor is
    the update, which reads what the backward pass made.
    """
    forward: set[int] = set()
    backward: dict[int, set[int]] = {}
    later: set[int] = set()
    for op in block.operators:
        read = {o for o in op.operands if isinstance(o, int)}
        used = {o for o in _whole_operands(op) if isinstance(o, int)} & parameters
        if _BACKWARD in op.name:
            if op.kind != BARRIER:
                backward[op.index] = used
        elif later.isdisjoint(read):
            forward |= used
            continue
        later.update(op.results)
    return forward, backward


def _whole_operands(op: Operator) -> tuple[Operand, ...]:
    """What an operator reads, but for what a loop reads a slice at a time."""
    if op.kind != SCAN:
        return op.operands
    return op.operands[: op.params["num_consts"] + op.params["num_carry"]]


def _is_float(tensor: Tensor) -> bool:
    kind = tensor.type
    if kind.is_extended or not kind.rank:
        return False
    return bool(np.issubdtype(accumulation_dtype(kind), np.floating))
