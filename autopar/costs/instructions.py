"""What kernels are as instructions of the compiled program, when it is scheduled.

Instructions are kernels, copies of inputs, and the parts that are got of what a loop or
a barrier returns. What a collective turns first is one with it, and so are the parts
that an all_to_all cuts and puts together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from .kernels import KernelBlock

OTHERS = 2  # the tuple of results, and the zero that sums start at


@dataclass(frozen=True, eq=False)
class Instructions:
    """What a block's kernels are as instructions, without parameters.

    Kernels come first, then copies, then parts. Instruction i reads those of
    `operands[starts[i] : starts[i + 1]]`. If it `includes` another, and n, all that the
    other reads comes after n of these. The block returns `roots`. `bytes` is what each
    makes, `most` how many there are with the parameters. `copied` are the values of
    which copies are made, in order.
    """

    num_kernels: int
    starts: np.ndarray
    operands: np.ndarray
    includes: Mapping[int, tuple[int, int]]
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
        reader, value = _through_barriers(block) if block.passed else columns.own_reads
        is_input = np.zeros(len(node), bool)
        is_input[value[block.maker[value] < 0]] = True
        is_made = node[value] >= 0
        includes = {} if block.passed else _includes_made(block, reader, is_made)
        reader, operand = reader[is_made], node[value][is_made]
        total = count + len(copied) + len(parts)
        sizes = np.zeros(total, np.int64)
        np.add.at(sizes, columns.writers, block.sizes[columns.writes])
        sizes[count : count + len(copied)] = block.sizes[copied]
        turned = np.where(columns.operator < 0, columns.inner_bytes, 0)
        times = _times_read(block)
        sizes[:count] = (sizes[:count] + turned) * np.where(times > 1, 2, 1)
        more = int((turned > 0).sum() + 2 * times[times > 1].sum())
        reader, operand = (each.repeat(times[reader]) for each in (reader, operand))
        reader = np.concatenate([reader, node[parts]])
        operand = np.concatenate([operand, columns.writers[is_part]])
        returned = node[list(block.kept)]
        returned = returned[returned >= 0]
        is_end = np.bincount(operand, minlength=total) == 0
        is_end[returned] = False
        roots = np.concatenate([returned, np.flatnonzero(is_end)]).astype(np.intp)
        num_loops = len(np.unique(columns.writers[is_part]))  # each reads a tuple
        return cls(
            count,
            np.searchsorted(reader, np.arange(total + 1)),
            operand,
            includes,
            roots,
            sizes,
            total + num_loops + int(is_input.sum()) + more + OTHERS,
            tuple(copied),
        )

    def num_readers(self) -> np.ndarray:
        """[instructions] how many read each, as often as they do."""
        total = len(self.bytes)
        times = np.ones(total)  # how many include each, with itself
        for k, (other, _) in reversed(list(self.includes.items())):
            times[other] += times[k]
        reads = times.repeat(np.diff(self.starts))
        found = np.bincount(self.operands, reads, total).astype(np.intp)
        return found + np.bincount(np.unique(self.roots), minlength=total)


def _times_read(block: KernelBlock) -> np.ndarray:
    """[kernels] as how many parts each reads what it exchanges, or 1."""
    times = np.ones(len(block.kernels), np.intp)
    for value, parts in block.exchanged.items():
        if block.maker[value] >= 0:
            times[block.maker[value]] = parts
    return times


def _includes_made(
    block: KernelBlock, reader: np.ndarray, is_made: np.ndarray
) -> dict[int, tuple[int, int]]:
    """What kernels include, and how many of their own reads that kernels make go first.

    `reader` and `is_made` are of `own_reads`.
    """
    found = dict[int, tuple[int, int]]()
    for k, (other, place) in block.columns.includes.items():
        first = int(np.searchsorted(reader, k))
        found[k] = other, int(is_made[first : first + place].sum())
    return found


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
