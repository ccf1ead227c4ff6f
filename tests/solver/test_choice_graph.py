"""The format: what it costs, what it holds, what it refuses, how it prints."""

from math import inf

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph, Edge, Node
from tests.solver.shared_copies import shared_copy
from tests.solver.valid_graph import assert_valid


def node(*costs: float, held: tuple[float, ...] | None = None) -> Node:
    return Node("n", np.array(costs), np.array(held or [0.0] * len(costs)))


def edge(first: int, second: int, costs: list[list[float]]) -> Edge:
    matrix = np.array(costs)
    rows, columns = map(np.arange, matrix.shape)
    return Edge(first, second, rows, columns, matrix)


def test_cost_adds_nodes_parallel_edges_and_the_constant() -> None:
    graph = ChoiceGraph(
        (node(1, 2), node(3, 5)),
        (edge(0, 1, [[0, 1], [2, 3]]), edge(1, 0, [[10, 20], [30, inf]])),
        constant=100.0,
    )
    assert_valid(graph)
    assert graph.cost((1, 0)) == 100 + 2 + 3 + 2 + 20
    assert graph.cost((1, 1)) == inf


def test_a_graph_without_edges_costs_what_its_nodes_do() -> None:
    graph = ChoiceGraph((node(1.0, 2.0), node(3.0, 4.0)), ())
    assert graph.cost([1, 0]) == 5.0


def test_a_shared_copy_is_paid_once() -> None:
    producer, readers = node(0.0), [node(9.0, 0.0), node(9.0, 0.0)]
    needs = np.array([False, True])
    edges = shared_copy(
        0, [(1, needs), (2, needs)], np.array([5.0]), np.array([0]), copy=3
    )
    graph = ChoiceGraph((producer, *readers, node(0.0, 0.0)), edges)
    assert graph.cost((0, 1, 1, 1)) == 5
    assert graph.cost((0, 1, 0, 0)) == inf


def test_prints_on_one_screen() -> None:
    graph = ChoiceGraph((node(0.0, 1.0),) * 500, ())
    assert len(str(graph).splitlines()) < 40
    assert "500 nodes, 1000 choices" in str(graph)
