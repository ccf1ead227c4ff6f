"""Which places are free, and what lies in them, against sets of positions."""

import random

import numpy as np
import pytest

from autopar.costs.free_times import FreeTimes
from autopar.costs.input_memory import borrowed_values
from autopar.costs.kernels import Kernel, KernelBlock, Value


@pytest.mark.parametrize("seed", range(20))
def test_free_times_are_those_of_sets(seed: int) -> None:
    """Short and long times, in one block of positions, in two and in many."""
    random_ = random.Random(seed)
    count, positions = random_.choice((3, 40)), random_.choice((50, 3000, 9000))
    first = np.array([random_.randrange(positions) for _ in range(count)])
    last = np.array([random_.randrange(each, positions) for each in first.tolist()])
    times = FreeTimes(first, last)
    free = [{*range(a, b + 1)} for a, b in zip(first, last, strict=True)]
    for _ in range(60):
        start = random_.randrange(positions)
        end = min(positions - 1, start + random_.choice((0, 1, 30, 100, 2000, 5000)))
        lowest = random_.choice((0, 1, count // 2, count))
        found = times.at_first(*map(np.array, ([start], [end], [lowest])))[0]
        found &= ~times.taken(start, end) if found else 0
        wanted = {*range(start, end + 1)}
        fits = [place for place, each in enumerate(free) if wanted <= each]
        fits = [place for place in fits if place >= lowest]
        assert found == sum(1 << place for place in fits)
        if fits and random_.random() < 0.8:
            place = random_.choice(fits)
            times.take(place, start, end)
            free[place] -= wanted


@pytest.mark.parametrize("seed", range(20))
def test_values_lie_with_an_operand_or_in_the_first_place(seed: int) -> None:
    """The largest first, each with an operand or else in the smallest place there is,
    of equal ones in that of the input which is read last."""
    block, starts, ends = _random_block(random.Random(seed))
    sizes, reads = block.sizes.tolist(), block.columns.reads.tolist()
    position = np.arange(len(block.kernels))
    found = borrowed_values(block, position, block.maker, (starts, ends), frozenset())
    last = dict(zip(reads, block.columns.readers.tolist(), strict=True))
    free = {old: {*range(last[old] + 1, new)} for old, new in _replacements(block)}
    places = sorted(free, key=lambda old: (sizes[old], -reads.index(old)))
    lies_in, expected = {old: old for old in free}, dict[int, int]()
    own = np.flatnonzero(starts >= 0).tolist()
    for value in sorted(own, key=lambda each: (-sizes[each], block.maker[each])):
        read = block.kernels[block.maker[value]].reads
        with_operands = [lies_in[each] for each in read if each in lies_in]
        times = {*range(int(starts[value]), int(ends[value]) + 1)}
        for place in (*with_operands, *places):
            if sizes[place] >= sizes[value] and times <= free[place]:
                free[place] -= times
                lies_in[value] = place
                expected[value] = place
                break
    assert expected
    assert found == expected


def _random_block(
    random_: random.Random,
) -> tuple[KernelBlock, np.ndarray, np.ndarray]:
    """Kernels that read inputs and what was made before, and last make new inputs.

    The arrays are when each value is first and last in memory of its own.
    """
    num_inputs, num_made = 6, 60
    sizes = [random_.choice((8, 16)) for _ in range(num_inputs + num_made)]
    sizes += sizes[:num_inputs]
    kernels = list[Kernel]()
    for value in range(num_inputs, len(sizes)):
        recent = range(max(0, value - 9), value) if kernels else range(num_inputs)
        reads = dict.fromkeys(random_.choices(recent, k=2))
        if value < 2 * num_inputs:
            reads = dict.fromkeys((*reads, value - num_inputs))
        kernels.append(Kernel(len(kernels), tuple(reads), (value,)))
    last = range(num_inputs + num_made, len(sizes))
    values = [
        Value(k, (), size, False, is_outside=k < num_inputs)
        for k, size in enumerate(sizes)
    ]
    pairs = tuple(zip(range(num_inputs), last, strict=True))
    block = KernelBlock(values, kernels, tuple(last), pairs)
    starts = block.maker.copy()
    starts[list(last)] = -1
    ends = starts.copy()
    np.maximum.at(ends, block.columns.reads, block.columns.readers)
    ends[starts < 0] = -1
    return block, starts, ends


def _replacements(block: KernelBlock) -> list[tuple[int, int]]:
    """Inputs, and when the kernel runs that replaces each."""
    return [(old, int(block.maker[new])) for old, new in block.replaced]
