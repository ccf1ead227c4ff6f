"""Rows of memory that are lowered say less of one assignment and no more of others."""

from itertools import product

import numpy as np
import pytest

from autopar.solver.memory_rows import MemoryRow, lowered, lowered_by_all


@pytest.mark.parametrize("seed", range(30))
def test_a_lowered_row_is_exact_where_it_was_and_where_it_was_wrong(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, 4).tolist()
    weights = tuple(rng.integers(0, 9, size).astype(float) for size in sizes)
    row = MemoryRow((0, 1, 2, 3), weights, float(rng.integers(-5, 6)))
    every = list(product(*map(range, sizes)))
    own, other = (every[i] for i in rng.integers(0, len(every), 2))
    most = row.used(other) - float(rng.integers(-3, 12))
    if own == other:
        most = max(most, row.used(own))
    less = lowered(row, own, other, most, sizes)
    assert less.used(own) == pytest.approx(row.used(own))
    assert less.used(other) == pytest.approx(min(row.used(other), most))
    assert all((held >= 0).all() for held in less.weights)
    assert all(less.used(each) <= row.used(each) + 1e-9 for each in every)
    assert all(row.used(x) <= less.used(x) + less.taken_off + 1e-9 for x in every)
    assert less is row or (less.before is row and less.taken_off > 0)


@pytest.mark.parametrize("seed", range(10))
def test_a_row_lowered_by_several_knows_what_it_said_before_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [3, 2, 3, 2]
    weights = tuple(rng.integers(1, 9, size).astype(float) for size in sizes[:3])
    row = MemoryRow((0, 1, 2), weights, 2.0)
    every = list(product(*map(range, sizes)))
    own, *others = (every[i] for i in rng.integers(1, len(every), 4))
    wrong = [(x, row.used(x) - 3.0) for x in others if x != own]
    less = lowered_by_all(row, own, wrong, sizes)
    assert less.before is row
    said = max(row.used(x) - less.used(x) for x in every)
    assert 0 < said <= less.taken_off + 1e-9


def test_where_no_node_of_the_row_tells_them_apart_others_do() -> None:
    row = MemoryRow((0,), (np.array([4.0, 7.0]),), 1.0)
    own, other = (0, 0, 2, 1), (0, 1, 2, 0)
    less = lowered(row, own, other, 3.0, [2, 2, 3, 2])
    assert less.used(own) == row.used(own) == 5.0
    assert less.used(other) == 3.0
    assert less.used((0, 1, 2, 1)) == 4.0  # half of what tells them apart
    assert less.used((1, 0, 0, 1)) == row.used((1, 0)) == 8.0
    assert less.taken_off == 2.0
