"""When each value is in memory: kernels in the compiler's order, memory used again.

The order is XLA's depth-first one for CPUs (`depth_first.py`), and that of the least
memory on one accelerator (`least_order.py`). Three rules of its buffer assignment
matter:

  in place    an elementwise kernel or a loop writes over what it reads last
  duplicates  an input that is returned in its own memory is copied first, unless all
              who read it must run before its replacement is made
  places      between an input's last use and its replacement its memory holds others
              (`input_memory.py`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .depth_first import Order, depth_first_order
from .input_memory import borrowed_values
from .kernels import KernelBlock
from .least_order import possible_orders
from .names import roots


@dataclass(frozen=True, eq=False)
class Liveness:
    """What is in memory while each kernel of a block runs.

    `order` are kernels by position. `starts` and `ends` [values] are positions, both
    ends included, or -1 for what takes no memory of the block's own. `duplicated` are
    the inputs with a copy; `borrowed` are values in an input's memory, and that input.
    `bytes` [positions] is the sum of what is live, without the borrowed and with what
    bodies hold. Of pairs `over` (old, new) the new value lies where the old one did.
    """

    block: KernelBlock
    order: tuple[int, ...]
    starts: np.ndarray
    ends: np.ndarray
    duplicated: frozenset[int]
    borrowed: Mapping[int, int]
    bytes: np.ndarray
    over: np.ndarray

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
    duplicated = _duplicated(block)
    if block.is_alone:
        found = [_run(block, o, duplicated) for o in possible_orders(block, duplicated)]
        return min(found, key=lambda each: each.peak_bytes)
    return _run(block, depth_first_order(block, duplicated), duplicated)


def _run(block: KernelBlock, found: Order, duplicated: frozenset[int]) -> Liveness:
    """What is live in an order."""
    order = _sends_at_once(block, found.kernels)
    position = np.empty(len(order), np.intp)
    position[list(order)] = np.arange(len(order))
    copied_at = {v: int(position[k]) for v, k in found.copied_before.items()}
    starts, ends, over = _intervals(block, position, duplicated, copied_at)
    sizes, intervals = block.sizes, (starts, ends)
    borrowed = borrowed_values(block, position, found.post, intervals, duplicated)
    own = starts >= 0
    own[list(borrowed)] = False
    changes = np.zeros(len(order) + 1, np.int64)
    np.add.at(changes, starts[own], sizes[own])
    np.add.at(changes, ends[own] + 1, -sizes[own])
    inner = block.columns.inner_bytes[list(order)]
    live = np.cumsum(changes)[:-1] + inner
    return Liveness(block, order, starts, ends, duplicated, borrowed, live, over)


def _sends_at_once(block: KernelBlock, order: Sequence[int]) -> tuple[int, ...]:
    """The order in which what goes to the host does so as soon as it is made."""
    sends: dict[int, list[int]] = {}
    for k in np.flatnonzero(block.columns.is_send).tolist():
        sends.setdefault(block.kernels[k].reads[0], []).append(k)
    if not sends:
        return tuple(order)
    found: list[int] = []
    for k in order:
        if not block.columns.is_send[k]:
            found.append(k)
            for value in block.kernels[k].writes:
                found += sends.pop(value, ())
    return (*found, *(k for rest in sends.values() for k in rest))


def _duplicated(block: KernelBlock) -> frozenset[int]:
    """Inputs that a kernel may read after their memory is written over.

    The compiler places these copies before it orders kernels: an input needs none only
    if all that read it come before its replacement in every order.
    """
    columns, maker = block.columns, block.maker
    last = np.full(len(block.values), -1)  # [values] what makes their replacement
    old, new = block.replacements
    last[old] = maker[new]
    ends = last[columns.reads]
    is_other = (ends >= 0) & (ends != columns.readers)
    if not is_other.any():
        return frozenset()
    reader, read, end = (
        each[is_other] for each in (columns.readers, columns.reads, ends)
    )
    asked, number = _numbered(reader, len(block.kernels))
    asked_for, row = _numbered(end, len(block.kernels))
    bytes_before = _before(block, asked, asked_for)
    is_before = bytes_before[row, number >> 3] >> (number & 7) & 1 > 0
    return frozenset(np.unique(read[~is_before]).tolist())


def _numbered(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The different ones of values below `count`, and the number of each there."""
    is_there = np.zeros(count, bool)
    is_there[values] = True
    return np.flatnonzero(is_there), (np.cumsum(is_there) - 1)[values]


