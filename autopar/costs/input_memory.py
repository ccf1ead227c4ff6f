"""Which values lie in the memory of inputs that are replaced: XLA's `BufferAssigner`.

Between an input's last use and its replacement its memory holds others, the largest
first, and of one size in post-order. Each goes where an operand of its kernel lies, or
else into the smallest memory that is free while it lives, the last in post-order first.
What an elementwise kernel reads last may also lie where that writes the replacement.
"""

from __future__ import annotations

from array import array

import numpy as np

from .free_times import FreeTimes
from .kernels import KernelBlock


def borrowed_values(
    block: KernelBlock,
    position: np.ndarray,
    post: np.ndarray,
    intervals: tuple[np.ndarray, np.ndarray],
    duplicated: frozenset[int],
) -> dict[int, int]:
    """Values in an input's memory, and that input.

    Args:
      block: kernels over values.
      position: [kernels] when each runs.
      post: [values] the place in post-order of what makes each, -1 for inputs that are
        not copied.
      intervals: [values] first and last position of each, -1 for what takes no memory.
      duplicated: inputs of which a copy is made.
    """
    (starts, ends), sizes = intervals, block.sizes
    places = _places(block, position, post, (starts, duplicated))
    room, inputs = places[:2]
    if not room.size:
        return {}
    values = np.flatnonzero((starts >= 0) & (sizes > 0) & (sizes <= room[-1]))
    values = values[np.lexsort((post[values], -sizes[values]))]
    lives, times = (starts[values], ends[values]), FreeTimes(*places[2:])
    large = np.searchsorted(room, sizes[values])  # the first place that is large enough
    needed = starts.copy()
    needed[list(duplicated)] -= 1  # a copy is made while what it is of is still there
    frees = times.at_first(needed[values], lives[1], large)
    operands = _Operands(block, inputs)
    lies_in, asked = operands.lies_in, operands.may_lie_near(position, ends, places)
    over = _written_over(block, position, ends)
    since, until, owners = (each.tolist() for each in (*places[2:], inputs))
    found: dict[int, int] = {}
    columns = map(np.ndarray.tolist, (values, *lives, large))
    for free, value, start, end, first in zip(frees, *columns, strict=True):
        if free:
            free &= ~times.taken(start, end)
        if not free and value in over and (own := lies_in[over[value]]) >= first:
            end -= 1  # then its kernel writes the replacement there
            if since[own] <= needed[value] <= end <= until[own]:
                free = 1 << own & ~times.taken(start, end)
        if free:
            place = operands.place(value, free) if value in asked else -1
            if place < 0:
                place = (free & -free).bit_length() - 1
            times.take(place, start, end)
            found[value] = owners[place]
            if value not in duplicated:  # a copy lies there beside its input
                lies_in[value] = place
    return found


class _Operands:
    """In which places lie what the kernels read that write values.

    `lies_in` [values] is -1 for none.
    """

    def __init__(self, block: KernelBlock, inputs: np.ndarray) -> None:
        self._block, self._starts = block, block.columns.read_start
        self.lies_in = array("q", [-1]) * len(block.values)
        self._lies_in = np.frombuffer(self.lies_in, np.int64)  # the same
        self._lies_in[inputs] = np.arange(len(inputs))

    def may_lie_near(
        self,
        position: np.ndarray,
        ends: np.ndarray,
        places: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    ) -> set[int]:
        """The values whose kernels may find a place free in which an operand lies.

        Few do: an operand lies there as long as it is read, so the kernel writes over
        it, or reads an input that was copied. See `_places` for the last argument.
        """
        columns = self._block.columns
        last = np.where(ends < 0, len(position), ends)
        last[places[1]] = places[2] - 1
        reader, read = columns.own_reads
        finds = np.zeros(len(position), bool)
        finds[reader[last[read] < position[reader]]] = True
        finds[list(columns.includes)] = True
        return set(columns.writes[finds[columns.writers]].tolist())

    def place(self, value: int, free: int) -> int:
        """The place of the first operand of a value's kernel that is free, or -1.

        Place i is free if bit i of `free` is set.
        """
        k = self._block.maker[value]
        read = self._block.columns.reads[self._starts[k] : self._starts[k + 1]]
        places = self._lies_in[read]
        places = places[places >= 0].tolist()
        return next((place for place in places if free >> place & 1), -1)


def _written_over(
    block: KernelBlock, position: np.ndarray, ends: np.ndarray
) -> dict[int, int]:
    """By value, the input whose replacement an elementwise kernel writes over it."""
    columns, sizes = block.columns, block.sizes
    old, new = block.replacements
    made = block.maker[new]
    is_over = (made >= 0) & columns.is_elementwise[made]
    written = np.full((2, len(position)), -1)
    written[:, made[is_over]] = old[is_over], new[is_over]
    chosen = np.flatnonzero(written[0, columns.readers] >= 0)
    reader, read = columns.readers[chosen], columns.reads[chosen]
    old, new = written[:, reader]
    is_last = (ends[read] == position[reader]) & (sizes[read] == sizes[new])
    pairs = read[is_last].tolist(), old[is_last].tolist()
    both = zip(*pairs, strict=True)
    return {read: owner for read, owner in both if read not in block.flat}


def _places(
    block: KernelBlock,
    position: np.ndarray,
    post: np.ndarray,
    copies: tuple[np.ndarray, frozenset[int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(bytes, input, first position, last position) of memory that is free.

    That of an input that is copied is so from the copy on, which is before the kernel
    at `copies[0]` [values]; `copies[1]` are these inputs.
    It is ordered by bytes, then from the last input in post-order to the first.
    """
    columns, count = block.columns, len(position)
    if not count or not block.replaced:
        nothing = np.zeros(0, np.intp)
        return nothing, nothing, nothing, nothing
    old, new = block.replacements
    is_old = np.zeros(len(block.values), bool)
    is_old[old] = True
    reads = np.flatnonzero(is_old[columns.reads])
    read, at = columns.reads[reads], position[columns.readers[reads]]
    used = np.full(len(block.values), -1)
    np.maximum.at(used, read, at)
    starts, copied = copies[0], list(copies[1])
    used[copied] = starts[copied] - 1
    made = block.maker[new]
    is_free = (made >= 0) & (used[old] + 1 < position[made])
    old, ends = old[is_free], position[made[is_free]] - 1
    order = np.lexsort((-_first_read(block, post, reads)[old], block.sizes[old]))
    old, ends = old[order], ends[order]
    return block.sizes[old], old, used[old] + 1, ends


def _first_read(block: KernelBlock, post: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """[values] the place in post-order of the first that reads each, or its copy's.

    `reads` are the entries of all that read what is asked for.
    """
    columns = block.columns
    by_kernel = np.zeros(len(block.kernels), np.int64)
    by_kernel[columns.writers] = post[columns.writes]
    found = np.full(len(block.values), np.iinfo(np.int64).max // 2)
    # Operands come one after the other, so ties of one reader go by the entry.
    place = by_kernel[columns.readers[reads]] * (len(columns.reads) + 1)
    np.minimum.at(found, columns.reads[reads], place + reads)
    is_copy = (post >= 0) & (block.maker < 0)
    found[is_copy] = post[is_copy] * (len(columns.reads) + 1)
    return found
