"""Programs (`rules/score_programs.py`) from the operators of a region of scores."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.dependencies import read_by, tensors_of
from ..graph.op_graph import Constant, Operator
from ..rules.score_programs import Labels, Program, Ref, Step
from .score_regions import ALLOWED, REDUCTIONS, BlockFlow, Dims, NotAttention, Region


class ProgramBuilder:
    """Cuts programs out of a region.

    What a region reads is a side; of one that was broadcast it is what is smaller, and
    what is made of literals alone is no side.
    """

    def __init__(self, flow: BlockFlow, region: Region, dims: Dims) -> None:
        self.flow, self.region, self.dims = flow, region, dims
        self._made = {t: op for op in region.operators for t in op.results}
        self._side_labels: dict[int, Labels] = {}
        self._small: dict[int, Operator] = {}
        for tensor in region.sides():
            self._add_side(tensor, dims.labels(tensor))

    def labels_of(self, tensor: int) -> Labels:
        """The dims of the scores that a tensor has."""
        if tensor in self._side_labels:
            return self._side_labels[tensor]
        return self.dims.labels(tensor)

    def steps(self, start: int, end: int) -> tuple[Operator, ...]:
        """The operators that lead from `start` to `end`, elementwise all of them.

        Raises:
          NotAttention: they read other scores or reduce them.
        """
        found: dict[int, Operator] = {}
        waiting = [end] if end != start else []
        while waiting:
            tensor = waiting.pop()
            op = self._made.get(tensor) or self._small.get(tensor)
            if op is None:
                if tensor in self.region.inside:
                    raise NotAttention("it is more than a softmax of its scores")
                continue
            if op.index in found:
                continue
            if op.kind in REDUCTIONS:
                raise NotAttention("it is more than a softmax of its scores")
            found[op.index] = op
            waiting += [t for t in tensors_of(op.operands) if t != start]
        position = self.flow.position
        return tuple(sorted(found.values(), key=lambda op: position[op.index]))

    def all_steps(self) -> tuple[Operator, ...]:
        """Everything that the region does."""
        position = self.flow.position
        both = (*self._small.values(), *self.region.operators)
        return tuple(sorted(both, key=lambda op: position[op.index]))

    def sides_of(self, steps: Sequence[Operator]) -> tuple[int, ...]:
        """What operators read from outside of the region."""
        read = read_by(steps)
        return tuple(dict.fromkeys(t for t in read if self._is_outside(t)))

    def program(
        self, steps: Sequence[Operator], start: int, end: int, sides: Sequence[int]
    ) -> Program:
        """`steps` from `start` to `end`, given the sides of a program or more."""
        number = self.numbers(steps, start, sides)
        made = []
        for op in steps:
            refs: list[Ref] = [
                o if isinstance(o, Constant) else number[o] for o in op.operands
            ]
            made.append(Step.of(op, refs, self.labels_of(op.results[0])))
        return Program(len(sides), tuple(made), number[end])

    def numbers(
        self, steps: Sequence[Operator], start: int, sides: Sequence[int]
    ) -> dict[int, int]:
        """The number of each tensor in a program's values."""
        order = (start, *sides, *(op.results[0] for op in steps))
        return {tensor: number for number, tensor in enumerate(order)}

    def _is_outside(self, tensor: int) -> bool:
        return tensor not in self.region.inside and tensor not in self._small

    def _add_side(self, tensor: int, labels: Labels) -> None:
        self._side_labels[tensor] = labels
        op = self.flow.maker.get(tensor)
        if op is None or op.kind not in ALLOWED:
            return
        operand = op.operands[0]
        if not tensors_of(op.operands):
            self._small[tensor] = op
        if op.kind != "broadcast_in_dim" or isinstance(operand, Constant):
            return
        if op.operand_types[0].size == op.result_types[0].size:
            return
        self._small[tensor] = op
        dims = op.params["broadcast_dimensions"]
        shape, result = op.operand_types[0].shape, op.result_types[0].shape
        self._add_side(
            operand,
            tuple(
                labels[dims[i]] if size == result[dims[i]] else None
                for i, size in enumerate(shape)
            ),
        )
