"""Rows of memory: what the choices of some nodes hold together, against a budget.

    constant + sum_v weights_v[x_v] <= budget

A live set is a row whose weights are the bytes of its nodes. A row may also say what
only a pair of choices needs: weight e on each and constant -e hold e for both together
and nothing for one of them, so that nothing is forbidden that would fit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from .choice_graph import ChoiceGraph, allowed


@dataclass(frozen=True, eq=False)
class MemoryRow:
    """`weights` [k] of each of `nodes`, at least 0, and a constant of either sign."""

    nodes: tuple[int, ...]
    weights: tuple[np.ndarray, ...]
    constant: float = 0.0

    def used(self, choices: Sequence[int]) -> float:
        """The bytes that one choice per node holds."""
        pairs = zip(self.nodes, self.weights, strict=True)
        return self.constant + sum(float(held[choices[v]]) for v, held in pairs)

    def __str__(self) -> str:
        return f"MemoryRow: {len(self.nodes)} nodes, constant {self.constant:.6g}"


def exclusion(row: MemoryRow, choices: Sequence[int], peak: float) -> MemoryRow:
    """A row that says `peak` of the choices of a row's nodes, and of nothing else.

    It stands for a row that turned out to say too much of another assignment.
    """
    weights = []
    for node, held in zip(row.nodes, row.weights, strict=True):
        weights.append(np.where(np.arange(held.size) == choices[node], peak, 0.0))
    return MemoryRow(row.nodes, tuple(weights), peak * (1 - len(row.nodes)))


@dataclass(frozen=True)
class Verdict:
    """What an assignment really needs, and rows that say so.

    `rows` are of the same problem; where `peak` is more than the budget, one of them
    must be broken by the assignment.
    """

    peak: float
    rows: tuple[MemoryRow, ...] = ()


MOST_ROWS_AT_ONCE = 40

Check = Callable[[tuple[int, ...]], Verdict]
"""Says what a complete assignment needs: a model of memory, asked when needed."""


def check_live_sets(graph: ChoiceGraph) -> Check:
    """The check of a graph whose live sets say all about memory."""
    limit = inf if graph.budget is None else allowed(graph.budget)
    rows: dict[int, MemoryRow] = {}

    def check(choices: tuple[int, ...]) -> Verdict:
        used = graph.used_bytes(choices)
        peak = float(used.max(initial=0.0))
        broken = np.flatnonzero(used > limit)
        worst = broken[np.argsort(-used[broken], kind="stable")][:MOST_ROWS_AT_ONCE]
        for live in worst.tolist():
            rows.setdefault(live, live_row(graph, live))
        return Verdict(peak, tuple(rows[live] for live in worst.tolist()))

    return check


def live_row(graph: ChoiceGraph, live: int) -> MemoryRow:
    """The row of one live set."""
    members = graph.live_sets[live]
    return MemoryRow(members, tuple(graph.nodes[v].bytes for v in members))


def most_spread(graph: ChoiceGraph, neglected: float) -> tuple[int, ...]:
    """The nodes whose choice matters to memory.

    The others, of the least difference between their choices, differ by at most
    `neglected` bytes together.
    """
    spreads = [
        float(np.ptp(node.bytes[np.isfinite(node.costs)])) if node.costs.size else 0.0
        for node in graph.nodes
    ]
    order = np.argsort(spreads, kind="stable")
    is_small = np.cumsum(np.array(spreads)[order]) <= neglected
    return tuple(sorted(int(v) for v in order[~is_small]))
