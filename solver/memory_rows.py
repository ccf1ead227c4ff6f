"""Rows of memory: what the choices of some nodes hold together, against a budget.

    constant + sum_v weights_v[x_v] <= budget

A live set is a row whose weights are the bytes of its nodes. A row may also say what
only a pair of choices needs: weight e on each and constant -e hold e for both together
and nothing for one of them, so that nothing is forbidden that would fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from .choice_graph import ChoiceGraph, Infeasible

ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class MemoryRow:
    """`weights` [k] of each of `nodes`, at least 0, and a constant of either sign.

    Nodes that weigh alike should share their arrays. `before` it was lowered, a row
    said at most `taken_off` more of any assignment.
    """

    nodes: tuple[int, ...]
    weights: tuple[np.ndarray, ...]
    constant: float = 0.0
    before: "MemoryRow | None" = None
    taken_off: float = 0.0

    def used(self, choices: Sequence[int] | np.ndarray) -> float:
        """The bytes that one choice per node holds."""
        return self.constant + float(self.held(choices).sum())

    def held(self, choices: Sequence[int] | np.ndarray) -> np.ndarray:
        """[nodes] the bytes that one choice per node of the graph holds here."""
        flat, starts = self._flat
        return flat[starts + np.asarray(choices, np.intp)[self.index]]

    @cached_property
    def index(self) -> np.ndarray:
        """[nodes] as an array."""
        return np.array(self.nodes, np.intp)

    @cached_property
    def kinds(self) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
        """The distinct arrays of weights, and which of them each node has."""
        number: dict[int, int] = {}
        kind = [number.setdefault(id(each), len(number)) for each in self.weights]
        distinct = dict(zip(map(id, self.weights), self.weights, strict=True))
        return tuple(distinct[key] for key in number), np.array(kind, np.intp)

    @cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray]:
        """All weights one after the other, and where each node's begin."""
        distinct, kind = self.kinds
        starts = np.cumsum([0, *(each.size for each in distinct)], dtype=np.intp)
        return np.concatenate([*distinct, np.zeros(0)]), starts[kind]

    def __str__(self) -> str:
        return f"MemoryRow: {len(self.nodes)} nodes, constant {self.constant:.6g}"


def live_row(graph: ChoiceGraph, live: int) -> MemoryRow:
    """The row of one live set."""
    members = graph.live_sets[live]
    return MemoryRow(members, tuple(graph.nodes[v].bytes for v in members))


def lowered(
    row: MemoryRow,
    own: Sequence[int],
    other: Sequence[int],
    most: float,
    sizes: Sequence[int],
) -> MemoryRow:
    """The row, saying at most `most` of `other`, and of `own` what it said.

    What it says too much is taken off the choices that only `other` makes, first off
    those that hold more than `own`'s; nodes that are alike, as those of equal layers
    are, bear it in equal parts. If they do not weigh enough, the other choices of one
    of these nodes weigh more, and the constant less. Where the row has no such node,
    others do so in equal parts; `sizes` [nodes] is how many choices each has.
    """
    taken_off = beyond = row.used(other) - most
    if beyond <= 0:
        return row
    ours, theirs = (np.asarray(c, np.intp)[row.index] for c in (own, other))
    differing = np.flatnonzero(ours != theirs)
    if not differing.size:
        return _told_apart(row, own, other, beyond, sizes)
    weights, constant = list(row.weights), row.constant
    more = (row.held(other) - row.held(own))[differing]
    alike = np.stack([row.kinds[1], ours, theirs], 1)[differing]
    _, group = np.unique(alike, axis=0, return_inverse=True)
    group = group.reshape(-1)
    _, first = np.unique(group, return_index=True)
    for number in np.lexsort((first, -more[first])).tolist():
        members = differing[group == number]
        choice = int(theirs[members[0]])
        held = weights[members[0]]
        taken = min(beyond / members.size, float(held[choice]))
        if taken <= 0:
            continue
        less = held.copy()
        less[choice] -= taken
        beyond -= taken * members.size
        for i in members.tolist():
            weights[i] = less
        if beyond <= ROUNDING * abs(most):
            break
    if beyond > ROUNDING * abs(most):
        spread = [float(np.ptp(each)) for each in row.kinds[0]]
        widest = int(differing[np.argmax(np.array(spread)[row.kinds[1][differing]])])
        choice = int(theirs[widest])
        kept = weights[widest][choice]
        weights[widest] = weights[widest] + beyond
        weights[widest][choice] = kept
        constant -= beyond
    return MemoryRow(row.nodes, tuple(weights), constant, row, taken_off)


def _told_apart(
    row: MemoryRow,
    own: Sequence[int],
    other: Sequence[int],
    beyond: float,
    sizes: Sequence[int],
) -> MemoryRow:
    """The row, saying `beyond` less of `other`, by nodes that it has not.

    An assignment that makes some of the choices that only `other` makes holds so much
    less of that.
    """
    apart = np.flatnonzero(np.asarray(own) != np.asarray(other)).tolist()
    constant = row.constant - beyond
    weights: list[np.ndarray] = []
    for node in apart:
        weights.append(np.full(sizes[node], beyond / len(apart)))
        weights[-1][other[node]] = 0.0
    nodes, weighing = (*row.nodes, *apart), (*row.weights, *weights)
    return MemoryRow(nodes, weighing, constant, row, beyond)


def lowered_by_all(
    row: MemoryRow,
    own: Sequence[int],
    others: Iterable[tuple[Sequence[int], float]],
    sizes: Sequence[int],
) -> MemoryRow:
    """As `lowered`, by (assignment, the most to say of it) one after the other."""
    less, taken_off = row, 0.0
    for other, most in others:
        before = less
        less = lowered(before, own, other, most, sizes)
        taken_off += less.taken_off if less is not before else 0.0
    return less if less is row else replace(less, before=row, taken_off=taken_off)


def does_not_fit(
    budget: float,
    bound: float,
    least: float,
    choices: tuple[int, ...] | None = None,
) -> Infeasible:
    """That nothing was found within a budget.

    `least` is the least peak found, that of `choices`; no assignment has one below
    `bound`.
    """
    return Infeasible(
        f"every plan must fit the budget {budget:.6g}, but none can below "
        f"{bound:.6g}, and the least found to do is {least:.6g}; raise the budget "
        f"to {least:.6g}.",
        *(least, bound, choices),
    )
