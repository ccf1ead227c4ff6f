"""When each value is in memory: kernels in the compiler's order, memory used again.

The order is XLA's depth-first one for CPUs (`DFSMemoryScheduler`): a kernel runs after
what it reads, of which that with the most other readers behind it is visited first.
Three rules of its buffer assignment matter:

  in place    an elementwise kernel or a loop writes over what it reads last
  duplicates  an input that is returned in its own memory is copied first, unless all
              who read it must run before its replacement is made
  places      between an input's last use and its replacement its memory holds others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .kernels import Kernel, KernelBlock


@dataclass(frozen=True, eq=False)
class Liveness:
    """What is in memory while each kernel of a block runs.

    `order` are kernels by position. `starts` and `ends` [values] are positions, both
    ends included, or -1 for what takes no memory of the block's own. `duplicated` are
    the inputs with a copy; `borrowed` are values in an input's memory. `bytes`
    [positions] is the sum of what is live, without the borrowed and with what bodies
    hold.
    """

    block: KernelBlock
    order: tuple[int, ...]
    starts: np.ndarray
    ends: np.ndarray
    duplicated: frozenset[int]
    borrowed: frozenset[int]
    bytes: np.ndarray

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once."""
        return int(self.bytes.max(initial=0))

    def live(self, position: int) -> list[int]:
        """The values in memory while the kernel at `position` runs, borrowed or not."""
        is_live = (self.starts >= 0) & (self.starts <= position)
        return np.flatnonzero(is_live & (self.ends >= position)).tolist()

    def __str__(self) -> str:
        return (
            f"{len(self.order)} kernels, peak {self.peak_bytes:,} B, "
            f"{len(self.duplicated)} inputs copied, {len(self.borrowed)} values in "
            "their memory"
        )


def run_in_order(block: KernelBlock) -> Liveness:
    """The order of a block's kernels, and what is live in it."""
    order = _sends_at_once(block, _depth_first_order(block))
    duplicated = _duplicated(block)
    starts, ends = _intervals(block, order, duplicated)
    sizes = block.sizes
    borrowed = _borrowed(block, order, sizes, (starts, ends), duplicated)
    own = starts >= 0
    own[list(borrowed)] = False
    changes = np.zeros(len(order) + 1, np.int64)
    np.add.at(changes, starts[own], sizes[own])
    np.add.at(changes, ends[own] + 1, -sizes[own])
    inner = np.array([block.kernels[k].inner_bytes for k in order], np.int64)
    live = np.cumsum(changes)[:-1] + inner
    return Liveness(block, order, starts, ends, duplicated, borrowed, live)


def _makers(block: KernelBlock) -> dict[int, int]:
    return {v: k for k, kernel in enumerate(block.kernels) for v in kernel.writes}


def _depth_first_order(block: KernelBlock) -> tuple[int, ...]:
    kernels, maker = block.kernels, _makers(block)
    num_readers = [0] * len(kernels)
    operands: list[list[int]] = []
    for kernel in kernels:
        operands.append(
            list(dict.fromkeys(maker[v] for v in kernel.reads if v in maker))
        )
        for k in operands[-1]:
            num_readers[k] += 1
    returned = [maker[value] for value in block.kept if value in maker]
    for k in returned:
        num_readers[k] += 1
    extra, size, total = [0] * len(kernels), [0] * len(kernels), 0
    sizes = block.sizes.tolist()
    for k, kernel in enumerate(kernels):
        own = sum([sizes[v] for v in kernel.writes])
        total += own
        behind = max(num_readers[k] - 1, 0) + sum(extra[i] for i in operands[k])
        extra[k] = min(behind, len(kernels))
        size[k] = min(own + sum(size[i] for i in operands[k]), total)

    def latest_first(nodes: Sequence[int]) -> list[int]:
        return sorted(nodes, key=lambda k: (extra[k], size[k], -k))

    is_done = [False] * len(kernels)
    order: list[int] = []
    unread = [k for k in range(len(kernels)) if not num_readers[k]]
    stack = [(k, False) for k in latest_first([*unread, *returned])]
    while stack:
        k, is_ready = stack.pop()
        if is_done[k]:
            continue
        if is_ready:
            is_done[k] = True
            order.append(k)
            continue
        stack.append((k, True))
        waiting = [i for i in operands[k] if not is_done[i]]
        stack.extend((i, False) for i in latest_first(waiting))
    return tuple(order)


def _sends_at_once(block: KernelBlock, order: Sequence[int]) -> tuple[int, ...]:
    """The order in which what goes to the host does so as soon as it is made."""
    sends: dict[int, list[int]] = {}
    for k, kernel in enumerate(block.kernels):
        if kernel.is_send:
            sends.setdefault(kernel.reads[0], []).append(k)
    if not sends:
        return tuple(order)
    found: list[int] = []
    for k in order:
        if not block.kernels[k].is_send:
            found.append(k)
            for value in block.kernels[k].writes:
                found += sends.pop(value, ())
    return (*found, *(k for rest in sends.values() for k in rest))


