"""Bounds kept from earlier prices are bounds on what the rows are by now."""

import numpy as np
import pytest

from autopar.solver.dual_points import DualPoints, most_lowered
from autopar.solver.memory_rows import MemoryRow, lowered
from autopar.solver.multipliers import best_prices
from tests.solver.random_graphs import random_graph
from tests.solver.test_lagrangian import every_assignment, rows_of


@pytest.mark.parametrize("seed", range(20))
def test_a_kept_bound_is_below_all_that_fits_rows_lowered_since(seed: int) -> None:
    graph = random_graph(seed, num_nodes=5, forbidden=0.0, num_copies=0)
    rows, every = rows_of(graph, seed), every_assignment(graph)
    rng = np.random.default_rng(seed)
    points = DualPoints()
    points.follow(rows)
    prices, budget = rng.random(len(rows)), 4.0
    used = np.array([[row.used(x) for row in rows] for x in every])
    costs = np.array([graph.cost(x) for x in every])
    bound = float((costs + (used - budget) @ prices).min())
    points.add(prices, bound, budget)
    assert points.best(budget)[1] == pytest.approx(bound)
    own, other = every[rng.choice(len(every), 2)]
    rows = [lowered(row, own, other, 0.5 * row.used(other)) for row in rows]
    points.follow([*rows, *rows_of(graph, seed + 1, number=1)])
    for now in (budget, budget + 3.0, budget - 1.0):
        at, kept = points.best(now)
        assert at.tolist() == [*prices, 0.0]
        for x in every:
            if all(row.used(x) <= now for row in rows):
                assert kept <= graph.cost(x) + 1e-9


def test_a_row_is_lowered_by_the_most_that_it_says_less_of_any_assignment() -> None:
    held = np.array([1.0, 5.0, 2.0])
    before = MemoryRow((3, 7), (held, held), 2.0)
    after = MemoryRow((3, 7), (held - [0.0, 2.0, 1.0], held), 1.5)
    assert most_lowered(before, before) == 0.0
    assert most_lowered(before, after) == pytest.approx(2.5)
    assert most_lowered(before, MemoryRow((3,), (held,))) == np.inf


def test_without_rows_of_before_nothing_is_kept() -> None:
    row = MemoryRow((0,), (np.array([1.0, 2.0]),))
    points = DualPoints()
    points.follow([row, row])
    points.add(np.array([1.0, 0.0]), 7.0, 1.0)
    points.follow([row])
    assert points.best(1.0)[1] == -np.inf


@pytest.mark.parametrize("seed", range(10))
def test_prices_near_known_ones_are_half_way_to_the_highest_line(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs = rng.uniform(10.0, 20.0, 4).tolist()
    used = np.concatenate([rng.uniform(2.0, 9.0, (3, 2)), [[1.0, 1.0]]])
    budget = 5.0
    _, highest = best_prices(costs, used, budget)
    known, bound = np.array([0.1, 0.0]), highest - 4.0
    prices, value = best_prices(costs, used, budget, known=known, bound=bound)
    assert value == pytest.approx(highest)
    least = (np.array(costs) + (used - budget) @ prices).min()
    assert least >= highest - 2.0 - 1e-6
    at_known = (np.array(costs) + (used - budget) @ known).min()
    if at_known >= highest - 2.0:
        assert prices == pytest.approx(known)
