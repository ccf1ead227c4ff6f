"""Sums of scalars of several stages, added up on each stage before they cross.

A global norm is a sum over every parameter. Its addends lie on the stages of their
parameters, in no order; added in groups, each stage sends one number and not hundreds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operand, Operator, OpGraph, Tensor
from ..rules.base import is_inexact

_ADDS = ("add", "add_any")


def sum_by_stage(
    graph: OpGraph, stage_of_operator: Callable[[Operator], int | None]
) -> tuple[OpGraph, dict[int, int]]:
    """The graph with sums of scalars added stage by stage, and the stage of new sums.

    `stage_of_operator` gives the stage of what makes the addends, None if every stage
    can. Values are the same up to rounding.
    """
    block = graph.blocks[0]
    regrouper = _Regrouper(graph, stage_of_operator)
    operators = [new for op in block.operators for new in regrouper.replaced(op)]
    if not regrouper.stage:
        return graph, {}
    blocks = (replace(block, operators=tuple(operators)), *graph.blocks[1:])
    tensors = (*graph.tensors, *regrouper.tensors)
    return replace(graph, tensors=tensors, blocks=blocks), regrouper.stage


@dataclass
class _Regrouper:
    graph: OpGraph
    stage_of_operator: Callable[[Operator], int | None]

    def __post_init__(self) -> None:
        block = self.graph.blocks[0]
        self.made_by = {t: op for op in block.operators for t in op.results}
        self.reader = {t: op for op in block.operators for t in tensors_of(op.operands)}
        reads = [t for op in block.operators for t in tensors_of(op.operands)]
        self.num_reads = Counter([*reads, *tensors_of(block.outputs)])
        self.tensors: list[Tensor] = []
        self.stage: dict[int, int] = {}  # by new operator
        indices = (op.index for op in self.graph.operators())
        self.next_operator = 1 + max(indices, default=-1)
        self.grouped: set[int] = set()  # inner operators of sums that were regrouped
        for op in block.operators:
            if self.is_sum(op) and not self.is_inner(op) and self.groups(op):
                self.grouped.update(inner.index for inner in self.inner(op))

    def replaced(self, op: Operator) -> Iterator[Operator]:
        """What stands for an operator: the sums of each stage and their sum."""
        if op.index in self.grouped:
            return
        groups = self.groups(op) if self.is_sum(op) and not self.is_inner(op) else {}
        if not groups:
            yield op
            return
        totals: list[Operand] = []
        for stage, addends in groups.items():
            if stage is None or len(addends) == 1:
                totals.extend(addends)
                continue
            total = addends[0]
            for addend in addends[1:]:
                new = self.added(op, total, addend)
                self.stage[new.index] = stage
                yield new
                (total,) = new.results
            totals.append(total)
        total = totals[0]
        for addend in totals[1:-1]:
            new = self.added(op, total, addend)
            yield new
            (total,) = new.results
        yield replace(op, operands=(total, totals[-1]))

    def groups(self, op: Operator) -> dict[int | None, list[Operand]]:
        """Addends by stage, if two stages or more have some and one has several."""
        found: dict[int | None, list[Operand]] = {}
        for addend in self.addends(op):
            maker = self.made_by.get(addend) if isinstance(addend, int) else None
            stage = None if maker is None else self.stage_of_operator(maker)
            found.setdefault(stage, []).append(addend)
        of_stages = [addends for stage, addends in found.items() if stage is not None]
        is_worth_it = len(of_stages) > 1 and max(map(len, of_stages)) > 1
        return found if is_worth_it else {}

    def addends(self, op: Operator) -> list[Operand]:
        """What a sum adds up, through the sums that only it reads."""
        found: list[Operand] = []
        waiting = list(reversed(op.operands))
        while waiting:
            operand = waiting.pop()
            maker = self.made_by.get(operand) if isinstance(operand, int) else None
            if maker is not None and self.is_sum(maker) and self.is_inner(maker):
                waiting.extend(reversed(maker.operands))
            else:
                found.append(operand)
        return found

    def inner(self, op: Operator) -> list[Operator]:
        """The sums that only `op` reads, directly or through each other."""
        found: list[Operator] = []
        waiting = [op]
        while waiting:
            for operand in waiting.pop().operands:
                maker = self.made_by.get(operand) if isinstance(operand, int) else None
                if maker is not None and self.is_sum(maker) and self.is_inner(maker):
                    found.append(maker)
                    waiting.append(maker)
        return found

    def is_sum(self, op: Operator) -> bool:
        (kind, *others) = op.result_types or (None,)
        return (
            op.kind in _ADDS
            and kind is not None
            and not others
            and not kind.shape
            and is_inexact(kind)
        )

    def is_inner(self, op: Operator) -> bool:
        """Whether a sum is an addend of another, and of nothing else."""
        (result,) = op.results
        reader = self.reader.get(result)
        return (
            self.num_reads[result] == 1 and reader is not None and self.is_sum(reader)
        )

    def added(self, like: Operator, left: Operand, right: Operand) -> Operator:
        """A new sum of two scalars."""
        index = len(self.graph.tensors) + len(self.tensors)
        name = f"{like.name}+{len(self.tensors)}"
        self.tensors.append(Tensor(index, name, like.result_types[0], like.block))
        self.next_operator += 1
        return replace(
            like,
            index=self.next_operator - 1,
            name=name,
            operands=(left, right),
            results=(index,),
        )
