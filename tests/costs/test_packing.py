"""The memory that buffers share: XLA's decreasing best fit."""

import itertools

import numpy as np
import pytest

from autopar.costs.packing import _Buffers, _place, packed_bytes


def packed(*values: tuple[int, int, int]) -> int:
    sizes, starts, ends = np.array(values, np.int64).reshape(-1, 3).T
    return packed_bytes(sizes, starts, ends, np.arange(len(values)))


def test_nothing_takes_nothing() -> None:
    assert packed() == 0


def test_what_never_meets_shares_its_place() -> None:
    assert packed((10, 0, 1), (30, 2, 3), (20, 4, 5)) == 30


def test_a_gap_is_left_where_lives_cross() -> None:
    """60 are live at once, but the last one only fits above what lies at 40."""
    assert packed((20, 2, 5), (40, 0, 1), (20, 0, 3), (30, 5, 7)) == 70


def test_how_long_a_value_lives_counts_what_comes_and_goes() -> None:
    """The first lives for as many positions as the third, but meets more."""
    assert packed((10, 2, 3), (10, 3, 6), (20, 1, 2), (20, 4, 4)) == 40


@pytest.mark.parametrize("seed", range(8))
def test_it_is_between_what_is_live_at_once_and_all_together(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes, starts = random.integers(1, 100, 40), random.integers(0, 30, 40)
    ends = starts + random.integers(0, 10, 40)
    live = [
        sizes[(starts <= now) & (now <= ends)].sum() for now in range(int(ends.max()))
    ]
    assert max(live) <= packed_bytes(sizes, starts, ends, np.arange(40)) < sizes.sum()


@pytest.mark.parametrize("seed", range(8))
def test_what_lives_at_once_has_places_of_its_own(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes, starts = random.integers(1, 100, 40), random.integers(0, 30, 40)
    ends = starts + random.integers(0, 10, 40)
    own = np.arange(40)
    most, placed, tops = _place(_Buffers(sizes, starts, ends, own))
    assert tops.max() == most == packed_bytes(sizes, starts, ends, own)
    low = tops - sizes[placed]
    assert (low >= 0).all()
    for one, other in itertools.combinations(range(len(placed)), 2):
        a, b = placed[one], placed[other]
        if starts[a] <= ends[b] and starts[b] <= ends[a]:
            assert low[one] >= tops[other] or low[other] >= tops[one]