def _duplicated(block: KernelBlock) -> frozenset[int]:
    """Inputs that a kernel may read after their memory is written over.

    The compiler places these copies before it orders kernels: an input needs none only
    if all that read it come before its replacement in every order.
    """
    maker = _makers(block)
    replacement = {old: maker[new] for old, new in block.replaced if new in maker}
    readers: dict[int, list[int]] = {old: [] for old in replacement}
    for k, kernel in enumerate(block.kernels):
        for value in kernel.reads:
            if value in readers:
                readers[value].append(k)
    reading = sorted({k for each in readers.values() for k in each})
    bit = {k: 1 << i for i, k in enumerate(reading)}
    before: list[int] = []
    for k, kernel in enumerate(block.kernels):
        mask = bit.get(k, 0)
        for value in kernel.reads:
            if value in maker:
                mask |= before[maker[value]]
        before.append(mask)
    return frozenset(
        value
        for value, last in replacement.items()
        if any(not before[last] & bit[k] for k in readers[value])
    )


def _intervals(
    block: KernelBlock, order: Sequence[int], duplicated: frozenset[int]
) -> tuple[np.ndarray, np.ndarray]:
    """First and last position of each value, -1 without memory of the block's own."""
    starts = np.full(len(block.values), -1)
    ends = starts.copy()
    for position, k in enumerate(order):
        for value in block.kernels[k].writes:
            starts[value] = ends[value] = position
        for value in block.kernels[k].reads:
            if value in duplicated and starts[value] < 0:
                starts[value] = position
            ends[value] = position
    outside = np.flatnonzero(block.is_outside).tolist()
    without = list((block.kept | set(outside)) - duplicated)
    starts[without] = ends[without] = -1
    for position, k in enumerate(order):
        for old in _written_over(block, block.kernels[k], starts, ends, position):
            ends[old] = position - 1
    return starts, ends


def _written_over(
    block: KernelBlock,
    kernel: Kernel,
    starts: np.ndarray,
    ends: np.ndarray,
    position: int,
) -> list[int]:
    """Values read here for the last time whose memory a result takes."""

    def is_dying(value: int) -> bool:
        return 0 <= starts[value] < position == ends[value]

    over = [old for old, new in kernel.carries if starts[new] >= 0 and is_dying(old)]
    if kernel.is_elementwise:
        dying = [value for value in kernel.reads if is_dying(value)]
        for new in kernel.writes:
            sizes = block.sizes
            match = [value for value in dying if sizes[value] == sizes[new]]
            if match and starts[new] >= 0:
                dying.remove(match[0])
                over.append(match[0])
    return list(dict.fromkeys(over))


def _borrowed(
    block: KernelBlock,
    order: Sequence[int],
    sizes: np.ndarray,
    intervals: tuple[np.ndarray, np.ndarray],
    duplicated: frozenset[int],
) -> frozenset[int]:
    """Values in an input's memory: larger ones first, each in the smallest place."""
    starts, ends = intervals
    places = _places(block, order, sizes, duplicated)
    if not places:
        return frozenset()
    count, most = len(places), len(places) + int((starts >= 0).sum())
    free = np.zeros((3, most), np.int64)  # bytes ascending, first and last position
    free[:, :count] = np.array(places).T
    found: list[int] = []
    values = np.flatnonzero((starts >= 0) & (sizes > 0) & (sizes <= free[0, count - 1]))
    values = values[np.argsort(-sizes[values], kind="stable")]
    columns = (values, starts[values], ends[values], sizes[values])
    for value, start, end, size in zip(*map(np.ndarray.tolist, columns), strict=True):
        large = int(free[0, :count].searchsorted(size))
        fits = (free[1, large:count] <= start) & (free[2, large:count] >= end)
        place = int(fits.argmax())
        if not fits[place]:
            continue
        place += large
        found.append(value)
        free[:, place + 1 : count + 1] = free[:, place:count].copy()
        free[1, place], free[2, place + 1] = end + 1, start - 1
        count += 1
    return frozenset(found)


def _places(
    block: KernelBlock,
    order: Sequence[int],
    sizes: np.ndarray,
    duplicated: frozenset[int],
) -> list[tuple[int, int, int]]:
    """(bytes, first position, last position) in which an input's memory is free."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    made: dict[int, int] = {}
    for position, k in enumerate(order):
        for value in block.kernels[k].reads:
            first.setdefault(value, position)
            last[value] = position
        made.update(dict.fromkeys(block.kernels[k].writes, position))
    places = []
    for old, new in block.replaced:
        used = (first if old in duplicated else last).get(old, -1)
        if new in made and used + 1 < made[new]:
            places.append((int(sizes[old]), used + 1, made[new] - 1))
    return sorted(places)
