"""The order in which one accelerator runs kernels: of three, the one of least memory.

XLA's `DefaultMemoryScheduler`, which its compiler for GPUs uses: the depth-first order,
post-order, and that of `ListMemoryScheduler`, which of all that is ready runs next what
frees the most and makes the least. A program with collectives is ordered again, to hide
their time, by a scheduler that has no model here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from .depth_first import Order, depth_first, depth_first_order, order_of
from .instructions import Instructions
from .kernels import KernelBlock


def possible_orders(block: KernelBlock, duplicated: Collection[int]) -> Iterator[Order]:
    """The orders that the compiler chooses from.

    The last is left out where kernels include what others read, as in deep programs.
    """
    if not len(block.kernels):
        yield depth_first_order(block, duplicated)
        return
    found = Instructions.of(block, duplicated)
    post_order, ordered = depth_first(found)
    yield order_of(block, found, post_order, ordered)
    yield order_of(block, found, post_order, post_order)
    if not found.includes:
        yield order_of(block, found, post_order, _listed(found))


def _listed(found: Instructions) -> np.ndarray:
    """Instructions as a list scheduler runs them: what leaves the least first."""
    count, size = len(found.bytes), found.bytes.tolist()
    starts, operands = found.starts.tolist(), found.operands.tolist()
    reads = [sorted(set(operands[a:b])) for a, b in pairwise(starts)]
    readers = [list[int]() for _ in range(count)]
    for k, own in enumerate(reads):
        for i in own:
            readers[i].append(k)
    left = [len(each) for each in readers]  # that have not run
    for k in found.roots.tolist():
        left[k] += 1
    waits = [len(own) for own in reads]

    def priority(k: int) -> tuple[int, int]:
        freed = sum([size[i] for i in reads[k] if left[i] == 1])
        return size[k] - freed, -len(readers[k])

    now = list[tuple[int, int] | None]([None]) * count
    ready, number = list[tuple[tuple[int, int], int, int]](), 0
    order, is_done = list[int](), bytearray(count)
    changed = [k for k in range(count) if not waits[k]]
    while changed or ready:
        for k in changed:
            if (found_now := priority(k)) != now[k]:
                now[k], number = found_now, number + 1
                heappush(ready, (found_now, -number, k))
        known, _, k = heappop(ready)
        changed = []
        if is_done[k] or known != now[k]:
            continue
        is_done[k] = True
        order.append(k)
        for i in reads[k]:
            left[i] -= 1
            if left[i] == 1:
                changed += [j for j in readers[i] if not is_done[j] and not waits[j]]
        for j in readers[k]:
            waits[j] -= 1
            if not waits[j]:
                changed.append(j)
    return np.array(order, np.intp)
