"""Rows of memory: what the choices of some nodes hold together, against a budget.

    constant + sum_v weights_v[x_v] <= budget

A live set is a row whose weights are the bytes of its nodes. A row may also say what
only a pair of choices needs: weight e on each and constant -e hold e for both together
and nothing for one of them, so that nothing is forbidden that would fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .choice_graph import ChoiceGraph


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


def foreign_nodes(graph: ChoiceGraph, rows: Sequence[MemoryRow]) -> frozenset[int]:
    """The nodes to which some row gives weights that are not their bytes."""
    return frozenset(
        node
        for row in rows
        for node, weights in zip(row.nodes, row.weights, strict=True)
        if weights is not graph.nodes[node].bytes
    )


def lowered(
    row: MemoryRow, own: Sequence[int], other: Sequence[int], most: float
) -> MemoryRow:
    """The row, saying at most `most` of `other`, and of `own` what it said.

    What it says too much is taken off the choices that only `other` makes, first off
    those that hold more than `own`'s. If they do not weigh enough, the other choices of
    one of these nodes weigh more, and the constant less. Where the row has no such node
    only the constant is lowered, for every assignment.
    """
    beyond = row.used(other) - most
    if beyond <= 0:
        return row
    weights, constant = list(row.weights), row.constant
    differing = [i for i, v in enumerate(row.nodes) if own[v] != other[v]]

    def held(index: int, choices: Sequence[int]) -> float:
        return float(weights[index][choices[row.nodes[index]]])

    for i in sorted(differing, key=lambda i: held(i, own) - held(i, other)):
        taken = min(beyond, held(i, other))
        if taken > 0:
            weights[i] = weights[i].copy()
            weights[i][other[row.nodes[i]]] -= taken
            beyond -= taken
    if beyond > 0 and differing:
        widest = max(differing, key=lambda i: float(np.ptp(row.weights[i])))
        choice = other[row.nodes[widest]]
        kept = weights[widest][choice]
        weights[widest] = weights[widest] + beyond
        weights[widest][choice] = kept
    return MemoryRow(row.nodes, tuple(weights), constant - beyond)


def lowered_by_all(
    row: MemoryRow, own: Sequence[int], others: Iterable[tuple[Sequence[int], float]]
) -> MemoryRow:
    """As `lowered`, by (assignment, the most to say of it) one after the other."""
    for other, most in others:
        row = lowered(row, own, other, most)
    return row
