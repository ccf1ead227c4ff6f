"""Bounds outlive the rounds that proved them; no plan that fits is below its own."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from autopar.planner.proved_bounds import ProvedBounds
from autopar.solver.choice_graph import ChoiceGraph
from autopar.solver.lagrangian import PricedPlans
from autopar.solver.memory_rows import MemoryRow, live_row, lowered_by_all
from tests.solver.random_graphs import random_graph


def graph_and_rows(seed: int) -> tuple[ChoiceGraph, list[MemoryRow]]:
    graph = random_graph(seed, num_nodes=5, forbidden=0.0, num_live_sets=3)
    rows = [live_row(graph, live) for live in range(3)]
    return replace(graph, live_sets=()), rows


def test_a_bound_stays_with_more_rows_and_less_room_and_goes_with_its_rows() -> None:
    graph, (first, second, third) = graph_and_rows(0)
    proved = ProvedBounds(PricedPlans(graph))
    proved.add(2.0, 10.0, [first])
    proved.add(1.0, 10.0, [first, second])
    assert proved.of(10.0, [first, second, third]) == 2.0
    assert proved.of(9.0, [first]) == 2.0
    assert proved.of(11.0, [first]) == -inf
    assert proved.of(10.0, [second, third]) == -inf
    lowered = replace(first, constant=first.constant - 1)
    assert proved.of(10.0, [lowered, second]) == -inf


def test_a_plan_that_breaks_a_row_has_the_bounds_without_it() -> None:
    graph, (first, _, _) = graph_and_rows(0)
    proved = ProvedBounds(PricedPlans(graph))
    plan = [0] * len(graph.nodes)
    used = first.used(plan)
    never = MemoryRow((), (), used - 2.0)
    proved.add(3.0, used - 1.0, [never, first])
    proved.add(1.0, used - 1.0, [never])
    assert proved.of(used - 1.0, [never, first]) == 3.0
    assert proved.of(used - 1.0, [never, first], plan) == 1.0


@pytest.mark.parametrize("seed", range(10))
def test_at_prices_rows_come_to_what_the_plan_that_breaks_them_holds(seed: int) -> None:
    """Of brute force: the bound is below all plans within rows that are so wide."""
    graph, rows = graph_and_rows(seed)
    sizes = [node.costs.size for node in graph.nodes]
    plans = [tuple(map(int, each)) for each in np.ndindex(*sizes)]
    used = np.array([[row.used(x) for row in rows] for x in plans])
    costs = np.array([graph.cost(x) for x in plans])
    budget = float(np.quantile(used.max(axis=1), 0.3))
    prices = np.array([0.5, 1.0, 0.0])
    bound = float((costs + (used - budget) @ prices).min())
    priced = PricedPlans(graph)
    priced.keep(rows, prices, budget, bound)
    proved = ProvedBounds(priced)
    assert proved.of(budget, rows) == pytest.approx(bound)
    for plan in plans[:: len(plans) // 20 + 1]:
        wide = np.maximum(budget, [row.used(plan) for row in rows])
        least = costs[(used <= wide).all(axis=1)].min()
        told = proved.of(budget, rows, plan)
        assert told <= min(least, bound) + 1e-9
        assert told >= bound - float((wide - budget) @ prices) - 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_a_bound_at_prices_outlives_its_rows_being_lowered(seed: int) -> None:
    """Of brute force: it is below all plans that the lowered rows allow, too."""
    graph, rows = graph_and_rows(seed)
    sizes = [node.costs.size for node in graph.nodes]
    plans = [tuple(map(int, each)) for each in np.ndindex(*sizes)]
    costs = np.array([graph.cost(x) for x in plans])
    used = np.array([[row.used(x) for row in rows] for x in plans])
    budget = float(np.quantile(used.max(axis=1), 0.3))
    prices = np.array([0.5, 1.0, 0.2])
    bound = float((costs + (used - budget) @ prices).min())
    priced = PricedPlans(graph)
    priced.keep(rows, prices, budget, bound)
    rng = np.random.default_rng(seed)
    own, *others = (plans[i] for i in rng.integers(0, len(plans), 4))
    wrong = [(each, 0.9 * budget) for each in others if each != own]
    less = [lowered_by_all(row, own, wrong, sizes) for row in rows]
    now = np.array([[row.used(x) for row in less] for x in plans])
    told = ProvedBounds(priced).of(budget, less)
    assert told <= costs[(now <= budget).all(axis=1)].min() + 1e-9
    taken_off = np.array([row.taken_off for row in less])
    assert told == pytest.approx(bound - float(taken_off @ prices))
    twice = [lowered_by_all(row, own, [(own, 0.8 * budget)], sizes) for row in less]
    later = ProvedBounds(priced).of(budget, twice)
    again = np.array([[row.used(x) for row in twice] for x in plans])
    assert -inf < later <= costs[(again <= budget).all(axis=1)].min() + 1e-9
    assert ProvedBounds(priced).of(budget, rows) == pytest.approx(bound)
    assert ProvedBounds(priced).of(budget, less[:2]) == -inf
