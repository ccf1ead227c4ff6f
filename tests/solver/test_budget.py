"""The price loop: brute force where that can be had, else all rows at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import highspy
import numpy as np
import pytest

from autopar.solver import ChoiceGraph, Edge, Node, solve
from autopar.solver.budget import (
    Found,
    Within,
    least_memory,
    prices_of_rows,
    solve_within,
)
from autopar.solver.budget_constraints import BudgetRow, priced
from tests.marks import slow
from tests.solver.brute_force import every_cost
from tests.solver.drawn import drawn
from tests.solver.layered_graphs import layered_graph
from tests.solver.random_graphs import random_graph
from tests.solver.valid_graph import assert_valid


@dataclass
class Oracle:
    """The most of all rows, of which it tells the few that are fullest."""

    graph: ChoiceGraph
    rows: Sequence[BudgetRow]
    most: int = 2
    looked: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, choices: tuple[int, ...]) -> Found:
        self.looked.append(choices)
        used = np.array([row.used(self.graph, choices) for row in self.rows])
        fullest = np.argsort(-used, kind="stable")[: self.most].tolist()
        told = tuple(self.rows[index] for index in fullest)
        return Found(choices, self.graph.cost(choices), float(used.max()), told)


def rows_of(graph: ChoiceGraph, seed: int, number: int = 4) -> list[BudgetRow]:
    """Rows in which what is alike holds alike, on some nodes and edges."""
    rng = np.random.default_rng(seed)
    arrays: dict[tuple[int, int], np.ndarray] = {}

    def held(row: int, like: np.ndarray) -> np.ndarray:
        drawn = rng.integers(0, 6, like.shape).astype(float)
        return arrays.setdefault((row, id(like)), drawn)

    rows = []
    for row in range(number):
        nodes = np.flatnonzero(rng.random(len(graph.nodes)) < 0.8)
        edges = np.flatnonzero(rng.random(len(graph.edges)) < 0.4)
        own = [held(row, graph.nodes[v].costs) for v in nodes.tolist()]
        pairs = [held(row, graph.edges[e].costs) for e in edges.tolist()]
        constant = float(rng.integers(-3, 4))
        rows.append(BudgetRow(nodes, own, edges, pairs, constant))
    return rows


def small(seed: int) -> ChoiceGraph:
    if seed % 2:
        return layered_graph(seed, num_layers=6, num_places=1, num_ends=1)
    return random_graph(seed, num_nodes=6, forbidden=0.0, num_copies=0)


def all_plans(graph: ChoiceGraph) -> np.ndarray:
    return np.argwhere(every_cost(graph) < np.inf)


def within(graph: ChoiceGraph, oracle: Oracle, budget: float) -> Within:
    return solve_within(graph, budget, oracle, free=solve(graph))


@dataclass
class ChangingOracle(Oracle):
    """Some bytes are held only beside some choices of another node.

    A row says what is held beside those of its own plan.
    """

    def __call__(self, choices: tuple[int, ...]) -> Found:
        told = []
        self.looked.append(choices)
        for number, row in enumerate(self.rows):
            held = [
                own if self.is_held(number, v, choices) else np.zeros_like(own)
                for v, own in zip(row.nodes.tolist(), row.node_bytes, strict=True)
            ]
            told.append(replace(row, node_bytes=held))
        used = np.array([row.used(self.graph, choices) for row in told])
        fullest = np.argsort(-used, kind="stable")[: self.most].tolist()
        rows = tuple(told[index] for index in fullest)
        return Found(choices, self.graph.cost(choices), float(used.max()), rows)

    def used_by(self, plans: np.ndarray) -> np.ndarray:
        """The most that each of `plans` holds."""
        used = []
        for number, row in enumerate(self.rows):
            held = row.used_by(self.graph, plans)
            for node, own in zip(row.nodes.tolist(), row.node_bytes, strict=True):
                is_held = self.is_held(number, node, plans.T)
                held = held - np.where(is_held, 0.0, own[plans[:, node]])
            used.append(held)
        return np.max(used, axis=0)

    def is_held(
        self, row: int, node: int, choices: Sequence[int] | np.ndarray
    ) -> bool | np.ndarray:
        other = (3 * node + 5 * row + 1) % len(choices)
        return node % 3 > 0 or other == node or choices[other] % 2 == row % 2


@pytest.mark.parametrize("seed", range(4))
def test_a_priced_graph_costs_what_its_rows_hold(seed: int) -> None:
    graph = small(seed)
    row, other, *_ = rows_of(graph, seed)
    twice = BudgetRow(
        *(np.append(row.nodes, row.nodes[0]), [*row.node_bytes, -row.node_bytes[0]]),
        *(np.append(row.edges, row.edges), [*row.edge_bytes, *row.edge_bytes]),
    )
    rows, prices = [row, other, twice], np.array([2.0, 0.0, 0.5])
    costly = priced(graph, rows, prices)
    assert_valid(costly)
    for plan in all_plans(graph)[::37].tolist():
        held = sum(m * r.used(graph, plan) for m, r in zip(prices, rows, strict=True))
        assert costly.cost(plan) == pytest.approx(graph.cost(plan) + held)


def test_equal_layers_stay_equal_at_prices() -> None:
    graph = layered_graph(1, num_layers=40, num_places=2)
    node, edge = np.array([1.0, 2.0]), np.ones((2, 2))
    every = np.arange(len(graph.nodes)), np.arange(len(graph.edges))
    row = BudgetRow(every[0], [node] * every[0].size, every[1], [edge] * every[1].size)
    types = priced(graph, [row, row], np.array([1.0, 2.0])).types
    assert len(types.node_of) == len(graph.types.node_of)
    assert len(types.edge_of) == len(graph.types.edge_of)


@drawn(8, 24)
def test_small_problems_are_near_brute_force(seeds: range) -> None:
    ratios = []
    for seed in seeds:
        graph = small(seed)
        oracle, every = Oracle(graph, rows_of(graph, seed)), all_plans(graph)
        used = np.max([row.used_by(graph, every) for row in oracle.rows], axis=0)
        costs = every_cost(graph)[tuple(every.T)]
        budget = float(np.quantile(used, 0.2))
        found = within(graph, oracle, budget)
        assert found.best is not None and found.best.bytes <= budget
        assert len(set(oracle.looked)) == len(oracle.looked) <= 20
        ratios.append(found.best.cost / costs[used <= budget].min())
        least = least_memory(graph, oracle, starts=[solve(graph).choices])
        assert least.bytes <= used.min() * 1.25
    assert np.mean(ratios) <= 1.03
    assert np.median(ratios) == 1.0


def test_prices_of_terabytes() -> None:
    """Rows of a plan that needs 2.5 TB a device, of which HiGHS gave up."""
    rows = np.load(Path(__file__).parent / "terabytes.npz")
    used, limit = rows["used"], rows["limit"]
    prices = prices_of_rows(np.zeros(used.shape[1]), 1.0, used, limit)
    assert prices.sum() == pytest.approx(1.0)  # what is lacking costs as much
    lacking = prices @ used - prices @ limit  # by the duals: at least, of every plan
    assert 0 < lacking.min() <= (used - limit[:, None]).max(0).min()


@drawn(8, 24)
def test_rows_that_are_exact_for_their_own_plan_only_are_enough(seeds: range) -> None:
    ratios = []
    for seed in seeds:
        graph = small(seed)
        oracle = ChangingOracle(graph, rows_of(graph, seed))
        every = all_plans(graph)
        used = oracle.used_by(every)
        assert used[0] == oracle(tuple(every[0].tolist())).bytes
        oracle.looked.clear()
        budget = float(np.quantile(used, 0.2))
        best = every_cost(graph)[tuple(every[used <= budget].T)].min()
        found = within(graph, oracle, budget)
        assert len(set(oracle.looked)) == len(oracle.looked) <= 40
        if found.best is not None:
            assert found.best.bytes <= budget
            ratios.append(found.best.cost / best)
    assert len(ratios) >= len(seeds) - 2  # of rows that are mostly wrong elsewhere
    assert np.mean(ratios) <= 1.1
    assert np.median(ratios) == 1.0


def test_nothing_fits_below_the_least() -> None:
    graph = small(1)
    oracle = Oracle(graph, rows_of(graph, 1))
    used = [row.used_by(graph, all_plans(graph)) for row in oracle.rows]
    least = float(np.max(used, axis=0).min())
    found = within(graph, oracle, least - 1.0)
    assert found.best is None
    assert found.least.bytes == least
    assert len(oracle.looked) <= 10


def layers(seed: int, num_layers: int) -> tuple[ChoiceGraph, list[BudgetRow]]:
    """A chain of layers whose nodes hold less where they cost more; many points.

    What a layer keeps is held until the same layer is reached on the way back.
    """
    rng = np.random.default_rng(seed)
    places, choices = 4, 5
    part = np.sort(rng.random((places, choices)), axis=1)
    bytes_of = [8.0 * (1 - own) + 1.0 for own in part]
    own = [1.0 + 2.0 * each + rng.random(choices) for each in part]
    inside, between = rng.random((2, places, choices, choices)) * 2.0
    classes = np.arange(choices)
    index = np.arange(num_layers * places).reshape(num_layers, places)
    nodes = [Node("n", own[p], bytes_of[p]) for _ in index for p in range(places)]
    edges = []
    for layer in range(num_layers):
        for p in range(places - 1):
            ends = int(index[layer, p]), int(index[layer, p + 1])
            edges.append(Edge(*ends, classes, classes, inside[p]))
        if layer:
            ends = int(index[layer - 1, -1]), int(index[layer, 0])
            edges.append(Edge(*ends, classes, classes, between[0]))
    copies, rows = rng.random((places, choices, choices)) * 4.0, []
    for layer in range(num_layers):
        for p in range(places - 1):
            live = [*index[: layer + 1].reshape(-1), *index[layer:, 3]]
            edge = layer * places + p - (layer > 0) * 0
            at = np.array(live, np.intp)
            held = [bytes_of[v % places] for v in at.tolist()]
            both = np.array([edge], np.intp)
            rows.append(
                BudgetRow(at, held, both, [copies[p]], 2.0 * (num_layers - layer))
            )
    return ChoiceGraph(tuple(nodes), tuple(edges)), rows


def least_with_all_rows(
    graph: ChoiceGraph, rows: Sequence[BudgetRow], budget: float
) -> float:
    """The integer program with every row at once."""
    model: Any = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("mip_rel_gap", 1e-3)
    x = [[model.addBinary(float(c)) for c in node.costs] for node in graph.nodes]
    for own in x:
        model.addConstr(sum(own) == 1)
    y = []
    for edge in graph.edges:
        pairs = [[model.addVariable(0, 1, float(c)) for c in row] for row in edge.costs]
        for a, row in enumerate(pairs):
            model.addConstr(sum(row) == x[edge.first][a])
        for b, column in enumerate(zip(*pairs, strict=True)):
            model.addConstr(sum(column) == x[edge.second][b])
        y.append(pairs)
    for row in rows:
        terms = [
            float(h) * v
            for node, held in zip(row.nodes.tolist(), row.node_bytes, strict=True)
            for h, v in zip(held, x[node], strict=True)
        ]
        for edge, held in zip(row.edges.tolist(), row.edge_bytes, strict=True):
            terms += [
                float(held[i, j]) * y[edge][i][j] for i, j in np.ndindex(*held.shape)
            ]
        model.addConstr(sum(terms) <= budget - row.constant)
    model.run()
    return float(model.getInfo().objective_function_value)


@pytest.mark.parametrize(
    ("seeds", "num_layers"),
    [(range(1), 3), slow(range(2), 6)],
)
def test_layers_are_within_one_percent_of_all_rows_at_once(
    seeds: range, num_layers: int
) -> None:
    ratios, looks = [], []
    for seed in seeds:
        graph, rows = layers(seed, num_layers)
        oracle = Oracle(graph, rows, most=4)
        free = solve(graph)
        peak = oracle(free.choices).bytes
        for part in (0.85, 0.7):
            oracle.looked.clear()
            found = solve_within(graph, part * peak, oracle, free=free)
            best = least_with_all_rows(graph, rows, part * peak)
            assert found.best is not None
            ratios.append(found.best.cost / best)
            looks.append(len(oracle.looked))
    assert np.mean(ratios) <= 1.01
    assert max(ratios) <= 1.03
    assert np.mean(looks) <= 10
