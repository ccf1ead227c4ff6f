"""Prices and mixtures: bound <= brute force <= plan, and a mixture is a plan."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from autopar.solver import ChoiceGraph, array_pool, mixing, solve
from autopar.solver.array_pool import ArrayPool
from autopar.solver.choice_graph import Infeasible
from autopar.solver.lagrangian import PricedPlans
from autopar.solver.memory_rows import MemoryRow
from autopar.solver.mixing import FEW_CHECKS, Mixtures, mix
from autopar.solver.multipliers import best_prices, price
from autopar.solver.relaxation import Relaxation
from autopar.solver.search import Search
from autopar.solver.whole import Whole, solve_whole
from autopar.solver.within_rows import mix_within_rows, solve_within_rows
from tests.solver.layered_graphs import layered_graph
from tests.solver.random_graphs import random_graph


def rows_of(graph: ChoiceGraph, seed: int, number: int = 3) -> list[MemoryRow]:
    """Rows that equal nodes weigh alike in, and one node besides that does not."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        weights: dict[int, np.ndarray] = {}
        for node in graph.nodes:
            held = rng.integers(0, 6, node.costs.size).astype(float)
            weights.setdefault(id(node.costs), held)
        members = [v for v in range(len(graph.nodes)) if rng.random() < 0.8]
        held = [weights[id(graph.nodes[v].costs)] for v in members]
        held[0] = held[0] + 1.0
        rows.append(MemoryRow(tuple(members), tuple(held), float(rng.integers(-3, 4))))
    return rows


def every_assignment(graph: ChoiceGraph) -> np.ndarray:
    sizes = [node.costs.size for node in graph.nodes]
    return np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), -1).reshape(
        -1, len(sizes)
    )


def best_within(
    graph: ChoiceGraph, rows: list[MemoryRow], budget: float, some: np.ndarray
) -> float:
    fitting = [x for x in some if all(row.used(x) <= budget for row in rows)]
    return min((graph.cost(x) for x in fitting), default=inf)


def small(seed: int) -> ChoiceGraph:
    if seed % 2:
        return layered_graph(seed, num_layers=6, num_places=1, num_ends=1)
    return random_graph(seed, num_nodes=6, forbidden=0.0, num_copies=0)


@pytest.mark.parametrize("seed", range(30))
def test_prices_bound_brute_force_from_below_and_plans_fit(seed: int) -> None:
    graph = small(seed)
    rows, every = rows_of(graph, seed), every_assignment(graph)
    peaks = [max(row.used(x) for row in rows) for x in every]
    budget = float(np.quantile(peaks, 0.3))
    best = best_within(graph, rows, budget, every)
    plans = PricedPlans(graph)
    plans.add(solve(graph).choices)
    search = Search(graph, 1e-3, 60.0, plans.pool)
    prices = plans.close(search, rows, budget)
    assert search.bound <= best + 1e-6
    assert best - 1e-9 <= search.cost
    if search.choices is not None:
        assert max(row.used(search.choices) for row in rows) <= budget
    assert plans.least_peak(rows, prices) <= min(peaks) + 1e-6
    aimed = Search(graph, 1e-3, 60.0, plans.pool)
    plans.close(aimed, rows, budget, aim=budget - 1.0)
    assert aimed.bound <= best + 1e-6
    if aimed.choices is not None:
        assert max(row.used(aimed.choices) for row in rows) <= budget - 1.0


@pytest.mark.parametrize("seed", range(30))
def test_a_mixture_is_the_best_of_what_clusters_of_one_node_can_be(seed: int) -> None:
    """So few nodes are each a cluster: every node follows one of the plans."""
    graph = small(seed)
    rows = rows_of(graph, seed)
    rng = np.random.default_rng(seed)
    every = every_assignment(graph)
    table = every[rng.choice(len(every), 3, replace=False)]
    plans = [tuple(each.tolist()) for each in table]
    allowed = np.ones(len(every), bool)
    for node in range(len(graph.nodes)):
        allowed &= np.isin(every[:, node], table[:, node])
    some = every[allowed]
    budget = float(np.median([max(row.used(x) for row in rows) for x in some])) + 0.5
    best = best_within(graph, rows, budget, some)
    found = mix(graph, rows, budget, plans, gap=0.0)
    assert found is not None
    assert all(row.used(found) <= budget for row in rows)
    assert graph.cost(found) == pytest.approx(best, abs=1e-6)
    assert mix(graph, rows, budget, plans, gap=0.0, cost=best) is None


def priced_bound(
    graph: ChoiceGraph, rows: list[MemoryRow], prices: np.ndarray, budget: float
) -> float:
    return solve(price(graph, rows, prices, budget), gap=1e-6).bound


