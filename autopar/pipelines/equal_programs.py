"""Equal programs are planned once: what makes two graphs equal, and a plan renamed.

Two graphs are equal if they differ in names alone: in those of tensors and operators,
in paths of arguments and in source lines.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from ..graph.op_graph import Constant, Operand, OpGraph, params_key
from ..plans.plan import ShardingPlan


def fingerprint(graph: OpGraph) -> Hashable:
    """Equal for graphs that are equal but for names."""
    return (
        tuple((t.type, t.block) for t in graph.tensors),
        tuple(replace(i, path="") for i in graph.inputs),
        tuple(
            (
                (block.parent, block.trip_count, block.weight, block.conditional),
                block.unbounded,
                block.inputs,
                tuple(map(operand_key, block.outputs)),
                tuple(
                    (
                        *(op.kind, params_key(op.params), op.results, op.bodies),
                        tuple(map(operand_key, op.operands)),
                    )
                    for op in block.operators
                ),
            )
            for block in graph.blocks
        ),
    )


def renamed(plan: ShardingPlan, graph: OpGraph) -> ShardingPlan:
    """The plan of an equal graph, with the names of this one."""
    operators = graph.operators()
    sources: dict[str, str] = {}
    made_by = {t: op.source for op in operators for t in op.results}
    old_by = {
        t: each.source
        for op, each in zip(operators, plan.operators, strict=True)
        for t in op.results
    }
    for index, (tensor, old) in enumerate(
        zip(graph.tensors, plan.tensors, strict=True)
    ):
        before = f"{old.name} {old_by.get(index, '')}".strip()
        sources[before] = f"{tensor.name} {made_by.get(index, '')}".strip()
    return replace(
        plan,
        function=graph.name,
        inputs=tuple(
            replace(each, path=own.path)
            for each, own in zip(plan.inputs, graph.inputs, strict=True)
        ),
        operators=tuple(
            replace(each, name=op.name, source=op.source)
            for each, op in zip(plan.operators, operators, strict=True)
        ),
        tensors=tuple(
            replace(each, name=own.name)
            for each, own in zip(plan.tensors, graph.tensors, strict=True)
        ),
        collectives=tuple(
            replace(each, source=sources.get(each.source, each.source))
            for each in plan.collectives
        ),
    )


def operand_key(operand: Operand) -> Hashable:
    """The number of a tensor; equal for equal literals."""
    if not isinstance(operand, Constant):
        return operand
    value = operand.value
    whole = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return operand.type, repr(whole)
