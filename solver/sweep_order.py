"""The order in which messages sweep a graph: along its length, breadth first.

A sweep carries a message as far as the order is monotone along a path. From a node at
one end, nodes in order of their distance make nearly every path so (Cuthill and McKee,
"Reducing the bandwidth of sparse symmetric matrices", 1969); the order in which a graph
was built, with its copies last, takes two to five times as many sweeps.
"""

from collections import deque
from collections.abc import Sequence

from .choice_graph import ChoiceGraph

MOST_WALKS = 3


def sweep_order(graph: ChoiceGraph) -> list[int]:
    """Every node once, each part of the graph from one of its ends to the other."""
    neighbours: list[list[int]] = [[] for _ in graph.nodes]
    for edge in graph.edges:
        neighbours[edge.first].append(edge.second)
        neighbours[edge.second].append(edge.first)
    for around in neighbours:
        around.sort(key=lambda node: len(neighbours[node]))
    is_placed = [False] * len(neighbours)
    order: list[int] = []
    for start in sorted(range(len(neighbours)), key=lambda v: len(neighbours[v])):
        if not is_placed[start]:
            for _ in range(MOST_WALKS):
                start = _walk(start, neighbours)[-1]
            part = _walk(start, neighbours)
            order += part
            for node in part:
                is_placed[node] = True
    return order


def _walk(start: int, neighbours: Sequence[Sequence[int]]) -> list[int]:
    """What can be reached, in order of distance."""
    seen, queue, order = {start}, deque([start]), []
    while queue:
        node = queue.popleft()
        order.append(node)
        for other in neighbours[node]:
            if other not in seen:
                seen.add(other)
                queue.append(other)
    return order
