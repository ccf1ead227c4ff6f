"""Joining the shared copies of one producer into one node, exactly.

A copy is a two-choice node (absent, present): its readers forbid absent where they need
it, its producer charges for present. One by one, copies relax badly: half a copy can be
built from the cheaper half of its producer. Joined, a star of producer, copies and
readers becomes one node whose choice is (class p of the producer, set U of copies
built once and shared), at cost sum_{k in U} build[p, k]. A reader in need of a copy not
in U builds it for itself and pays build[p, k] again. No plan is lost when U runs over
the sets of at most half as many copies as all readers can need together, since a copy
that only one reader needs costs the same either way.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb, inf
from typing import NamedTuple

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph, Edge, Node

MOST_JOINED_CHOICES = 1200


class _Side(NamedTuple):
    """An edge of a copy: the other node, its classes, [other classes] of costs."""

    other: int
    classes: np.ndarray
    costs: np.ndarray


@dataclass(frozen=True)
class _Copy:
    """`producer` charges `costs` for present; readers forbid absent where inf."""

    node: int
    producer: _Side
    readers: tuple[_Side, ...]
    extra: float
    present: int


@dataclass(frozen=True, eq=False)
class Joined:
    """The graph with stars in place of copies, and the way back.

    Nodes keep their index; a joined copy is left with its cheaper choice alone, and the
    nodes of the stars come last. `needs` are, per copy, (node, present choice, readers
    with [k] whether a choice needs it).
    """

    graph: ChoiceGraph
    num_original: int
    needs: tuple[tuple[int, int, tuple[tuple[int, np.ndarray], ...]], ...]

    def expand(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of the original graph: a copy is present where a reader needs it."""
        full = list(choices[: self.num_original])
        for node, present, readers in self.needs:
            is_needed = any(needs[full[reader]] for reader, needs in readers)
            full[node] = present if is_needed else 1 - present
        return tuple(full)

    def __str__(self) -> str:
        return f"Joined, {len(self.needs)} copies into stars, to {self.graph}"


def join_copies(graph: ChoiceGraph, pool: ArrayPool) -> Joined:
    """Joins the copies of every producer whose star is of moderate size."""
    stars: dict[int, list[_Copy]] = defaultdict(list)
    for copy in _find_copies(graph):
        stars[copy.producer.other].append(copy)
    nodes, joined, edges = list(graph.nodes), [], []
    for producer, copies in sorted(stars.items()):
        star = _join(producer, copies, len(nodes), pool)
        if star is not None:
            nodes.append(star[0])
            edges += star[1]
            joined += copies
    gone = {copy.node for copy in joined}
    for copy in joined:
        nodes[copy.node] = Node(nodes[copy.node].name, np.zeros(1), np.zeros(1))
    edges += [e for e in graph.edges if e.first not in gone and e.second not in gone]
    needs = tuple(
        (
            copy.node,
            copy.present,
            tuple((s.other, (s.costs == inf)[s.classes]) for s in copy.readers),
        )
        for copy in joined
    )
    constant = graph.constant + sum(
        float(graph.nodes[copy.node].costs[1 - copy.present]) for copy in joined
    )
    joined_graph = ChoiceGraph(tuple(nodes), tuple(edges), constant=constant)
    return Joined(joined_graph, len(graph.nodes), needs)


def _find_copies(graph: ChoiceGraph) -> list[_Copy]:
    around: dict[int, list[tuple[_Side, np.ndarray]]] = defaultdict(list)
    is_binary = [node.costs.size == 2 for node in graph.nodes]
    for edge in graph.edges:
        ends = (edge.first, edge.first_class, edge.costs)
        ends2 = (edge.second, edge.second_class, edge.costs.T)
        for (node, classes, matrix), (other, classes2, _) in (
            (ends, ends2),
            (ends2, ends),
        ):
            if is_binary[node]:
                by_choice = matrix[classes]
                around[node].append((_Side(other, classes2, by_choice), classes))
    copies, taken = [], set()
    for node, sides in around.items():
        neighbours = {side.other for side, _ in sides}
        if len(sides) < 3 or len(neighbours) < len(sides) or neighbours & taken:
            continue
        for absent in (0, 1):
            copy = _as_copy(graph.nodes[node], node, absent, [s for s, _ in sides])
            if copy is not None:
                copies.append(copy)
                taken.add(node)
                break
    return copies


