"""Rows of memory: what is held at a point of a plan, for every other assignment."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autopar.solver.level_rows import Weighed, levelled
from autopar.solver.memory_rows import MemoryRow

from ..costs.kernels import gathers_minor, turns
from ..costs.narrow_floats import TIMES_WIDER
from ..sharding.spec import Spec
from .plan_points import Point
from .relay_choices import is_copied, lasting_tensors
from .sharding_problem import ShardingProblem

WORTH_TELLING_APART = 0.01  # of what a point holds


def row_of_point(
    problem: ShardingProblem, point: Point, choices: tuple[int, ...]
) -> MemoryRow:
    """The row of a point of a plan, of which it says exactly what the point holds."""
    return rows_of_point(problem, point, choices)[0]


def rows_of_point(
    problem: ShardingProblem,
    point: Point,
    choices: tuple[int, ...],
    layers: np.ndarray | None = None,
) -> tuple[MemoryRow, ...]:
    """The row of a point of a plan, and one that is without pairs, if they matter.

    Of the plan the first says exactly what the point holds. What two choices hold only
    together weighs on each, and the constant is less by as much (`memory_rows.py`):

      lent     what lies in an argument's memory, if the argument is smaller
      kept     a parameter that is gathered and kept behind a barrier: what the barrier
               passes of it, if that is more than its home
      turned   what a collective turns, less for copies of which less is gathered;
               copies beside the relay's

    So of a plan with neither choice it says too little. A second row, which leaves out
    what is kept, turned or copied from arguments, does not.

    Args:
      problem: the problem, with relays that count memory.
      point: what vertices hold there.
      choices: the plan as an assignment of the problem.
      layers: [n, p] vertices of equal layers, of which the row says the same.
    """
    row = _RowBuilder(problem, choices, layers=layers)
    held = problem.choice_graph.bytes_by_node
    for vertex in np.flatnonzero(point.whole).tolist():
        row.add(vertex, held[vertex])
    for vertex in np.flatnonzero(point.copied & ~point.whole).tolist():
        row.add(vertex, row.of_copies(vertex))
    for vertex in np.flatnonzero(point.duplicated).tolist():
        row.add(vertex, held[vertex])
    for vertex in np.flatnonzero(point.wide).tolist():
        row.add(vertex, row.wider(vertex))
    for home, amount in point.lent:
        row.add(home, (held[home] < amount) * float(amount))
    for tensor, target, amount in point.copies:
        if tensor not in row.lasting:
            row.add_copy(tensor, target, amount)
    single = row.built()
    for tensor, target, amount in point.copies:
        if tensor in row.lasting:
            row.add_copy(tensor, target, amount)
    for tensor, source, target, amount in point.turns:
        relay, (writer, made) = problem.relays[tensor], problem.writers[tensor]
        if turns(source, target):
            row.add_turn(tensor, source, amount)
        elif target == problem.vertices[relay].writes[0].choices.of(choices[relay]):
            row.add_turned_result(tensor, amount)
        else:  # a reader turns what the relay hands on
            row.add(writer, made.choices.are(source) * float(amount))
    told = row.with_kept(point.kept)
    rest = point.bytes - told[0].used(choices)
    if single.constant - told[0].constant >= WORTH_TELLING_APART * point.bytes:
        told.append(single)
    return tuple(MemoryRow(r.nodes, r.weights, r.constant + rest) for r in told)


def with_turn(
    problem: ShardingProblem, row: MemoryRow, tensor: int, source: Spec, amount: int
) -> MemoryRow:
    """A row with what turning a tensor from one spec into its relay's takes besides."""
    builder = _RowBuilder(problem, (), row=row)
    builder.add_turn(tensor, source, amount)
    return builder.built()


