"""The best assignment near a known one is what brute force finds there."""

from dataclasses import replace

import numpy as np
import pytest

from autopar.solver.array_pool import ArrayPool
from autopar.solver.brute_force import brute_force
from autopar.solver.choice_graph import ChoiceGraph, Infeasible, Node
from autopar.solver.clock import Clock
from autopar.solver.memory_rows import live_row
from autopar.solver.near import Neighbourhoods, best_near
from tests.solver.random_graphs import random_graph, with_budget


def instance(seed: int) -> ChoiceGraph:
    graph = random_graph(seed, num_nodes=6, forbidden=0.0, num_live_sets=3)
    return with_budget(graph, 0.5)


def any_that_fits(
    graph: ChoiceGraph, rng: np.random.Generator, *, fits: bool = True
) -> tuple[int, ...] | None:
    every = list(np.ndindex(*(node.costs.size for node in graph.nodes)))
    fitting = [
        each
        for each in every
        if graph.is_within_budget(each) == fits and graph.cost(each) < np.inf
    ]
    return tuple(map(int, rng.choice(fitting))) if fitting else None


def held(graph: ChoiceGraph, choices: tuple[int, ...], free: np.ndarray) -> ChoiceGraph:
    """Every node that is not free forbids all choices but its own."""
    nodes = []
    for v, node in enumerate(graph.nodes):
        others = (np.arange(node.costs.size) != choices[v]) & (not free[v])
        nodes.append(Node(node.name, np.where(others, np.inf, node.costs), node.bytes))
    return replace(graph, nodes=tuple(nodes))


def near(
    graph: ChoiceGraph, start: tuple[int, ...], free: np.ndarray
) -> tuple[int, ...] | None:
    assert graph.budget is not None
    rows = [live_row(graph, live) for live in range(len(graph.live_sets))]
    place = graph, start, free, rows, graph.budget
    return best_near(*place, gap=1e-6, pool=ArrayPool(Clock()))


def test_what_is_found_near_is_the_best_there() -> None:
    num_found = 0
    for seed in range(60):
        graph, rng = instance(seed), np.random.default_rng(seed)
        start, free = any_that_fits(graph, rng), rng.random(len(graph.nodes)) < 0.6
        if start is None:
            continue
        best = brute_force(held(graph, start, free))
        found = near(graph, start, free)
        if found is None:
            assert best.cost == pytest.approx(graph.cost(start)), seed
            continue
        num_found += 1
        assert graph.cost(found) == pytest.approx(best.cost), seed
        assert graph.is_within_budget(found), seed
        assert all(free[v] or found[v] == start[v] for v in range(len(start))), seed
    assert num_found >= 30


def test_near_what_does_not_fit_the_best_that_does_is_found() -> None:
    num_found = 0
    for seed in range(60):
        graph, rng = instance(seed), np.random.default_rng(seed)
        start = any_that_fits(graph, rng, fits=False)
        free = rng.random(len(graph.nodes)) < 0.8
        if start is None:
            continue
        assert graph.budget is not None
        rows = [live_row(graph, live) for live in range(len(graph.live_sets))]
        place = graph, start, free, rows, graph.budget
        told = {"gap": 1e-6, "pool": ArrayPool(Clock())}
        found = best_near(*place, **told, below=np.inf)
        try:
            best = brute_force(held(graph, start, free))
        except Infeasible:
            assert found is None, seed
            continue
        assert found is not None, seed
        assert graph.cost(found) == pytest.approx(best.cost), seed
        assert graph.is_within_budget(found), seed
        assert best_near(*place, **told, below=best.cost) is None, seed
        num_found += 1
    assert num_found >= 15


def test_a_neighbourhood_is_what_edges_reach_first() -> None:
    graph = random_graph(3, num_nodes=12)
    around = Neighbourhoods(graph)
    is_near, is_wider = around.around(5, 3), around.around(5, 99)
    assert is_near[5] and (is_near <= is_wider).all()
    assert np.count_nonzero(is_near & around.is_open) == 3
    touching = {edge.second for edge in graph.edges if edge.first == 5}
    touching |= {edge.first for edge in graph.edges if edge.second == 5}
    assert touching & set(np.flatnonzero(is_near).tolist())
    assert touching <= set(np.flatnonzero(is_wider).tolist())


def test_nothing_free_is_nothing_better() -> None:
    graph = instance(1)
    start = any_that_fits(graph, np.random.default_rng(0))
    assert start is not None
    assert near(graph, start, np.zeros(len(graph.nodes), bool)) is None