def _before(block: KernelBlock, asked: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which of the kernels `asked` come before `ends` in every order.

    Bits uint8 [ends, asked / 8].
    """
    count = len(block.kernels)
    reader, made = _steps(block)
    own = 2 * asked + 1
    kept = np.flatnonzero((reader > own.min()) & (reader <= 2 * ends.max() + 1))
    reader, made = reader[kept], made[kept]
    is_asked = np.zeros(2 * count, bool)
    is_asked[own] = True
    # What has one thing before it, and is not asked for, has all before it as that has.
    alone = (np.bincount(reader, minlength=2 * count) == 1)[reader] & ~is_asked[reader]
    name = np.arange(2 * count)
    name[reader[alone]] = made[alone]
    name = roots(name)
    before = [0] * (2 * count)
    for place, k in enumerate(own.tolist()):
        before[k] = 1 << place
    for k, i in zip(reader[~alone].tolist(), name[made[~alone]].tolist(), strict=True):
        before[k] |= before[i]
    width = len(asked) // 8 + 1
    last = name[2 * ends + 1].tolist()
    found = b"".join([before[end].to_bytes(width, "little") for end in last])
    return np.frombuffer(found, np.uint8).reshape(-1, width)


def _steps(block: KernelBlock) -> tuple[np.ndarray, np.ndarray]:
    """What comes right after what, by the first: 2 k + 1 is kernel k.

    2 k is when all is there that k reads, if others include k or it another.
    """
    columns, count = block.columns, len(block.kernels)
    reader, value = columns.own_reads
    made = block.maker[value]
    reader, made = reader[made >= 0], made[made >= 0]
    included = [(k, other) for k, (other, _) in columns.includes.items()]
    pairs = np.array(included, np.intp).reshape(-1, 2)
    is_linked = np.zeros(count, bool)
    is_linked[pairs] = True
    linked = 2 * np.flatnonzero(is_linked)
    after = np.concatenate(
        [2 * reader + ~is_linked[reader], 2 * pairs[:, 0], linked + 1]
    )
    before = np.concatenate([2 * made + 1, 2 * pairs[:, 1], linked])
    pairs = np.sort(after * (2 * count) + before)
    return np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], 2 * count)


def _intervals(
    block: KernelBlock,
    position: np.ndarray,
    duplicated: frozenset[int],
    copied_at: Mapping[int, int],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First and last position of each value, -1 without memory of the block's own.

    And the pairs (old, new) of which the new one is written over the old one.
    """
    columns = block.columns
    starts = np.full(len(block.values), -1)
    starts[columns.writes] = position[columns.writers]
    ends, read_at = starts.copy(), position[columns.readers]
    np.maximum.at(ends, columns.reads, read_at)
    without = block.is_outside.copy()
    without[list(block.kept)] = True
    copied = list(duplicated)
    without[copied] = False
    for value in copied:
        if starts[value] < 0:
            starts[value] = copied_at.get(value, -1)
    starts[without] = ends[without] = -1
    over = _write_over(block, position, starts, ends)
    return starts, ends, over


def _write_over(
    block: KernelBlock, position: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Ends values where they are read last, if a result takes their memory there.

    Returns the pairs (old, new) of both, [pairs, 2].

    One value makes way for each result of an elementwise kernel: the first of its size
    that it reads, as long as both have the same dims. Of carries that begin as one
    value the last takes its memory, the others are copies.
    """
    columns, sizes = block.columns, block.sizes
    last = np.flatnonzero(ends[columns.reads] == position[columns.readers])
    born = starts[columns.reads[last]]
    last = last[(born >= 0) & (born < position[columns.readers[last]])]
    is_flat = np.zeros(len(block.values), bool)
    is_flat[list(block.flat)] = True
    last_in_dims = last[~is_flat[columns.reads[last]]]
    is_dying, makes_way = np.zeros((2, len(columns.reads)), bool)
    is_dying[last] = makes_way[last_in_dims] = True
    over = list[tuple[int, int]]()
    for k, carries in columns.carries.items():
        low, high = columns.read_start[k : k + 2]
        dying = set(columns.reads[low:high][is_dying[low:high]].tolist())
        made = ((old, new) for old, new in carries if starts[new] >= 0)
        over += dict(pair for pair in made if pair[0] in dying).items()
    num_written = np.diff(columns.write_start)
    is_one = columns.is_elementwise & (num_written == 1)
    candidates = last_in_dims[is_one[columns.readers[last_in_dims]]]
    reader, old = columns.readers[candidates], columns.reads[candidates]
    new = columns.writes[columns.write_start[reader]]
    fits = (sizes[old] == sizes[new]) & (starts[new] >= 0)
    _, first = np.unique(reader[fits], return_index=True)
    pairs = np.stack([old, new], axis=1)[fits][first]
    for k in np.flatnonzero(columns.is_elementwise & (num_written > 1)).tolist():
        low, high = columns.read_start[k : k + 2]
        dying = columns.reads[low:high][makes_way[low:high]].tolist()
        for each in columns.writes[slice(*columns.write_start[k : k + 2])].tolist():
            match = [value for value in dying if sizes[value] == sizes[each]]
            if match and starts[each] >= 0:
                dying.remove(match[0])
                over.append((match[0], each))
    pairs = np.concatenate([pairs, np.array(over, np.intp).reshape(-1, 2)])
    ends[pairs[:, 0]] = starts[pairs[:, 1]] - 1
    return pairs
