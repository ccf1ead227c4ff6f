"""A graph reduced once for every price, row and budget, and rows rewritten on it.

A choice is dropped only for one that is no worse in cost and bytes, and a node whose
choices differ in bytes stays. So whatever prices and rows of memory come later, the
best assignment is among those left.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph
from .memory_rows import MemoryRow, most_spread
from .reduce import reduce
from .unfold import Drop


class KeptChoices:
    """`graph` is what is left of `full`; `slack` is the rounding of its costs.

    `held` are the nodes whose bytes matter; those of `whole`, to which some row gives
    weights that are not their bytes, keep all their choices.
    """

    def __init__(
        self,
        full: ChoiceGraph,
        held: Sequence[int],
        pool: ArrayPool,
        whole: Collection[int] = (),
    ) -> None:
        given = replace(full, live_sets=(tuple(held),), budget=inf)
        self._reduced = reduce(given, pool, held=whole)
        self.full, self.slack = full, self._reduced.slack
        self.graph = replace(self._reduced.graph, live_sets=(), budget=None)
        self._left = {v: np.arange(n.costs.size) for v, n in enumerate(full.nodes)}
        for step in self._reduced.steps:
            if isinstance(step, Drop):
                self._left[step.node] = self._left[step.node][step.kept]
        self._whole = tuple(whole)
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

    def among(self, domain: np.ndarray, pool: ArrayPool) -> "KeptChoices":
        """What is left if only some choices (bool [choices]) of `graph` may be made."""
        starts = np.cumsum([0, *(node.costs.size for node in self.graph.nodes)])
        parts = np.split(domain, starts[1:-1])
        nodes = tuple(
            replace(node, costs=np.where(part, node.costs, inf))
            for node, part in zip(self.graph.nodes, parts, strict=True)
        )
        few = replace(self.graph, nodes=nodes)
        whole = [self._index[node] for node in self._whole]
        return KeptChoices(few, most_spread(few, 0.0), pool, whole)

    def __str__(self) -> str:
        return f"KeptChoices: {self.graph}"