def test_shares_of_two_plans_tell_better_prices_than_their_lines() -> None:
    by_shares = by_lines = 0.0
    for seed in range(6):
        graph = layered_graph(seed, num_layers=20)
        rows = rows_of(graph, seed, number=2)
        free = solve(graph).choices
        at_high_prices = price(graph, rows, np.full(2, graph.cost(free)), 0.0)
        plans = [free, solve(at_high_prices).choices]
        used = np.array([[row.used(x) for row in rows] for x in plans])
        budget = float(used.max(axis=1).mean())
        costs = [graph.cost(x) for x in plans]
        shares = Mixtures(graph, rows, plans).shares(budget)
        prices, line = best_prices(costs, used, budget)
        assert shares is not None and shares.value <= line * (1 + 1e-6)
        bound = priced_bound(graph, rows, shares.prices, budget)
        assert bound <= shares.value * (1 + 1e-6)
        found = mix(graph, rows, budget, plans, gap=1e-6)
        assert found is not None and shares.value <= graph.cost(found) * (1 + 1e-6)
        by_shares += bound / graph.cost(free)
        by_lines += priced_bound(graph, rows, prices, budget) / graph.cost(free)
    assert by_shares > by_lines


def test_no_shares_of_plans_that_are_all_above_a_row() -> None:
    graph = layered_graph(1, num_layers=20)
    rows = rows_of(graph, 1, number=2)
    free = solve(graph).choices
    other = solve(price(graph, rows, np.ones(2), 0.0)).choices
    mixtures = Mixtures(graph, rows, [free, other])
    assert mixtures.shares(0.0) is None
    assert mixtures.cheapest(0.0, gap=0.0) is None
    assert Mixtures(graph, rows, [free]).shares(inf) is None


def test_a_mixture_that_costs_little_enough_ends_the_search() -> None:
    graph = layered_graph(3, num_layers=40)
    rows = rows_of(graph, 3, number=2)
    free = solve(graph).choices
    other = solve(price(graph, rows, np.full(2, graph.cost(free)), 0.0)).choices
    peaks = [max(row.used(x) for row in rows) for x in (free, other)]
    budget = sum(peaks) / 2
    mixtures = Mixtures(graph, rows, [free, other])
    best = mixtures.cheapest(budget, gap=0.0)
    assert best is not None
    enough = 1.05 * graph.cost(best)
    found = mixtures.cheapest(budget, gap=0.0, enough=enough)
    assert found is not None and graph.cost(best) <= graph.cost(found) <= enough
    assert all(row.used(found) <= budget for row in rows)
    assert mixtures.cheapest(budget, gap=0.0, cost=graph.cost(best)) is None


