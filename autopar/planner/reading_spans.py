"""From when to when the kernels of a plan need each tensor, whatever is in memory.

An operator whose result is not in memory is done again inside everyone who reads that,
so what it reads is needed until then. So it is told of every tensor where a copy of it
would be read, also of those that the plan holds no copy of.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from ..costs.execution_order import Liveness
from ..graph.build_graph import BARRIER
from ..graph.op_graph import Block
from .held_values import tensors_of


@dataclass(frozen=True, eq=False)
class ReadingSpans:
    """First and last positions [tensors] at which each is needed; none if last is -1.

    `in_memory` (bool [tensors]) are those that the block writes to memory as they are
    made. What passes a barrier is another tensor behind it, whose readers are its own.
    """

    first: np.ndarray
    last: np.ndarray
    in_memory: np.ndarray


def reading_spans(
    block: Block,
    liveness: Liveness,
    num_tensors: int,
    reads_less: Collection[int],
) -> ReadingSpans:
    """When the operators of a block are done, and so read.

    Args:
      block: of the graph.
      liveness: of its kernels under the plan.
      num_tensors: of the graph.
      reads_less: keys (`held_values.reading_less`) of operators that read too little of
        a tensor to need a copy; what replaces an argument needs none either.
    """
    kernels = liveness.block
    never = len(liveness.order)
    position = np.empty(never, np.intp)
    position[list(liveness.order)] = np.arange(never)
    tensor, is_copy = tensors_of(kernels.values)
    is_own = (kernels.maker >= 0) & (tensor >= 0) & (tensor < num_tensors)
    at = np.full(len(tensor), -1)
    at[is_own] = position[kernels.maker[is_own]]
    made = np.full(num_tensors + 1, -1)
    made[tensor[is_own & ~is_copy]] = at[is_own & ~is_copy]
    first, last = np.full(num_tensors, never), np.full(num_tensors, -1)
    np.minimum.at(first, tensor[is_own & is_copy], at[is_own & is_copy])
    np.maximum.at(last, tensor[is_own & is_copy], at[is_own & is_copy])
    replaced = {
        int(tensor[old]): int(at[new])
        for old, new in kernels.replaced
        if is_own[new] and tensor[old] >= 0
    }
    earliest, latest, written = first.tolist(), last.tolist(), made.tolist()
    too_little = set(reads_less)
    for op in reversed(block.operators):
        if op.kind == BARRIER:
            continue
        low, high = never, -1
        for result in op.results:
            if written[result] >= 0:
                low, high = min(low, written[result]), max(high, written[result])
            else:
                low, high = min(low, earliest[result]), max(high, latest[result])
        for each in op.operands:
            if not isinstance(each, int) or replaced.get(each, -1) == low == high:
                continue
            if op.index * (num_tensors + 1) + each in too_little:
                continue
            earliest[each] = min(earliest[each], low)
            latest[each] = max(latest[each], high)
    return ReadingSpans(np.array(earliest), np.array(latest), made[:-1] >= 0)
