"""Improving a plan: most of the graph is re-optimised exactly, given the rest.

A few nodes are held at their choices, so few that every other node can be minimised out
one after the other with never more than two neighbours (`_choose_held`). `reduce` then
finds the best plan that agrees with the held choices; it costs no more than the plan
did. Another round holds other nodes.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph, Node
from .reduce import reduce


def polish(
    graph: ChoiceGraph, choices: Sequence[int], pool: ArrayPool, seed: int
) -> tuple[int, ...]:
    """One round: a plan that costs no more. The budget is not looked at."""
    held = _choose_held(graph, np.random.default_rng(seed))
    nodes = list(graph.nodes)
    for index in held:
        costs = np.full(nodes[index].costs.size, inf)
        costs[choices[index]] = nodes[index].costs[choices[index]]
        nodes[index] = Node(nodes[index].name, costs, nodes[index].bytes)
    given = replace(graph, nodes=tuple(nodes), live_sets=(), budget=None)
    reduced = reduce(given, pool)
    if reduced.graph.nodes:
        return tuple(choices)
    return reduced.expand(())


def _choose_held(graph: ChoiceGraph, rng: np.random.Generator) -> list[int]:
    """Nodes without which all others fold, well-connected ones first, at random."""
    neighbours: list[set[int]] = [set() for _ in graph.nodes]
    for edge in graph.edges:
        neighbours[edge.first].add(edge.second)
        neighbours[edge.second].add(edge.first)
    luck = rng.uniform(0.5, 1.5, len(neighbours))
    held: list[int] = []
    left = set(range(len(neighbours)))
    ready = [v for v in left if len(neighbours[v]) <= 2]
    candidates = sorted(left, key=lambda v: luck[v] * len(neighbours[v]))
    while left:
        if ready:
            node = ready.pop()
            if node not in left:
                continue
            around = neighbours[node]
            if len(around) == 2:
                first, second = around
                neighbours[first].add(second)
                neighbours[second].add(first)
        else:
            node = candidates.pop()
            if node not in left:
                continue
            held.append(node)
        left.remove(node)
        for other in neighbours[node]:
            neighbours[other].discard(node)
            if len(neighbours[other]) <= 2:
                ready.append(other)
    return held
