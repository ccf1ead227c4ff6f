"""Merging pairs of nodes into one with the product of their choices, exactly.

Messages stall where short cycles of the graph disagree. Merging two nodes that share
neighbours opens such a cycle: a neighbour of both and of one more node is then left
with two edges, and folds. Merging and reducing in turn is elimination of nodes of any
degree, as far as sizes allow.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph, Edge, Node


@dataclass(frozen=True, eq=False)
class Merged:
    """The graph with pairs merged, and the way back.

    A pair (u, v) lives on at u, with choice x_u * k_v + x_v; v is left with one choice.
    `pairs` are (u, v, k_v).
    """

    graph: ChoiceGraph
    pairs: tuple[tuple[int, int, int], ...]

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the original nodes."""
        full = list(choices)
        for first, second, size in self.pairs:
            full[first], full[second] = divmod(choices[first], size)
        return tuple(full)

    def __str__(self) -> str:
        return f"Merged {len(self.pairs)} pairs into {self.graph}"


def merge_nodes(
    graph: ChoiceGraph, pairs: Sequence[tuple[int, int]], pool: ArrayPool
) -> Merged:
    """Merges disjoint pairs of nodes; any edge between the two moves into the node."""
    nodes = list(graph.nodes)
    partner = {u: v for u, v in pairs} | {v: u for u, v in pairs}
    leads = {u for u, _ in pairs}
    costs = {v: pool.adopt(nodes[v].costs, np.float64) for v in partner}
    merged = {u: pool.call(_sum_outer, costs[u], costs[partner[u]]) for u in leads}

    def spread(node: int, classes: np.ndarray) -> tuple[int, np.ndarray]:
        if node not in partner:
            return node, classes
        classes, other = pool.adopt(classes, np.intp), partner[node]
        kernel = np.repeat if node in leads else np.tile
        lead = node if node in leads else other
        return lead, pool.call(kernel, classes, nodes[other].costs.size)

    edges = []
    for edge in graph.edges:
        first, first_class = spread(edge.first, edge.first_class)
        second, second_class = spread(edge.second, edge.second_class)
        matrix = edge.costs
        if first == second:
            inner = pool.call(
                *(_pick, pool.adopt(matrix, np.float64), first_class, second_class)
            )
            merged[first] = pool.call(np.add, merged[first], inner)
        else:
            edges.append(Edge(first, second, first_class, second_class, matrix))
    for u, v in pairs:
        name = f"{nodes[u].name} + {nodes[v].name}"
        nodes[u] = Node(name[:60], merged[u], np.zeros(merged[u].size))
        nodes[v] = Node("merged", np.zeros(1), np.zeros(1))
    return Merged(
        ChoiceGraph(tuple(nodes), tuple(edges), constant=graph.constant),
        tuple((u, v, graph.nodes[v].costs.size) for u, v in pairs),
    )


def choose_pairs(graph: ChoiceGraph, most_choices: int) -> list[tuple[int, int]]:
    """Disjoint pairs to merge, those that free most nodes first, small ones first.

    A node with three neighbours is freed when two of them merge, or when it merges with
    one of them.
    """
    neighbours: dict[int, set[int]] = defaultdict(set)
    for edge in graph.edges:
        neighbours[edge.first].add(edge.second)
        neighbours[edge.second].add(edge.first)
    freed: Counter[tuple[int, int]] = Counter()
    for node, around in neighbours.items():
        if len(around) == 3:
            for pair in combinations(sorted(around), 2):
                freed[pair] += 1
            for other in around:
                freed[min(node, other), max(node, other)] += 1
    sizes = [node.costs.size for node in graph.nodes]
    small = [
        (-count, sizes[u] * sizes[v], u, v)
        for (u, v), count in freed.items()
        if sizes[u] * sizes[v] <= most_choices
    ]
    taken: set[int] = set()
    pairs = []
    for _, _, u, v in sorted(small):
        if u not in taken and v not in taken:
            taken |= {u, v}
            pairs.append((u, v))
    return pairs


def _sum_outer(costs: np.ndarray, costs2: np.ndarray) -> np.ndarray:
    return np.add.outer(costs, costs2).reshape(-1)


def _pick(matrix: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return matrix[rows, columns]
