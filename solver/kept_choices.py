"""A graph reduced once for every price and budget, and rows rewritten on it.

A choice is dropped only for one that is no worse in cost and weighs no more in any row,
and a node whose choices weigh differently stays. So whatever prices and budget come
later, the best assignment is among those left.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph
from .memory_rows import MemoryRow
from .reduce import reduce
from .unfold import Drop


class KeptChoices:
    """`graph` is what is left of `full`; `slack` is the rounding of its costs.

    `rows` are all that may ever weigh its choices.
    """

    def __init__(
        self, full: ChoiceGraph, rows: Sequence[MemoryRow], pool: ArrayPool
    ) -> None:
        given = replace(full, live_sets=(), budget=None)
        self._reduced = reduce(given, pool, weights=_weights(rows))
        self.full, self.slack = full, self._reduced.slack
        self.graph = self._reduced.graph
        self._left = {v: np.arange(n.costs.size) for v, n in enumerate(full.nodes)}
        for step in self._reduced.steps:
            if isinstance(step, Drop):
                self._left[step.node] = self._left[step.node][step.kept]
        self._index = {v: index for index, v in enumerate(self._reduced.kept)}

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """The assignment of the full graph of the same cost."""
        return self._reduced.expand(choices)

    def made_by(self, choices: Sequence[int]) -> np.ndarray:
        """Bool [choices of `graph`]: those that an assignment of the full graph makes.

        Of a node whose choice was dropped all are, as one of them is no worse.
        """
        found, start = np.ones(self.graph.num_choices, bool), 0
        for node in self._index:
            is_made = self._left[node] == choices[node]
            if is_made.any():
                found[start : start + is_made.size] = is_made
            start += is_made.size
        return found

    def row(self, row: MemoryRow) -> MemoryRow:
        """The same row on what is left; nodes that are gone count at their least."""
        nodes, weights, constant = [], [], row.constant
        for node, weight in zip(row.nodes, row.weights, strict=True):
            left = weight[self._left[node]]
            if node in self._index and np.ptp(left) > 0:
                nodes.append(self._index[node])
                weights.append(left)
            else:
                constant += float(left.min())
        return MemoryRow(tuple(nodes), tuple(weights), constant)

    def __str__(self) -> str:
        return f"KeptChoices: {self.graph}"


def _weights(rows: Sequence[MemoryRow]) -> dict[int, np.ndarray]:
    """[k, rows] by node, of the rows in which its choices weigh differently."""
    found: dict[int, dict[int, np.ndarray]] = {}
    for row in rows:
        distinct, kinds = row.kinds
        differs = [np.ptp(each) > 0 for each in distinct]
        for node, kind in zip(row.nodes, kinds.tolist(), strict=True):
            if differs[kind]:
                found.setdefault(node, {})[id(distinct[kind])] = distinct[kind]
    known: dict[tuple[int, ...], np.ndarray] = {}
    for each in found.values():
        key = tuple(each)
        if key not in known:
            known[key] = np.stack(list(each.values()), axis=1)
    return {node: known[tuple(each)] for node, each in found.items()}
