"""Each exact step keeps the optimum, and its way back keeps cost and bounds."""

from itertools import cycle, pairwise
from math import inf

import numpy as np
import pytest

from autopar.solver.array_pool import ArrayPool
from autopar.solver.choice_graph import ChoiceGraph, Edge, Infeasible, Node
from autopar.solver.descent import Descent
from autopar.solver.likely import improve_among_likely
from autopar.solver.messages import Passing, sweep_order
from autopar.solver.reduce import BestChoice, Reduced, reduce
from tests.solver.brute_force import brute_force, every_cost
from tests.solver.drawn import drawn
from tests.solver.layered_graphs import layered_graph
from tests.solver.random_graphs import random_graph

DENSITIES = (0.3, 0.6, 1.0)


def optimum(graph: ChoiceGraph) -> float:
    """The optimal cost; inf where nothing is allowed or nothing fits."""
    try:
        return brute_force(graph).cost
    except Infeasible:
        return inf


def true_marginals(graph: ChoiceGraph) -> list[np.ndarray]:
    """The least cost of the plans that make each choice."""
    total, axes = every_cost(graph), range(len(graph.nodes))
    return [total.min(axis=tuple(a for a in axes if a != node)) for node in axes]


@pytest.mark.parametrize("num_leaves", [0, 1, 2])
def test_a_node_that_is_forbidden_is_named_however_many_neighbours_it_has(
    num_leaves: int,
) -> None:
    nodes = [Node("forbidden", np.full(2, inf), np.zeros(2))]
    nodes += [Node("free", np.arange(2.0), np.zeros(2)) for _ in range(num_leaves)]
    same = np.arange(2)
    edges = [Edge(0, i + 1, same, same, np.eye(2)) for i in range(num_leaves)]
    with pytest.raises(Infeasible, match="forbidden"):
        reduce(ChoiceGraph(tuple(nodes), tuple(edges)))


@drawn(36, 108)
def test_reduce_keeps_the_optimum(seeds: range) -> None:
    num_reduced = 0
    for seed, density in zip(seeds, cycle(DENSITIES), strict=False):
        graph = random_graph(seed, num_nodes=5, density=density, forbidden=0.03)
        best = optimum(graph)
        reduced = _reduce_or_none(graph)
        if reduced is None:
            assert best == inf
            continue
        assert optimum(reduced.graph) == pytest.approx(best)
        if best < inf:
            num_reduced += 1
            plan = reduced.expand(brute_force(reduced.graph).choices)
            assert graph.cost(plan) == pytest.approx(best)
    assert num_reduced > len(seeds) / 2


@pytest.mark.parametrize("density", [0.3, 0.6])
def test_reduce_alone_solves_trees_and_rings(density: float) -> None:
    graph = random_graph(1, num_nodes=6, density=density / 3, forbidden=0, num_copies=0)
    assert not reduce(graph).graph.nodes


@drawn(32, 96)
def test_messages_bound_every_choice(seeds: range) -> None:
    num_bounded = 0
    for seed in seeds:
        graph = layered_graph(
            *(seed,), num_layers=3, num_ends=1, shared=seed % 2 > 0, forbidden=0.05
        )
        best = optimum(graph)
        if best == inf:
            continue
        num_bounded += 1
        found = Passing(graph)
        found.run(0.0, max_rounds=1 + seed % 8)
        assert found.bound <= best + 1e-9 <= found.best_cost + 2e-9
        truths = true_marginals(graph)
        for bounds, truth in zip(found.marginals(), truths, strict=True):
            assert (bounds <= truth + 1e-9).all()
    assert num_bounded > len(seeds) / 2


@drawn(15, 90)
def test_sweeps_visit_every_node_once(seeds: range) -> None:
    for seed, density in zip(seeds, cycle(DENSITIES), strict=False):
        graph = random_graph(seed, density=density / 2)
        assert sorted(sweep_order(graph)) == list(range(len(graph.nodes)))


def test_sweeps_run_along_a_chain_whatever_its_numbering() -> None:
    node, both = Node("n", np.zeros(2), np.zeros(2)), np.arange(2)
    chain = [3, 0, 4, 1, 2]
    edges = [Edge(u, v, both, both, np.eye(2)) for u, v in pairwise(chain)]
    order = sweep_order(ChoiceGraph((node,) * 5, tuple(edges)))
    assert order in (chain, chain[::-1])


def test_of_equal_choices_the_one_taken_is_undominated() -> None:
    """Where a neighbour's choice makes two equal, as if dominated ones were gone."""
    costs, same = np.array([1.0, 0.0]), np.arange(2)
    matrix = np.array([[0.0, 5.0], [1.0, 1.0]])  # the second is never worse
    assert BestChoice(costs, same, matrix).given((0,)) == 1
    assert BestChoice(costs, same, np.array([[0.0, 0.0], [1.0, 1.0]])).given((0,)) == 1
    crossed = np.array([[0.0, 0.0, 2.0], [1.0, 3.0, 1.0]])  # neither dominates
    assert [BestChoice(costs, same, crossed).given((k,)) for k in range(3)] == [0, 0, 1]


@drawn(30, 100)
def test_the_best_of_likely_choices_never_costs_more(seeds: range) -> None:
    num_worse = 0
    for seed in seeds:
        graph = random_graph(seed, num_nodes=6, forbidden=0.03, density=0.8)
        if optimum(graph) == inf:
            continue
        truths = true_marginals(graph)
        start = brute_force(graph).choices
        worst = [int(np.where(t < inf, t, -inf).argmax()) for t in truths]
        for plan in (start, tuple(worst)):
            found = improve_among_likely(
                *(graph, plan, truths, ArrayPool()), gap=0.0, work_limit=5.0
            )
            cost = graph.cost(plan)
            assert graph.cost(found) <= cost + 1e-9
            if cost < inf:  # all choices of so small a graph are likely
                num_worse += cost > optimum(graph)
                assert graph.cost(found) == pytest.approx(optimum(graph))
    assert num_worse > len(seeds) / 4


@drawn(30, 100)
def test_descent_never_costs_more(seeds: range) -> None:
    num_better = 0
    for seed in seeds:
        graph = random_graph(seed, num_nodes=8, forbidden=0.02, density=0.8)
        start = [0] * len(graph.nodes)
        cost = graph.cost(start)
        down = Descent(graph).improve(start)
        assert graph.cost(down) <= cost
        num_better += graph.cost(down) < cost
    assert num_better > len(seeds) / 2


def test_equal_arrays_are_reduced_once() -> None:
    pool = ArrayPool()
    calls: list[int] = []

    def kernel(array: np.ndarray) -> np.ndarray:
        calls.append(1)
        return array + 1

    results = [pool.call(kernel, pool.intern(np.arange(3.0))) for _ in range(5)]
    assert len(calls) == 1 and all(result is results[0] for result in results)


def _reduce_or_none(graph: ChoiceGraph) -> Reduced | None:
    try:
        return reduce(graph)
    except Infeasible:
        return None
