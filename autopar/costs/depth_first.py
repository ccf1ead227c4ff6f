"""The order in which kernels run: XLA's depth-first one (`DFSMemoryScheduler`).

An instruction (`instructions.py`) runs after all that it reads, and of that is visited
first what has

    more other readers behind it, then more bytes, then the earlier place

Both sums are over all paths, so in deep programs they reach their caps: the number of
instructions, and the bytes of all instructions that come before in post-order, the
first operand first. What is capped is then visited from the last to the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

import numpy as np

from .instructions import Instructions
from .kernels import MANY_READS, KernelBlock
from .names import roots
from .segments import entries_of


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
    return order_of(block, found, *depth_first(found))


def depth_first(found: Instructions) -> tuple[np.ndarray, np.ndarray]:
    """Instructions in post-order, and in the depth-first order."""
    lines = _Lines.of(found)
    post_order, ordered = map(lines.each, _orders(lines.joined(found)))
    return post_order, ordered


def order_of(
    block: KernelBlock, found: Instructions, post_order: np.ndarray, ordered: np.ndarray
) -> Order:
    """The order of a block's kernels where its instructions run as `ordered`."""
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
    place = np.empty(len(post_order), np.intp)
    place[post_order] = np.arange(len(post_order))
    post = np.where(block.maker < 0, -1, place[block.maker])
    post[list(found.copied)] = place[found.num_kernels : last]
    return Order(tuple(kernels.tolist()), first, post)


def _orders(found: Instructions) -> tuple[np.ndarray, np.ndarray]:
    """Instructions in post-order, and in the order in which they run."""
    mirrored = _Reads.mirrored(found)
    post_order = _visited(mirrored, found.roots[::-1])  # the first operand first
    rank = _visited_last(found, mirrored, post_order)
    # Here instructions go by rank, so that those visited first sort last.
    by_rank, count = np.argsort(rank), len(rank)
    reader = rank.repeat(np.diff(found.starts))
    pairs = np.sort(reader * count + rank[found.operands])
    starts = np.searchsorted(pairs, count * np.arange(count + 1))
    items = found.includes.items()
    includes = {int(rank[k]): (int(rank[o]), 0) for k, (o, _) in items}
    reads = _Reads(starts, pairs % count, includes, is_sorted=True)
    ordered = by_rank[_visited(reads, np.sort(rank[found.roots]))]
    return np.array(post_order, np.intp), ordered


@dataclass(frozen=True, eq=False)
class _Lines:
    """Lines of instructions that run one right after the other in every order.

    Each of a line but the first reads only the one before, which nothing else reads.
    `line` [instructions] numbers them by their last; `order` has all instructions, line
    by line, those of line k from `starts[k]` on.
    """

    line: np.ndarray
    order: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, found: Instructions) -> _Lines:
        """Those of a block's instructions."""
        count, operands = len(found.bytes), found.operands
        reader = np.arange(count).repeat(np.diff(found.starts))
        is_end = np.bincount(operands, minlength=count) != 1
        is_end[found.roots] = True
        begins = np.diff(found.starts) != 1
        linked = [*found.includes, *(other for other, _ in found.includes.values())]
        is_end[linked] = begins[linked] = True
        follows = ~begins[reader] & ~is_end[operands]
        following = np.arange(count)
        following[operands[follows]] = reader[follows]
        last = roots(following)
        line = (np.cumsum(following == np.arange(count)) - 1)[last]
        step = (following != np.arange(count)).astype(np.intp)  # how many are behind
        while (further := following[following] != following).any():
            step[further] += step[following[further]]
            following = following[following]
        order = np.lexsort((-step, line))
        return cls(line, order, np.searchsorted(line[order], np.arange(line.max() + 2)))

    def each(self, lines: np.ndarray) -> np.ndarray:
        """All instructions of some lines, which come one after the other."""
        return self.order[entries_of(self.starts, lines)[1]]

    def joined(self, found: Instructions) -> Instructions:
        """Lines as instructions: they read what their first does."""
        line, firsts = self.line, self.order[self.starts[:-1]]
        items = found.includes.items()
        at = entries_of(found.starts, firsts)[1]
        counts = found.starts[firsts + 1] - found.starts[firsts]
        return replace(
            found,
            starts=np.concatenate([[0], np.cumsum(counts)]),
            operands=line[found.operands[at]],
            includes={int(line[k]): (int(line[o]), n) for k, (o, n) in items},
            roots=line[found.roots],
            bytes=np.bincount(line, found.bytes).astype(np.int64),
        )


