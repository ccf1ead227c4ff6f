"""Local search: changes one node at a time while that helps."""

from collections import deque
from collections.abc import Sequence
from math import inf

import numpy as np

from .choice_graph import ChoiceGraph

# Another node, the classes here and there, and the costs by both.
_Side = tuple[int, np.ndarray, np.ndarray, np.ndarray]


class Descent:
    """Coordinate descent on one graph; build once, improve many plans.

    The budget is not looked at.
    """

    def __init__(self, graph: ChoiceGraph) -> None:
        self._costs = [node.costs for node in graph.nodes]
        self._around: list[list[_Side]] = [[] for _ in graph.nodes]
        for edge in graph.edges:
            first, second = edge.first_class, edge.second_class
            self._around[edge.first].append((edge.second, first, second, edge.costs))
            self._around[edge.second].append((edge.first, second, first, edge.costs.T))

    def improve(self, choices: Sequence[int], max_moves: int = 100_000) -> list[int]:
        """The plan after every single change that lowers its cost."""
        plan = list(choices)
        queue, is_queued = deque(range(len(plan))), [True] * len(plan)
        while queue and max_moves:
            node = queue.popleft()
            is_queued[node] = False
            values = self.values(node, plan)
            best = int(values.argmin())
            if not _is_lower(values[best], values[plan[node]]):
                continue
            plan[node] = best
            max_moves -= 1
            for other, *_ in self._around[node]:
                if not is_queued[other]:
                    is_queued[other] = True
                    queue.append(other)
        return plan

    def values(self, node: int, plan: Sequence[int]) -> np.ndarray:
        """[k] the cost of each choice of a node, its neighbours' choices given."""
        values = self._costs[node]
        for other, classes, classes2, matrix in self._around[node]:
            values = values + matrix[:, classes2[plan[other]]][classes]
        return values


def _is_lower(value: float, than: float) -> bool:
    return value < than - 1e-12 * abs(than) if than < inf else value < inf
