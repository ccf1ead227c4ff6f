"""What the operators of a block and its results read, and what is converted for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph.op_graph import Block
from ..plans.plan_columns import copies_of
from .plan_arrays import PlanArrays


class BlockReads:
    """The reads of a block's rows, then those of what it returns.

    `row`, `tensor` and `spec` [reads], the last a place in `arrays.specs`; row k reads
    those from `start[k]` on, the row behind the last one what is returned. `returned`
    [outputs] tells which are no literals. `conversions` are (row, tensor, spec, the
    conversion that it is made of or -1) in the order in which they are first needed;
    `converted` [reads] is the one that is read, or -1.
    """

    def __init__(self, arrays: PlanArrays, block: Block, rows: slice) -> None:
        columns, count = arrays.columns, rows.stop - rows.start
        chosen = slice(*columns.operand_start[[rows.start, rows.stop]])
        operands = columns.operands[chosen]
        is_tensor = operands >= 0
        specs = arrays.plan.outputs[block.index]
        self.returned = [isinstance(each, int) for each in block.outputs]
        outputs = [each for each in block.outputs if isinstance(each, int)]
        wanted = [
            arrays.number_of[spec]
            for spec, is_read in zip(specs, self.returned, strict=True)
            if is_read
        ]

        def joined(own: np.ndarray, of_outputs: Sequence[int]) -> np.ndarray:
            return np.concatenate([own[is_tensor], np.array(of_outputs, np.intp)])

        own = columns.rows_of_operands[chosen] - rows.start
        self.row = joined(own, [count] * len(outputs))
        self.tensor = joined(operands, outputs)
        self.spec = joined(arrays.read[chosen], wanted)
        self.start = np.searchsorted(self.row, np.arange(count + 2))
        self._arrays, self._known = arrays, dict[tuple[int, int], int]()
        self.conversions = list[tuple[int, int, int, int]]()
        self._find_conversions()

    def _find_conversions(self) -> None:
        made = self._arrays.made[self.tensor]
        self.converted = np.full(len(made), -1)
        self._copies = copies_of(self._arrays.plan.tensors)
        at = np.flatnonzero(self.spec != made)
        found = (self.tensor[at], self.spec[at], self.row[at])
        self.converted[at] = [
            self._converted(*each)
            for each in zip(*map(np.ndarray.tolist, found), strict=True)
        ]

    def _converted(self, tensor: int, spec: int, row: int) -> int:
        if (tensor, spec) not in self._known:
            arrays = self._arrays
            copies, wanted = self._copies[tensor], arrays.specs[spec]
            source = next(c.source for c in copies if c.target == wanted)
            number, before = arrays.number_of[source], -1
            if number != arrays.made[tensor]:
                before = self._converted(tensor, number, row)
            self._known[tensor, spec] = len(self.conversions)
            self.conversions.append((row, tensor, spec, before))
        return self._known[tensor, spec]