def _as_copy(node: Node, index: int, absent: int, sides: list[_Side]) -> _Copy | None:
    if not np.isfinite(node.costs).all():
        return None
    extra = float(node.costs[1 - absent] - node.costs[absent])
    if extra < 0:
        return None
    producers, readers = [], []
    for other, classes, by_choice in sides:
        if_absent, if_present = by_choice[absent], by_choice[1 - absent]
        if not if_absent.any():
            producers.append(_Side(other, classes, if_present))
        elif not if_present.any() and (if_absent[if_absent > 0] == inf).all():
            readers.append(_Side(other, classes, if_absent))
        else:
            return None
    if len(producers) != 1:
        return None
    return _Copy(index, producers[0], tuple(readers), extra, 1 - absent)


def _join(
    producer: int, copies: list[_Copy], index: int, pool: ArrayPool
) -> tuple[Node, list[Edge]] | None:
    """The star's node and edges, or None if it would be too large."""
    build_by_choice = np.stack(
        [copy.producer.costs[copy.producer.classes] + copy.extra for copy in copies], 1
    )
    build, classes = np.unique(build_by_choice, axis=0, return_inverse=True)
    needs: dict[int, np.ndarray] = {}
    for number, copy in enumerate(copies):
        for other, reader_classes, costs in copy.readers:
            if other not in needs:
                needs[other] = np.zeros((reader_classes.size, len(copies)), bool)
            needs[other][:, number] = (costs == inf)[reader_classes]
    if producer in needs:
        return None
    most = sum(int(need.sum(axis=1).max()) for need in needs.values()) // 2
    num_sets = sum(comb(len(copies), size) for size in range(most + 1))
    if len(build) * num_sets > MOST_JOINED_CHOICES:
        return None
    arguments = pool.intern(build), len(copies), most
    costs, star_class = pool.call(_star_costs, *arguments)
    node = Node(f"copies of {producer}", costs, np.zeros(costs.size))
    off_diagonal = pool.call(_forbid_unequal, len(build))
    made = pool.intern(classes.reshape(-1).astype(np.intp))
    edges = [Edge(producer, index, made, star_class, off_diagonal)]
    everything = pool.intern(np.arange(costs.size))
    for reader, need in sorted(needs.items()):
        patterns, pattern_class, matrix = pool.call(
            _reader_costs, *arguments, pool.intern(need)
        )
        edges.append(Edge(index, reader, everything, pattern_class, matrix))
    return node, edges


def _sets(num_copies: int, most: int) -> np.ndarray:
    """[sets, copies] whether a copy is in each set of at most `most`."""
    chosen = [
        members
        for size in range(most + 1)
        for members in combinations(range(num_copies), size)
    ]
    is_in = np.zeros((len(chosen), num_copies), bool)
    for row, members in zip(is_in, chosen, strict=True):
        row[list(members)] = True
    return is_in


def _star_costs(
    build: np.ndarray, num_copies: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Costs [classes x sets] of a star's choices, and the producer class of each."""
    is_in = _sets(num_copies, most)
    costs = _sum_where(build, is_in).reshape(-1)
    return costs, np.repeat(np.arange(len(build)), len(is_in))


def _reader_costs(
    build: np.ndarray, num_copies: int, most: int, need: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Patterns of need, the pattern of each choice, [star choices, patterns] costs."""
    patterns, pattern_class = np.unique(need, axis=0, return_inverse=True)
    is_missing = patterns[None, :, :] & ~_sets(num_copies, most)[:, None, :]
    costs = _sum_where(build, is_missing.reshape(-1, num_copies))
    matrix = costs.reshape(-1, len(patterns))
    return patterns, pattern_class.reshape(-1).astype(np.intp), matrix


def _sum_where(build: np.ndarray, is_counted: np.ndarray) -> np.ndarray:
    """[classes, rows]: the sum of the counted entries; inf where one of them is."""
    is_finite = np.isfinite(build)
    total = np.where(is_finite, build, 0.0) @ is_counted.T.astype(float)
    is_forbidden = (~is_finite).astype(float) @ is_counted.T.astype(float) > 0
    return np.where(is_forbidden, inf, total)


def _forbid_unequal(size: int) -> np.ndarray:
    return np.where(np.eye(size, dtype=bool), 0.0, inf)
