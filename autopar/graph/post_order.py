"""The order in which XLA's passes go through operators.

`HloComputation::MakeInstructionPostOrder`: each comes after all that it reads, the
first operand first.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def post_order(
    starts: np.ndarray, reads: np.ndarray, roots: Iterable[int]
) -> np.ndarray:
    """Rows in their order, beginning at the first of some roots.

    Row k reads what the rows `reads[starts[k] : starts[k + 1]]` make; one that is no
    row, but the number of rows, is passed over.
    """
    bounds, listed = starts.tolist(), reads.tolist()
    count, order = len(bounds) - 1, list[int]()
    is_done = bytearray(count + 1)
    is_done[count] = True
    for root in roots:
        stack = [root]
        while stack:
            k = stack.pop()
            if k < 0:
                order.append(~k)
            elif not is_done[k]:
                is_done[k] = True
                stack.append(~k)
                stack += listed[bounds[k] : bounds[k + 1]][::-1]
    return np.array(order, np.intp)