def _visited_last(
    found: Instructions, reads: _Reads, post_order: Sequence[int]
) -> np.ndarray:
    """[instructions] their places if those to visit last come first."""
    total, around, included = len(found.bytes), reads.around, reads.included
    extra = np.maximum(found.num_readers() - 1, 0).tolist()
    size = found.bytes.astype(float).tolist()  # integers, added quickly
    sums = dict[int, tuple[int, float]]()  # of all that is read by what others include
    held, most = 0.0, found.most
    for k in post_order:
        held += size[k]
        behind, made, read = 0, 0.0, around[k]
        if k in included:
            behind, made = reads.sums_of(included[k], sums, extra, size)
        for i in read:
            behind += extra[i]
            made += size[i]
        behind += extra[k]
        made += size[k]
        extra[k] = behind if behind < most else most
        size[k] = made if made < held else held
    rank = np.empty(total, np.intp)
    rank[np.lexsort((-np.arange(total), size, extra))] = np.arange(total)
    return rank


class _Reads:
    """What instructions read: `around` what each has `included`, if it has that."""

    def __init__(
        self,
        starts: np.ndarray,
        operands: np.ndarray,
        includes: Mapping[int, tuple[int, int]],
        *,
        is_sorted: bool = False,
    ) -> None:
        listed = operands.tolist()
        self.around = [listed[a:b] for a, b in pairwise(starts.tolist())]
        self.included = {k: other for k, (other, _) in includes.items()}
        self._before = {k: place for k, (_, place) in includes.items()}
        self._is_sorted = is_sorted
        self._whole: dict[int, np.ndarray] = {}

    @classmethod
    def mirrored(cls, found: Instructions) -> _Reads:
        """Those of instructions, the last operand first."""
        ends = found.starts[:-1] + found.starts[1:] - 1
        mirrored = ends.repeat(np.diff(found.starts)) - np.arange(len(found.operands))
        counts = np.diff(found.starts).tolist()
        items = found.includes.items()
        includes = {k: (other, counts[k] - before) for k, (other, before) in items}
        return cls(found.starts, found.operands[mirrored], includes)

    def whole(self, k: int) -> np.ndarray:
        """All that k reads, in order."""
        new = takewhile(lambda each: each not in self._whole, self._line(k))
        for each in reversed(list(new)):
            own = np.array(self.around[each], np.intp)
            others = self._whole.get(self.included.get(each, -1), own[:0])
            place = self._before.get(each, 0)
            self._whole[each] = np.concatenate([own[:place], others, own[place:]])
        return np.sort(self._whole[k]) if self._is_sorted else self._whole[k]

    def _line(self, k: int) -> Iterator[int]:
        """An instruction, what it includes, what that includes ..."""
        each: int | None = k
        while each is not None:
            yield each
            each = self.included.get(each)

    def note(self, k: int, is_read: set[int]) -> None:
        """Adds an instruction and all it includes to those that have been read."""
        for each in self._line(k):
            if each in is_read:
                return
            is_read.add(each)

    def sums_of(
        self,
        k: int,
        known: dict[int, tuple[int, float]],
        extra: Sequence[int],
        size: Sequence[float],
    ) -> tuple[int, float]:
        """Both sums over all that k reads; those of what it includes are `known`."""
        new = list(takewhile(lambda each: each not in known, self._line(k)))
        for each in reversed(new):
            behind, made = known.get(self.included.get(each, -1), (0, 0.0))
            behind += sum([extra[i] for i in self.around[each]])
            made += sum([size[i] for i in self.around[each]])
            known[each] = behind, made
        return known[k]


def _visited(reads: _Reads, roots: np.ndarray) -> list[int]:
    """Instructions after what they read, the last operand first, as of the roots."""
    around, included, count = reads.around, reads.included, len(reads.around)
    shared = frozenset((*included, *included.values()))
    order, is_done, is_read = list[int](), bytearray(count), set[int]()
    waiting, stack = _Waiting(reads, is_done), roots.tolist()
    while stack:
        k = stack.pop()
        if k < 0:  # all that ~k reads is done
            is_done[~k] = True
            order.append(~k)
            if ~k in shared:
                reads.note(~k, is_read)
        elif k >= count:  # some of what it reads is left
            waiting.put(k - count, stack)
        while 0 <= k < count and not is_done[k]:
            if k in included and included[k] not in is_read:
                waiting.put(k, stack)
                break
            last = -1  # of what it reads, which is next
            for i in around[k]:
                if not is_done[i]:
                    stack.append(last if last >= 0 else ~k)
                    last = i
            if last < 0:
                is_done[k] = True
                order.append(k)
            k = last
    return order


class _Waiting:
    """Puts what instructions with many operands wait for on the stack, one by one."""

    def __init__(self, reads: _Reads, is_done: bytearray) -> None:
        self._reads, self._left = reads, dict[int, np.ndarray]()
        self._is_done = np.frombuffer(is_done, np.uint8)

    def put(self, k: int, stack: list[int]) -> None:
        """The next one, or all of the last few."""
        left = self._left.pop(k) if k in self._left else self._reads.whole(k)
        left = left[self._is_done[left] == 0]
        if len(left) <= MANY_READS:
            stack += (~k, *left.tolist())
        else:
            self._left[k] = left[:-1]
            stack += (k + len(self._is_done), int(left[-1]))