class _RowBuilder:
    """Adds weights to a row; nodes that weigh alike share their arrays."""

    def __init__(
        self,
        problem: ShardingProblem,
        choices: tuple[int, ...],
        *,
        row: MemoryRow | None = None,
        layers: np.ndarray | None = None,
    ) -> None:
        self.problem, self.choices, self.layers = problem, choices, layers
        given = () if row is None else zip(row.nodes, row.weights, strict=True)
        self.weights: dict[int, np.ndarray] = dict(given)
        self.constant = 0.0 if row is None else row.constant
        self.less: dict[int, float] = {}  # of all choices of a vertex
        self._sums: dict[tuple[int, int], tuple[np.ndarray, ...]] = {}
        self._copies: dict[int, np.ndarray] = {}
        self._wider: dict[int, np.ndarray] = {}
        self._gathered: dict[tuple[int, float, float, float], np.ndarray] = {}

    @cached_property
    def lasting(self) -> frozenset[int]:
        """Tensors of which a copy beside the relay's is one of a pair."""
        return lasting_tensors(self.problem.graph)

    def add(self, vertex: int, more: np.ndarray, less: float = 0.0) -> None:
        """More bytes [choices] of a vertex, and less of all of them."""
        if less:
            self.less[vertex] = self.less.get(vertex, 0.0) + less
        own = self.weights.get(vertex)
        if own is None:
            self.weights[vertex] = more
            return
        key = id(own), id(more)
        if key not in self._sums:
            self._sums[key] = own + more, own, more
        self.weights[vertex] = self._sums[key][0]

    def of_copies(self, vertex: int) -> np.ndarray:
        """[choices] the bytes of a relay where it is a copy."""
        held = self.problem.choice_graph.bytes_by_node[vertex]
        key = id(held)
        if key not in self._copies:
            self._copies[key] = held * is_copied(len(held))
        return self._copies[key]

    def wider(self, vertex: int) -> np.ndarray:
        """[choices] the bytes of a copy in a wider dtype."""
        held = self.problem.choice_graph.bytes_by_node[vertex]
        key = id(held)
        if key not in self._wider:
            self._wider[key] = held * TIMES_WIDER
        return self._wider[key]

    def with_kept(self, kept: Sequence[tuple[int, int, int, int]]) -> list[MemoryRow]:
        """Rows with what barriers pass of arguments that are gathered before them.

        Each is a (home, port, bytes, bytes of the copy). Where the home is split as in
        the plan, or as far as it can be if the plan has it whole, it is what the port
        holds, and nothing where it passes as it lies. A slice keeps the copy that it is
        of. One row says so; where a home is split less than in the plan and passes
        whole it says too little. The other tells that, but slices as their own bytes
        (`barrier_edges.py` forbids what neither tells).
        """
        held = self.problem.choice_graph.bytes_by_node
        split = list[float]()
        is_sliced = may_slice = False
        for home, port, amount, copied in kept:
            lies = held[home][self.choices[home]]
            split.append(held[home].min() if lies >= amount else lies)
            is_slice = (split[-1] < held[port]) & (held[port] < copied)
            is_sliced |= is_slice[self.choices[port]]
            may_slice |= is_slice.any()
        rows = list[MemoryRow]()
        for tells_slices in (True, False) if may_slice and not is_sliced else (True,):
            row = self._copy()
            for (home, port, amount, copied), own in zip(kept, split, strict=True):
                least = copied * tells_slices
                row.add(port, self._beyond(held[port], own, least, 0.0))
                row.add(home, self._beyond(held[home], own, least, amount), amount)
            rows.append(row.built())
        return rows

    def _copy(self) -> _RowBuilder:
        found = _RowBuilder(self.problem, self.choices, layers=self.layers)
        found.weights, found.less = dict(self.weights), dict(self.less)
        found.constant = self.constant
        return found

    def _beyond(
        self, held: np.ndarray, split: float, least: float, whole: float
    ) -> np.ndarray:
        """[choices] what is held where that is more than `split`, and at least that;
        or what it lacks of a whole.
        """
        key = id(held), float(split), float(least), float(whole)
        if key not in self._gathered:
            more = np.maximum(held, least) * (held > split)
            self._gathered[key] = whole - more if whole else more
        return self._gathered[key]

    def built(self) -> MemoryRow:
        weights, constant = self.weights, -sum(self.less.values())
        if self.layers is not None:
            weighed = Weighed(weights, self.less, len(self.problem.vertices))
            weights, constant = levelled(weighed, self.choices, self.layers)
        constant += self.constant
        return MemoryRow(tuple(weights), tuple(weights.values()), constant)

    def add_turn(self, tensor: int, source: Spec, amount: int) -> None:
        """What turning a tensor from one spec into its relay's takes besides."""
        problem = self.problem
        (writer, made), relay = problem.writers[tensor], problem.relays[tensor]
        targets = problem.vertices[relay].writes[0].choices
        turned = turns(source, targets.distinct)
        self.add(writer, made.choices.are(source) * float(amount))
        self.add(relay, turned[targets.classes] * float(amount), amount)

    def add_turned_result(self, tensor: int, amount: int) -> None:
        """What turning what the relay gathers takes besides, by who made it.

        Copies of which less is gathered take less. Of those that gather nothing it says
        too much: rows that say nothing of them find worse plans.
        """
        problem = self.problem
        (writer, made), relay = problem.writers[tensor], problem.relays[tensor]
        source = made.choices.of(self.choices[writer])
        targets = problem.vertices[relay].writes[0].choices
        parts = problem.graph.tensors[tensor].type.bytes * targets.fractions
        is_less = gathers_minor(source, targets.specs) & (parts < amount)
        less = np.where(is_less & is_copied(parts.size), amount - parts, 0.0)
        self.add(writer, made.choices.are(source) * float(amount))
        if less.any():
            self.add(relay, less.max() - less, float(less.max()))

    def add_copy(self, tensor: int, target: Spec, amount: int) -> None:
        """A copy beside the relay's, which one who reads it holds.

        Where the relay's (or the tensor) is in that spec it is what is read; of a
        tensor that lasts that takes no memory. Where no vertex reads the copy, as
        further copies are made of it, it is there if the tensor is not made so.
        """
        problem, choices = self.problem, self.choices
        relay, columns = problem.relays.get(tensor), problem.columns
        holder, access = problem.writers[tensor]
        if relay is not None:
            holder, access = relay, problem.vertices[relay].writes[0]
        is_there = access.choices.are(target)
        reads = columns.reads
        for at in np.flatnonzero(reads.tensor == tensor).tolist():
            reader, specs = int(reads.vertex[at]), columns.choices[reads.choices[at]]
            if reader == relay or specs.of(choices[reader]) != target:
                continue
            self.add(reader, specs.are(target) * float(amount))
            if tensor in self.lasting:
                self.add(holder, ~is_there * float(amount), amount)
            elif holder in self.weights and holder != reader:
                held = self.weights[holder]
                self.add(holder, -np.minimum(held, amount) * is_there)
            return
        self.add(holder, ~is_there * float(amount))
