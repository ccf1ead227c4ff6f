"""Which values lie in the memory of inputs that are replaced: XLA's `BufferAssigner`.

Between an input's last use and its replacement its memory holds others, the largest
first, and of one size in post-order. Each goes where an operand of its kernel lies, or
else into the smallest memory that is free while it lives, the last in post-order first.
What an elementwise kernel reads last may also lie where that writes the replacement.
"""

from __future__ import annotations

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
    places = _places(block, position, post, duplicated)
    room, inputs = places[:2]
    if not room.size:
        return {}
    values = np.flatnonzero((starts >= 0) & (sizes > 0) & (sizes <= room[-1]))
    values = values[np.lexsort((post[values], -sizes[values]))]
    lives, times = (starts[values], ends[values]), FreeTimes(*places[2:])
    large = np.searchsorted(room, sizes[values])  # the first place that is large enough
    columns = map(np.ndarray.tolist, (values, *lives, large))
    read_start, reads = block.columns.read_start.tolist(), block.columns.reads.tolist()
    maker, lies_in = block.maker.tolist(), {v: p for p, v in enumerate(inputs.tolist())}
    over, (since, until) = _written_over(block, position, ends), places[2:]
    since, until = since.tolist(), until.tolist()
    found: dict[int, int] = {}
    for free, value, start, end, first in zip(
        times.at_first(*lives), *columns, strict=True
    ):
        free = (free & ~times.taken(start, end)) >> first if free >> first else 0
        if not free and (own := lies_in.get(over.get(value, -1), -1)) >= first:
            end -= 1  # then its kernel writes the replacement there
            if since[own] <= start <= end <= until[own]:
                free = 1 << (own - first) & ~(times.taken(start, end) >> first)
        if free:
            place = first + (free & -free).bit_length() - 1
            k = -1 if value in duplicated else maker[value]
            for read in reads[read_start[k] : read_start[k + 1]] if k >= 0 else [value]:
                own = lies_in.get(read, -1)
                if own >= first and free >> (own - first) & 1:
                    place = own
                    break
            times.take(place, start, end)
            found[value] = int(inputs[place])
            if value not in duplicated:
                lies_in[value] = place
    return found


def _written_over(
    block: KernelBlock, position: np.ndarray, ends: np.ndarray
) -> dict[int, int]:
    """By value, the input whose replacement an elementwise kernel writes over it."""
    columns, sizes = block.columns, block.sizes
    old, new = np.array(block.replaced, np.intp).T
    made = block.maker[new]
    is_over = (made >= 0) & columns.is_elementwise[made]
    written = np.full((2, len(position)), -1)
    written[:, made[is_over]] = old[is_over], new[is_over]
    old, new = written[:, columns.readers]
    is_last = ends[columns.reads] == position[columns.readers]
    is_last &= (old >= 0) & (sizes[columns.reads] == sizes[new])
    pairs = columns.reads[is_last].tolist(), old[is_last].tolist()
    both = zip(*pairs, strict=True)
    return {read: owner for read, owner in both if read not in block.flat}


def _places(
    block: KernelBlock,
    position: np.ndarray,
    post: np.ndarray,
    duplicated: frozenset[int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(bytes, input, first position, last position) of memory that is free.

    It is ordered by bytes, then from the last input in post-order to the first.
    """
    columns, count = block.columns, len(position)
    if not count or not block.replaced:
        nothing = np.zeros(0, np.intp)
        return nothing, nothing, nothing, nothing
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
    old, ends = old[order], ends[order]
    return block.sizes[old], old, used[old] + 1, ends


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
