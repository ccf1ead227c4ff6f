"""Small random choice graphs, and a long one shaped like a train step."""

from math import inf

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph, Edge, Node
from tests.solver.shared_copies import shared_copy
from tests.solver.valid_graph import assert_valid


def random_graph(
    seed: int,
    *,
    num_nodes: int = 7,
    most_choices: int = 4,
    density: float = 0.5,
    num_copies: int = 1,
    forbidden: float = 0.1,
) -> ChoiceGraph:
    """Integer costs (so ties abound), parallel edges, forbidden entries, copies."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, most_choices + 1)) for _ in range(num_nodes)]
    nodes = [
        Node(f"n{v}", _holes(rng, rng.integers(0, 9, k), forbidden), _bytes(rng, k))
        for v, k in enumerate(sizes)
    ]
    edges = [
        _random_edge(rng, first, second, sizes, forbidden)
        for first in range(num_nodes)
        for second in range(num_nodes)
        if first != second and rng.random() < density / 2
    ]
    for copy in range(num_nodes, num_nodes + num_copies):
        nodes.append(Node(f"copy{copy}", np.zeros(2), np.array([0.0, 3.0])))
        producer, *readers = (int(v) for v in rng.permutation(num_nodes)[:4])
        edges += shared_copy(
            producer,
            [(v, rng.random(sizes[v]) < 0.5) for v in readers],
            rng.integers(0, 9, sizes[producer]).astype(float),
            np.arange(sizes[producer]),
            copy,
        )
    graph = ChoiceGraph(tuple(nodes), tuple(edges), constant=2.0)
    assert_valid(graph)
    return graph


def _random_edge(
    rng: np.random.Generator, first: int, second: int, sizes: list[int], holes: float
) -> Edge:
    rows = int(rng.integers(1, sizes[first] + 1))
    columns = int(rng.integers(1, sizes[second] + 1))
    return Edge(
        first,
        second,
        rng.integers(0, rows, sizes[first]),
        rng.integers(0, columns, sizes[second]),
        _holes(rng, rng.integers(0, 9, (rows, columns)), holes),
    )


def _holes(rng: np.random.Generator, costs: np.ndarray, share: float) -> np.ndarray:
    return np.where(rng.random(costs.shape) < share, inf, costs.astype(float))


def _bytes(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.integers(0, 6, size).astype(float)
