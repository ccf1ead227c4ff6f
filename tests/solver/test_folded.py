"""Folding equal layers: what is found is there, and every bound is one of the whole."""

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest

from autopar.solver import ChoiceGraph, Edge, Node, solve
from autopar.solver.array_pool import ArrayPool
from autopar.solver.folded import solve_folded
from autopar.solver.free import solve_free
from autopar.solver.layers import TiedMessages, fold
from autopar.solver.messages import Passing
from autopar.solver.repeats import Repeats, find_repeats
from autopar.solver.search import Search
from tests.solver.drawn import drawn
from tests.solver.layered_graphs import layered_graph, least_cost
from tests.solver.long_graphs import train_step_graph

SHAPES: tuple[dict[str, Any], ...] = (
    {"num_layers": 12, "num_places": 1, "num_ends": 1},
    {"num_layers": 8, "num_places": 1, "num_choices": 3, "num_ends": 1},
    {"num_layers": 8, "num_places": 2, "num_ends": 1},
    {"num_layers": 8, "num_places": 2, "num_ends": 1, "backwards": True},
    {"num_layers": 8, "num_places": 2, "num_ends": 1, "shared": True},
    {"num_layers": 8, "num_places": 2, "num_ends": 1, "forbidden": 0.05},
)


def _folded(graph: ChoiceGraph) -> Search:
    search = Search(graph, 1e-4, 30.0, ArrayPool())
    solve_folded(search, solve_free, fewest_nodes=0)
    return search


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@drawn(9, 36)
def test_bound_and_plan_beside_brute_force(shape: int, seeds: range) -> None:
    """bound <= brute force <= plan; most instances are folded, many closed."""
    num_folded = num_closed = 0
    for seed in seeds:
        graph = layered_graph(seed, **SHAPES[shape])
        best = least_cost(graph)
        if best == inf:
            continue
        search = _folded(graph)
        assert search.bound <= best * (1 + 1e-9)
        assert search.cost >= best * (1 - 1e-9)
        num_folded += bool(search.phases)
        num_closed += search.is_closed
        if search.choices is not None:
            assert graph.cost(search.choices) == search.cost
        if not search.is_closed:
            solve_free(search)
            assert search.bound <= best * (1 + 1e-9)
            assert best * (1 - 1e-9) <= search.cost <= best * (1 + 2e-4)
    assert num_folded >= 25 / 36 * len(seeds)
    assert num_closed >= 8 / 36 * len(seeds)


@drawn(10, 30)
def test_the_bound_holds_for_any_messages(seeds: range) -> None:
    num_folded = 0
    for seed in seeds:
        graph = layered_graph(seed, num_layers=8, num_ends=1, backwards=seed % 2 > 0)
        pool = ArrayPool()
        repeats = find_repeats(graph, pool)
        if repeats is None:
            continue
        num_folded += 1
        layers = fold(graph, repeats, pool)
        passing = Passing(layers.ring)
        rng = np.random.default_rng(seed)
        num = layers.ring.num_choices
        passing.state[num:] = rng.normal(0, 3, passing.state.size - num)
        bounded = layers.ends_with(TiedMessages.of(layers, passing))
        bound = solve(bounded, gap=0.0, folds=False).bound
        assert bound <= least_cost(graph) + 1e-9
    assert num_folded >= len(seeds) / 2


@pytest.mark.slow
def test_layers_of_a_train_step_are_found_and_folding_is_exact() -> None:
    graph = train_step_graph(14, (4,))
    repeats = find_repeats(graph, ArrayPool())
    assert repeats is not None and len(repeats.layers) >= 6
    _check_isomorphic(graph, repeats)
    whole, folded = solve(graph, folds=False), solve(graph)
    assert folded.bound <= whole.cost and whole.bound <= folded.cost
    assert folded.cost <= whole.cost * (1 + 1e-4)
    assert any(phase.name == "ring" for phase in folded.phases)


def test_layers_that_alternate_fold_in_pairs() -> None:
    graph = layered_graph(3, num_layers=24, num_places=2)
    nodes = list(graph.nodes)
    for layer in range(0, 24, 2):  # every second layer has another operator
        node = nodes[2 + layer]
        nodes[2 + layer] = replace(node, costs=node.costs[::-1] + 1.0)
    graph = replace(graph, nodes=tuple(nodes))
    repeats = find_repeats(graph, ArrayPool())
    assert repeats is not None and repeats.layers.shape[1] == 4
    _check_isomorphic(graph, repeats)
    exact = solve(graph, gap=0.0, folds=False)
    search = _folded(graph)
    assert search.bound <= exact.cost + 1e-9 and search.cost >= exact.cost - 1e-9


def test_one_odd_layer_ends_the_run() -> None:
    graph = layered_graph(4, num_layers=20, num_places=2)
    odd = 2 + 14
    nodes = list(graph.nodes)
    nodes[odd] = replace(nodes[odd], costs=nodes[odd].costs + np.array([0.0, 5.0]))
    graph = replace(graph, nodes=tuple(nodes))
    repeats = find_repeats(graph, ArrayPool())
    assert repeats is not None
    assert odd not in repeats.layers
    _check_isomorphic(graph, repeats)


def test_equal_layers_that_nothing_joins_are_left_to_the_full_solver() -> None:
    matrix, classes = np.array([[0.0, 3.0], [2.0, 1.0]]), np.arange(2)
    pair = [Node("n", np.array(costs), np.zeros(2)) for costs in ([1.0, 0.0], [0.0, 2])]
    edges = [Edge(2 * i, 2 * i + 1, classes, classes, matrix) for i in range(40)]
    graph = ChoiceGraph(tuple(40 * pair), tuple(edges))
    assert find_repeats(graph, ArrayPool()) is not None
    assert _folded(graph).choices is None
    assert solve(graph, gap=0.0).cost == 40.0


def test_graphs_without_equal_layers_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    graph = layered_graph(5, num_layers=12)
    nodes = tuple(replace(n, costs=rng.random(n.costs.size)) for n in graph.nodes)
    graph = replace(graph, nodes=nodes)
    assert find_repeats(graph, ArrayPool()) is None
    search = _folded(graph)
    assert search.choices is None and search.bound == -inf


def _check_isomorphic(graph: ChoiceGraph, repeats: Repeats) -> None:
    """Every layer has the costs and the edges of the one before."""
    layer, place = {}, {}
    for number, nodes in enumerate(repeats.layers.tolist()):
        for at, node in enumerate(nodes):
            layer[node], place[node] = number, at
    for nodes in repeats.layers.T.tolist():
        first = graph.nodes[nodes[0]].costs
        assert all(np.array_equal(graph.nodes[v].costs, first) for v in nodes)
    edges: dict[tuple[int, int], list[tuple[object, ...]]] = {}
    for edge in graph.edges:
        if edge.first in layer and edge.second in layer:
            ends = sorted((layer[edge.first], layer[edge.second]))
            content = (
                *(place[edge.first], place[edge.second]),
                edge.first_class.tobytes(),
                edge.second_class.tobytes(),
                edge.costs.tobytes(),
            )
            edges.setdefault((ends[0], ends[1] - ends[0]), []).append(content)
    for (number, apart), content in edges.items():
        assert apart <= 1
        if (number - 1, apart) in edges:
            assert sorted(content) == sorted(edges[number - 1, apart])
