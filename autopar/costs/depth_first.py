"""The order in which kernels run: XLA's depth-first one (`DFSMemoryScheduler`).

Instructions are kernels, copies of inputs, and the parts that are got of what a loop or
a barrier returns. An instruction runs after all that it reads, and of that is visited
first what has

    more other readers behind it, then more bytes, then the earlier place

Both sums are over all paths, so in deep programs they reach their caps: the number of
instructions, and the bytes of all instructions that come before in post-order, the
first operand first. What is capped is then visited from the last to the first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from .kernels import KernelBlock

OTHERS = 2  # the tuple of results, and the zero that sums start at


@dataclass(frozen=True, eq=False)
class Instructions:
    """What a block's kernels are as instructions, without parameters.

    Kernels come first, then copies, then parts. Instruction i reads those of
    `operands[starts[i] : starts[i + 1]]`; the block returns `roots`. `bytes` is what
    each makes, `most` how many there are with the parameters. `copied` are the values
    of which copies are made, in their order.
    """

    num_kernels: int
    starts: np.ndarray
    operands: np.ndarray
    roots: np.ndarray
    bytes: np.ndarray
    most: int
    copied: tuple[int, ...]

    @classmethod
    def of(cls, block: KernelBlock, duplicated: Collection[int]) -> Instructions:
        """Those of a block, with a copy of each input in `duplicated`."""
        columns, count = block.columns, len(block.kernels)
        copied = sorted(duplicated)
        node = block.maker.copy()
        num_written = np.diff(columns.write_start)
        is_part = num_written[columns.writers] > 1
        is_part |= np.isin(columns.writes, list(block.passed))
        parts = columns.writes[is_part]
        node[parts] = count + len(copied) + np.arange(len(parts))
        node[copied] = count + np.arange(len(copied))
        reader, value = _through_barriers(block)
        reader, operand = reader[node[value] >= 0], node[value][node[value] >= 0]
        total = count + len(copied) + len(parts)
        sizes = np.zeros(total, np.int64)
        np.add.at(sizes, columns.writers, block.sizes[columns.writes])
        sizes[count : count + len(copied)] = block.sizes[copied]
        reader = np.concatenate([reader, node[parts]])
        operand = np.concatenate([operand, columns.writers[is_part]])
        returned = node[list(block.kept)]
        returned = returned[returned >= 0]
        is_end = np.bincount(operand, minlength=total) == 0
        is_end[returned] = False
        roots = np.concatenate([returned, np.flatnonzero(is_end)]).astype(np.intp)
        num_loops = len(np.unique(columns.writers[is_part]))  # each reads a tuple
        num_inputs = len(np.unique(columns.reads[block.maker[columns.reads] < 0]))
        return cls(
            count,
            np.searchsorted(reader, np.arange(total + 1)),
            operand,
            roots,
            sizes,
            total + num_loops + num_inputs + OTHERS,
            tuple(copied),
        )


@dataclass(frozen=True, eq=False)
class Order:
    """The kernels in their order, and before which of them each input is copied.

    `post` [values] is the place in post-order of what makes each, or its copy; -1 for
    other inputs.
    """

    kernels: tuple[int, ...]
    copied_before: Mapping[int, int]
    post: np.ndarray


def depth_first_order(block: KernelBlock, duplicated: Collection[int]) -> Order:
    """The order in which kernels run, and in which their memory is found."""
    if not len(block.kernels):
        return Order((), {}, np.full(len(block.values), -1))
    found = Instructions.of(block, duplicated)
    post_order = _post_order(found)
    rank = _visited_last(found, post_order)
    # Here instructions go by rank, so that those visited first sort last.
    by_rank, count = np.argsort(rank), len(rank)
    reader = rank.repeat(np.diff(found.starts))
    pairs = np.sort(reader * count + rank[found.operands])
    starts = np.searchsorted(pairs, count * np.arange(count + 1))
    roots = np.sort(rank[found.roots])
    ordered = by_rank[_visited(starts, pairs % count, roots)]
    is_kernel = ordered < found.num_kernels
    kernels = ordered[is_kernel]
    after = np.cumsum(is_kernel)  # how many kernels run up to here
    last = found.num_kernels + len(found.copied)
    is_copy = ~is_kernel & (ordered < last)
    before = np.minimum(after[is_copy], max(len(kernels) - 1, 0))
    copies = (ordered[is_copy] - found.num_kernels).tolist()
    first = {
        found.copied[copy]: int(kernels[place])
        for copy, place in zip(copies, before.tolist(), strict=True)
    }
    place = np.empty(len(rank), np.intp)
    place[post_order] = np.arange(len(rank))
    post = np.where(block.maker < 0, -1, place[block.maker])
    post[list(found.copied)] = place[found.num_kernels : last]
    return Order(tuple(kernels.tolist()), first, post)


def _through_barriers(block: KernelBlock) -> tuple[np.ndarray, np.ndarray]:
    """(kernel, value) of all reads; what has passed a barrier is read behind it."""
    columns = block.columns
    reader, value = columns.readers, columns.reads
    if not block.passed:
        return reader, value
    num_values = len(block.values)
    original = np.full(num_values, -1)
    original[list(block.passed)] = list(block.passed.values())
    is_part = original[value] >= 0
    keys = reader[is_part] * num_values + original[value[is_part]]
    order = np.argsort(keys, kind="stable")
    keys, parts = keys[order], value[is_part][order]
    own = reader * num_values + value
    place = np.minimum(np.searchsorted(keys, own), max(len(keys) - 1, 0))
    is_behind = (keys[place] == own) if len(keys) else np.zeros(len(own), bool)
    is_there = np.zeros(len(keys), bool)
    is_there[place[is_behind]] = True
    taken = np.zeros(len(value), bool)
    taken[np.flatnonzero(is_part)[order]] = is_there
    value = np.where(is_behind, parts[place] if len(keys) else value, value)
    return reader[~taken], value[~taken]


def _visited_last(found: Instructions, post_order: Sequence[int]) -> np.ndarray:
    """[instructions] their places if those to visit last come first."""
    total = len(found.bytes)
    num_readers = np.bincount(found.operands, minlength=total)
    num_readers += np.bincount(np.unique(found.roots), minlength=total)
    extra = np.maximum(num_readers - 1, 0).tolist()
    size, bounds = found.bytes.tolist(), found.starts.tolist()
    operands = found.operands.tolist()
    held, most = 0, found.most
    for k in post_order:
        own = size[k]
        held += own
        behind = extra[k]
        for i in operands[bounds[k] : bounds[k + 1]]:
            behind += extra[i]
            own += size[i]
        extra[k], size[k] = min(behind, most), min(own, held)
    rank = np.empty(total, np.intp)
    rank[np.lexsort((-np.arange(total), size, extra))] = np.arange(total)
    return rank


def _post_order(found: Instructions) -> list[int]:
    """Instructions after what they read, the first operand first."""
    ends = found.starts[:-1] + found.starts[1:] - 1
    mirrored = ends.repeat(np.diff(found.starts)) - np.arange(len(found.operands))
    return _visited(found.starts, found.operands[mirrored], found.roots[::-1])


def _visited(starts: np.ndarray, operands: np.ndarray, roots: np.ndarray) -> list[int]:
    """Instructions after what they read, the last operand first, as of the roots."""
    bounds, reads = starts.tolist(), operands.tolist()
    around = [reads[a:b] for a, b in pairwise(bounds)]
    order, is_done = list[int](), [False] * len(around)
    stack = roots.tolist()
    while stack:
        k = stack.pop()
        if k < 0:
            is_done[~k] = True
            order.append(~k)
        elif not is_done[k]:
            waiting = [i for i in around[k] if not is_done[i]]
            if waiting:
                stack.append(~k)
                stack += waiting
            else:
                is_done[k] = True
                order.append(k)
    return order
