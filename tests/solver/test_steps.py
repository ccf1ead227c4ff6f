"""Each exact step keeps the optimum, and its way back keeps cost and bounds."""

from itertools import pairwise, product
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.solver.array_pool import ArrayPool
from autopar.solver.choice_graph import ChoiceGraph, Edge, Infeasible, Node
from autopar.solver.descent import Descent
from autopar.solver.likely import improve_among_likely
from autopar.solver.messages import Passing, sweep_order
from autopar.solver.reduce import BestChoice, Reduced, reduce
from tests.solver.brute_force import brute_force
from tests.solver.random_graphs import random_graph

seeds = st.integers(0, 10**6)
densities = st.sampled_from([0.3, 0.6, 1.0])


def optimum(graph: ChoiceGraph) -> float:
    """The optimal cost; inf where nothing is allowed or nothing fits."""
    try:
        return brute_force(graph).cost
    except Infeasible:
        return inf


def true_marginals(graph: ChoiceGraph) -> list[np.ndarray]:
    """The least cost of the plans that make each choice."""
    marginals = [np.full(node.costs.size, inf) for node in graph.nodes]
    for choices in product(*(range(m.size) for m in marginals)):
        cost = graph.cost(choices)
        for marginal, choice in zip(marginals, choices, strict=True):
            marginal[choice] = min(marginal[choice], cost)
    return marginals


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


@given(seeds, densities)
def test_reduce_keeps_the_optimum(seed: int, density: float) -> None:
    graph = random_graph(seed, num_nodes=5, density=density, forbidden=0.03)
    best = optimum(graph)
    try:
        reduced = reduce(graph)
    except Infeasible:
        assert best == inf
        return
    assert optimum(reduced.graph) == pytest.approx(best)
    if best < inf:
        plan = reduced.expand(brute_force(reduced.graph).choices)
        assert graph.cost(plan) == pytest.approx(best)


@pytest.mark.parametrize("density", [0.3, 0.6])
def test_reduce_alone_solves_trees_and_rings(density: float) -> None:
    graph = random_graph(1, num_nodes=6, density=density / 3, forbidden=0, num_copies=0)
    assert not reduce(graph).graph.nodes


@given(seeds, densities, st.integers(1, 8))
def test_messages_bound_every_choice(seed: int, density: float, rounds: int) -> None:
    graph = random_graph(seed, num_nodes=5, density=density, forbidden=0.03)
    reduced = _reduce_or_none(graph)
    if reduced is None or optimum(reduced.graph) == inf:
        return
    found = Passing(reduced.graph).run(0.0, max_rounds=rounds)
    best = optimum(reduced.graph)
    assert found.bound <= best + 1e-9 <= found.cost + 2e-9
    truths = true_marginals(reduced.graph)
    for bounds, truth in zip(found.marginals, truths, strict=True):
        assert (bounds <= truth + 1e-9).all()


@given(seeds, densities)
def test_sweeps_visit_every_node_once(seed: int, density: float) -> None:
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


@given(seeds)
def test_the_best_of_likely_choices_never_costs_more(seed: int) -> None:
    graph = random_graph(seed, num_nodes=6, forbidden=0.03, density=0.8)
    if optimum(graph) == inf:
        return
    truths = true_marginals(graph)
    start = brute_force(graph).choices
    worst = [int(np.where(t < inf, t, -inf).argmax()) for t in truths]
    for plan in (start, tuple(worst)):
        found = improve_among_likely(
            *(graph, plan, truths, ArrayPool()), gap=0.0, work_limit=5.0
        )
        assert graph.cost(found) <= graph.cost(plan) + 1e-9
        if graph.cost(plan) < inf:  # all choices of so small a graph are likely
            assert graph.cost(found) == pytest.approx(optimum(graph))


@given(seeds)
def test_descent_never_costs_more(seed: int) -> None:
    graph = random_graph(seed, num_nodes=8, forbidden=0.02, density=0.8)
    start = [0] * len(graph.nodes)
    cost = graph.cost(start)
    down = Descent(graph).improve(start)
    assert graph.cost(down) <= cost


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
