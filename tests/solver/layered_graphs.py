"""Small random graphs of equal layers between different ends."""

from math import inf

import numpy as np

from autopar.solver.choice_graph import ChoiceGraph, Edge, Node
from tests.solver.valid_graph import assert_valid


def layered_graph(
    seed: int,
    *,
    num_layers: int = 7,
    num_places: int = 2,
    num_choices: int = 2,
    num_ends: int = 2,
    backwards: bool = False,
    shared: bool = False,
    forbidden: float = 0.0,
) -> ChoiceGraph:
    """Layers of `num_places` nodes, each joined to the next; ends joined to the outer.

    `backwards`: half of the places run from the last layer to the first, as a backward
    pass does. `shared`: one node of the ends has an edge to every layer.
    """
    rng = np.random.default_rng(seed)

    def costs(*shape: int) -> np.ndarray:
        drawn = rng.integers(0, 9, shape).astype(float)
        return np.where(rng.random(shape) < forbidden, inf, drawn)

    def edge(first: int, second: int, matrix: np.ndarray) -> Edge:
        classes = np.arange(num_choices)
        return Edge(first, second, classes, classes, matrix)

    def node(kind: np.ndarray) -> Node:
        return Node("n", kind, np.zeros(num_choices))

    base = num_ends
    places = range(num_places)

    def index(layer: int, place: int) -> int:
        if backwards and place % 2:
            layer = num_layers - 1 - layer
        return base + place * num_layers + layer

    nodes = [node(costs(num_choices)) for _ in range(num_ends)]
    nodes += [
        node(kind)
        for kind in [costs(num_choices) for _ in places]
        for _ in range(num_layers)
    ]
    after = len(nodes)
    nodes += [node(costs(num_choices)) for _ in range(num_ends)]
    pairs = [(p, q) for p in places for q in places]
    inside = {(p, q): costs(num_choices, num_choices) for p, q in pairs if p < q}
    between = {
        (p, q): costs(num_choices, num_choices)
        for p, q in pairs
        if p == q or rng.random() < 0.5
    }
    edges = []
    for layer in range(num_layers):
        edges += [
            edge(index(layer, p), index(layer, q), m) for (p, q), m in inside.items()
        ]
        if layer + 1 < num_layers:
            edges += [
                edge(index(layer, p), index(layer + 1, q), m)
                for (p, q), m in between.items()
            ]
    for end in range(num_ends):
        for layer, start in ((0, 0), (num_layers - 1, after)):
            place = int(rng.integers(num_places))
            matrix = costs(num_choices, num_choices)
            edges.append(edge(start + end, index(layer, place), matrix))
        if end:
            for start in (0, after):
                matrix = costs(num_choices, num_choices)
                edges.append(edge(start + end - 1, start + end, matrix))
    if shared:
        place, matrix = int(rng.integers(num_places)), costs(num_choices, num_choices)
        edges += [edge(0, index(layer, place), matrix) for layer in range(num_layers)]
    graph = ChoiceGraph(tuple(nodes), tuple(edges), constant=1.0)
    assert_valid(graph)
    return graph


def least_cost(graph: ChoiceGraph) -> float:
    """The least cost of all assignments, every one tried."""
    sizes = [node.costs.size for node in graph.nodes]
    total = np.full(sizes, graph.constant)

    def along(axes: tuple[int, ...], costs: np.ndarray) -> np.ndarray:
        return costs.reshape([n if v in axes else 1 for v, n in enumerate(sizes)])

    for index, node in enumerate(graph.nodes):
        total += along((index,), node.costs)
    for edge in graph.edges:
        costs = edge.costs[edge.first_class][:, edge.second_class]
        costs = costs if edge.first < edge.second else costs.T
        total += along((edge.first, edge.second), costs)
    return float(total.min())