def test_a_rounded_mixture_will_do_while_prices_may_do_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tree of all mixtures, which may take ten times as long, is for the end."""
    graph = layered_graph(3, num_layers=40)
    rows = rows_of(graph, 3, number=2)
    free = solve(graph).choices
    other = solve(price(graph, rows, np.full(2, graph.cost(free)), 0.0)).choices
    peaks = [max(row.used(x) for row in rows) for x in (free, other)]
    mixtures = Mixtures(graph, rows, [free, other])
    trees: list[float] = []

    def spied(tree: Relaxation, **given: Any) -> Whole:
        trees.append(given["most_checks"])
        return solve_whole(tree, **given)

    monkeypatch.setattr(mixing, "solve_whole", spied)
    best, rounded = (
        mixtures.cheapest(sum(peaks) / 2, gap=0.0, rounds_only=rounds_only)
        for rounds_only in (False, True)
    )
    assert best is not None and rounded is not None
    assert graph.cost(best) <= graph.cost(rounded)
    assert trees == [inf, inf, FEW_CHECKS, inf, inf]


def test_a_tree_ends_after_so_many_checks_of_its_limits() -> None:
    graph = layered_graph(3, num_layers=40)
    everything = np.ones(graph.num_choices, bool)
    row = rows_of(graph, 3, number=1)[0]
    budget = 0.97 * row.used(solve(graph).choices)

    def pivots(most_checks: float) -> int:
        tree = Relaxation(graph, everything, budget, size=100.0)
        tree.add_row(row)
        solve_whole(tree, gap=0.0, most_checks=most_checks, presolves=False)
        return tree.num_pivots

    assert pivots(1) < pivots(inf)
    assert pivots(1) == pivots(1)


@pytest.mark.parametrize("seed", range(10))
def test_a_priced_graph_costs_what_its_rows_hold_besides(seed: int) -> None:
    graph = small(seed)
    rows = rows_of(graph, seed)
    rng = np.random.default_rng(seed)
    prices = rng.random(len(rows)) * (rng.random(len(rows)) < 0.7)
    priced = price(graph, rows, prices, 5.0)
    for x in every_assignment(graph)[::7]:
        over = sum(m * (row.used(x) - 5.0) for m, row in zip(prices, rows, strict=True))
        assert priced.cost(x) == pytest.approx(graph.cost(x) + over)


def test_many_layers_within_a_budget_are_mixed_to_a_part_of_a_layer() -> None:
    """Prices alone give every layer the one plan or the other."""
    graph = layered_graph(3, num_layers=200)
    rows = rows_of(graph, 3, number=2)
    free = solve(graph)
    used = [row.used(free.choices) for row in rows]
    least = PricedPlans(graph)
    least.add(free.choices)
    bound = least.least_peak(rows, np.array([1.0, 1.0]))
    budget = (max(used) + bound) / 2
    plans = PricedPlans(graph, ArrayPool())
    found = solve_within_rows(graph, rows, budget, gap=1e-2, free=free, plans=plans)
    assert max(row.used(found.choices) for row in rows) <= budget
    assert found.gap <= 1e-2
    assert found.bound > free.bound
    again = solve_within_rows(graph, rows, budget, gap=1e-2, free=free)
    assert (again.choices, again.bound) == (found.choices, found.bound)
    with pytest.raises(Infeasible) as raised:
        solve_within_rows(graph, rows, 0.9 * bound, gap=1e-2, free=free, plans=plans)
    assert 0.9 * bound < raised.value.least_budget_bound <= raised.value.least_budget


def test_the_budget_of_the_graph_itself_is_not_looked_at() -> None:
    graph = replace(small(1), live_sets=((0, 1),), budget=0.0)
    rows = rows_of(graph, 1)
    plans = PricedPlans(replace(graph, budget=None, live_sets=()))
    plans.add([0] * len(graph.nodes))
    assert plans.used(rows).shape == (1, len(rows))


@pytest.mark.parametrize("seed", range(10))
def test_what_prices_proved_bounds_other_budgets_too(seed: int) -> None:
    graph, rows = small(seed), rows_of(small(seed), seed)
    each = [
        (graph.cost(x), max(row.used(x) for row in rows))
        for x in every_assignment(graph)
    ]
    free, most = min(each)
    plans = PricedPlans(graph)
    for part in (0.9, 0.8, 0.95):
        search = Search(graph, 1e-3, 1e9, plans.pool)
        known = plans.known_bound(rows, part * most)
        best = min((cost for cost, held in each if held <= part * most), default=inf)
        assert known <= best + 1e-9 * abs(best)
        assert part == 0.9 or known > -inf
        search.raise_bound(free)
        plans.add(min(every_assignment(graph), key=graph.cost))
        plans.close(search, rows, part * most)
        assert search.bound >= known


def test_a_plan_that_costs_no_more_than_a_known_bound_ends_a_search() -> None:
    graph = small(1)
    best = solve(graph, gap=0.0)
    search = Search(graph, 0.0, 1e9, ArrayPool(), known_bound=best.cost)
    assert not search.is_closed
    search.offer(best.choices)
    assert search.is_closed and search.bound == -inf
    tight = Search(graph, 0.0, 1e9, ArrayPool(), known_bound=0.99 * best.cost - 1e-9)
    tight.offer(best.choices)
    assert not tight.is_closed


@pytest.mark.parametrize("seed", [2, 5, 7, 9, 11, 12, 13, 15])
def test_mixtures_alone_are_within_rows(seed: int) -> None:
    """Of the free plan and one that holds little, without a price."""
    graph = layered_graph(seed, num_layers=12, num_places=1, num_ends=1)
    rows, free = rows_of(graph, seed), solve(graph)
    little = solve(price(graph, rows, np.full(len(rows), 1e3), 0.0)).choices
    plans, known = PricedPlans(graph), [little]
    most, least = (max(r.used(c) for r in rows) for c in (free.choices, little))
    assert least < most
    budget = (least + most) / 2
    found = mix_within_rows(plans, rows, budget, gap=0.03, free=free, known=known)
    assert max(row.used(found.choices) for row in rows) <= budget * (1 + 1e-9)
    assert free.cost <= found.cost <= graph.cost(little)
    assert found.bound == free.bound
    size = graph.nodes[0].costs.size
    never = MemoryRow((0,), (np.full(size, 5.0),), 0.0)
    with pytest.raises(Infeasible):
        mix_within_rows(plans, [*rows, never], 4.0, gap=0.03, free=free)


@pytest.mark.parametrize("seed", range(4))
def test_what_the_pool_forgets_is_made_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = layered_graph(seed, num_layers=12, num_places=1, num_ends=1)
    expected = solve(graph, folds=False)
    monkeypatch.setattr(array_pool, "MOST_BYTES", 0)
    found = solve(graph, folds=False)
    assert (found.cost, found.bound) == (expected.cost, expected.bound)
