"""Which values lie in the memory of inputs that are replaced: XLA's `BufferAssigner`.

Between an input's last use and its replacement its memory holds others, the largest
first, and of one size in post-order. Each goes where an operand of its kernel lies, or
else into the smallest memory that is free while it lives, the last in post-order first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from .kernels import KernelBlock


def borrowed_values(
    block: KernelBlock,
    position: np.ndarray,
    post: np.ndarray,
    intervals: tuple[np.ndarray, np.ndarray],
    duplicated: frozenset[int],
) -> frozenset[int]:
    """Values in an input's memory.

    Args:
      block: kernels over values.
      position: [kernels] when each runs.
      post: [values] the place in post-order of what makes each, -1 for inputs that are
        not copied.
      intervals: [values] first and last position of each, -1 for what takes no memory.
      duplicated: inputs of which a copy is made.
    """
    (starts, ends), sizes = intervals, block.sizes
    places = _places(block, position, post, duplicated)
    if not places:
        return frozenset()
    rooms = [_Rooms(size, list(each)) for size, each in groupby(places, itemgetter(0))]
    lies_in = {place[1]: room for room in rooms for place in room.places}
    largest = rooms[-1].size
    values = np.flatnonzero((starts >= 0) & (sizes > 0) & (sizes <= largest))
    values = values[np.lexsort((post[values], -sizes[values]))]
    columns = (values, starts[values], ends[values], sizes[values])
    read_start, reads = block.columns.read_start.tolist(), block.columns.reads.tolist()
    maker, owner = block.maker.tolist(), {each: each for each in lies_in}
    found: list[int] = []

    def taken(value: int, start: int, end: int, size: int) -> Iterator[int]:
        """Whose memory it takes, if any."""
        k = -1 if value in duplicated else maker[value]
        for read in reads[read_start[k] : read_start[k + 1]] if k >= 0 else [value]:
            old = owner.get(read, -1)
            if old >= 0 and (room := lies_in[old]).size >= size:
                yield room.taken(start, end, old)
        for room in rooms:
            if room.size >= size:
                yield room.taken(start, end)

    for each in zip(*map(np.ndarray.tolist, columns), strict=True):
        old = next((old for old in taken(*each) if old >= 0), -1)
        if old >= 0:
            found.append(each[0])
            if each[0] not in duplicated:
                owner[each[0]] = old
    return frozenset(found)


class _Rooms:
    """Free times of inputs of one size: first and last position, and whose they are."""

    def __init__(self, size: int, places: Sequence[tuple[int, int, int, int]]) -> None:
        self.size, self.places, self.count = size, places, len(places)
        _, self.owner, self.first, self.last = np.array(places).T
        self.rank = np.arange(self.count)
        self.earliest, self.latest = int(self.first.min()), int(self.last.max())

    def taken(self, start: int, end: int, owner: int = -1) -> int:
        """Takes the times of a value; the first input (or `owner`) of which they are.

        The answer is -1 where they are not free.
        """
        if start < self.earliest or end > self.latest:
            return -1
        count = self.count
        (fits,) = ((self.first[:count] <= start) & (self.last[:count] >= end)).nonzero()
        if owner >= 0:
            fits = fits[self.owner[fits] == owner]
        if not fits.size:
            return -1
        place = int(fits[self.rank[fits].argmin()] if fits.size > 1 else fits[0])
        if count == len(self.first):
            self.first, self.last, self.owner, self.rank = (
                np.concatenate([each, np.zeros_like(each)])
                for each in (self.first, self.last, self.owner, self.rank)
            )
        self.first[count], self.last[count] = end + 1, self.last[place]
        self.owner[count], self.last[place] = self.owner[place], start - 1
        self.rank[count] = self.rank[place]
        self.count += 1
        return int(self.owner[count - 1])


def _places(
    block: KernelBlock,
    position: np.ndarray,
    post: np.ndarray,
    duplicated: frozenset[int],
) -> list[tuple[int, int, int, int]]:
    """(bytes, input, first position, last position) of memory that is free.

    It is ordered by bytes, then from the last input in post-order to the first.
    """
    columns, count = block.columns, len(position)
    if not count or not block.replaced:
        return []
    first, last = np.full((2, len(block.values)), -1)
    at = position[columns.readers]
    np.maximum.at(last, columns.reads, at)
    first[columns.reads[::-1]] = count
    np.minimum.at(first, columns.reads, at)
    used = last.copy()
    copied = list(duplicated)
    used[copied] = first[copied]
    old, new = np.array(block.replaced, np.intp).T
    made = block.maker[new]
    is_free = (made >= 0) & (used[old] + 1 < position[made])
    old, ends = old[is_free], position[made[is_free]] - 1
    order = np.lexsort((-_first_read(block, post)[old], block.sizes[old]))
    found = (block.sizes[old], old, used[old] + 1, ends)
    return list(zip(*(each[order].tolist() for each in found), strict=True))


def _first_read(block: KernelBlock, post: np.ndarray) -> np.ndarray:
    """[values] the place in post-order of the first that reads each, or its copy's."""
    columns = block.columns
    by_kernel = np.zeros(len(block.kernels), np.int64)
    by_kernel[columns.writers] = post[columns.writes]
    found = np.full(len(block.values), np.iinfo(np.int64).max // 2)
    # Operands come one after the other, so ties of one reader go by the entry.
    place = by_kernel[columns.readers] * (len(columns.reads) + 1)
    np.minimum.at(found, columns.reads, place + np.arange(len(columns.reads)))
    is_copy = (post >= 0) & (block.maker < 0)
    found[is_copy] = post[is_copy] * (len(columns.reads) + 1)
    return found
