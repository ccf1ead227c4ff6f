"""What a method leaves of the sharding problem: the choices that are as it demands.

A restriction demands, for tensors and mesh axes, some of the states that the axis may
have there; the order of the axes of a dim only where a state has a turn. Of every
vertex the choices stay that meet most of it, which are all of it wherever a rule offers
them; the solver chooses among these as ever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..clusters.cluster import Cluster
from ..methods.restrictions import Demand, Restriction
from ..sharding.spec import REPLICATED, TURN, Spec, dims_of, format_spec
from .pin_choices import ChoicePins
from .sharding_problem import ShardingProblem
from .spec_choices import SpecChoices
from .strategies import operators_to_split, strategy_seconds, tensor_specs
from .vertices import Access, Vertex

_EPSILON = 1e-9
_LESS_WEIGHT = 1e-3

Limit = Restriction | ChoicePins


def demanded_orders(limits: Sequence[Limit]) -> set[Spec]:
    """Specs with the orders of axes that restrictions demand besides mesh order."""
    kinds = (
        (each.everywhere, each.made, each.homes, each.returned)
        for each in limits
        if isinstance(each, Restriction)
    )
    demands = {d for each in kinds for by_tensor in each for d in by_tensor.values()}
    return {
        tuple(
            next(iter(states)) if states and len(states) == 1 else REPLICATED
            for states in demand
        )
        for demand in demands
        if _is_ordered(demand)
    }


def _is_ordered(demand: Demand) -> bool:
    """Whether axes of one dim must be in an order that is not the mesh's."""
    return any(state >= TURN for states in demand for state in states or ())


def restrict(
    problem: ShardingProblem, limits: Sequence[Limit], cluster: Cluster
) -> ShardingProblem:
    """The problem with every other choice forbidden.

    Operators that must be split are split as far as the restrictions let them.

    Raises:
      ValueError: an argument cannot lie as two restrictions, or a pin and a
        restriction, want it.
    """
    restrictions = [each for each in limits if isinstance(each, Restriction)]
    if restrictions:
        problem = _restricted(problem, restrictions, cluster)
    for each in limits:
        if not isinstance(each, Restriction):
            problem = each.applied(problem)
    return problem


def _restricted(
    problem: ShardingProblem, restrictions: Sequence[Restriction], cluster: Cluster
) -> ShardingProblem:
    restricted, columns = _Restricted(problem, restrictions, cluster), problem.vertices
    examples, kind = _kinds(problem, restrictions, restricted.must_split)
    seconds = [restricted.seconds(columns[at]) for at in examples]
    return problem.with_seconds(seconds, kind)


def _kinds(
    problem: ShardingProblem,
    restrictions: Sequence[Restriction],
    must_split: Collection[int],
) -> tuple[list[int], np.ndarray]:
    """The first vertex of each kind, by pattern and what is demanded; kinds of all."""
    columns, operators = problem.vertices, problem.graph.operators()
    numbers: dict[object, int] = {}
    examples: list[int] = []
    found: list[int] = []
    accesses = columns.writes.tensors(), columns.reads.tensors()
    own = columns.pattern.tolist(), columns.row.tolist()
    vertices = zip(*own, *accesses, strict=True)
    for vertex, (pattern, row, written, read) in enumerate(vertices):
        kind = columns.patterns[pattern].kind
        demands = [pattern, row >= 0 and operators[row].index in must_split]
        for each in restrictions:
            demands += [each.of(kind, tensor, is_write=True) for tensor in written]
            demands += [each.of(kind, tensor, is_write=False) for tensor in read]
            demands += [each.preferred.get(t) for t in written if kind == "home"]
        number = numbers.setdefault(tuple(demands), len(examples))
        if number == len(examples):
            examples.append(vertex)
        found.append(number)
    return examples, np.array(found, np.intp)


class _Restricted:
    def __init__(
        self,
        problem: ShardingProblem,
        restrictions: Sequence[Restriction],
        cluster: Cluster,
    ) -> None:
        self.problem, self.restrictions = problem, restrictions
        self.cluster = cluster
        self.must_split = operators_to_split(problem.graph)
        self.operators = {op.index: op for op in problem.graph.operators()}
        self._weights = np.log2(problem.mesh.axis_sizes)
        self._known: dict[tuple[int, Demand], np.ndarray] = {}

    def seconds(self, vertex: Vertex) -> np.ndarray:
        """Those of the choices of a vertex, infinite for others than are left."""
        each_met = [self._met(vertex, each) for each in self.restrictions]
        if vertex.kind == "home":
            self._check_home(vertex, each_met)
        met = np.sum(each_met, axis=0) + self._preferred(vertex)
        seconds = self._seconds(vertex)
        possible = np.isfinite(seconds)
        if not possible.any():
            return vertex.seconds
        allowed = possible & (met >= met[possible].max() - _EPSILON)
        if vertex.operator in self.must_split and vertex.strategies is not None:
            share = vertex.strategies.share
            allowed &= share <= share[allowed].min() * 1.001
        return np.where(allowed, seconds, np.inf)

    def _met(self, vertex: Vertex, restriction: Restriction) -> np.ndarray:
        """How much of a restriction each choice of a vertex meets."""
        met = np.zeros(len(vertex.seconds))
        for access, is_write in self._accesses(vertex):
            demand = restriction.of(vertex.kind, access.tensor, is_write=is_write)
            if demand is not None:
                met = met + self._met_by(access.choices, demand)
        return met

    def _preferred(self, vertex: Vertex) -> float | np.ndarray:
        """What is met besides, of far less weight than any demand."""
        if vertex.kind != "home":
            return 0.0
        (access,) = vertex.writes
        wanted = (each.preferred.get(access.tensor) for each in self.restrictions)
        met = [self._met_by(access.choices, each) for each in wanted if each]
        return _LESS_WEIGHT * np.sum(met, axis=0)

    def _check_home(self, vertex: Vertex, each_met: Sequence[np.ndarray]) -> None:
        """Refuse what a pin, or one restriction, makes impossible for another."""
        (access,) = vertex.writes
        tensor = self.problem.graph.tensors[access.tensor]
        legal = np.array(tensor_specs(tensor.type, self.problem.mesh, pending=False))
        for restriction, met in zip(self.restrictions, each_met, strict=True):
            demand = restriction.of(vertex.kind, access.tensor, is_write=True)
            if demand is None or len(met) == len(legal):
                continue
            if met.max() < self._count(legal, demand).max() - _EPSILON:
                names = self.problem.mesh.axis_names
                pinned = format_spec(access.choices.of(0), tensor.type.rank, names)
                raise ValueError(
                    f"An argument must lie as its pin and the method or rules say, "
                    f"but {tensor.name}, {tensor.type}, is pinned to {pinned}, which "
                    f"{restriction.name} rules out; drop the pin or change the other."
                )
        best = [met.max() for met in each_met]
        if np.sum(each_met, axis=0).max() < sum(best) - _EPSILON:
            raise ValueError(
                f"An argument must lie as the method and the rules both say, but "
                f"{' and '.join(each.name for each in self.restrictions)} want "
                f"{tensor.name}, {tensor.type}, in different places; use one of them."
            )

    def _accesses(self, vertex: Vertex) -> list[tuple[Access, bool]]:
        reads = () if vertex.kind == "home" else vertex.reads
        return [*((a, True) for a in vertex.writes), *((a, False) for a in reads)]

    def _met_by(self, choices: SpecChoices, demand: Demand) -> np.ndarray:
        """How much of the demand each choice meets: the log of the axes' sizes."""
        key = id(choices), demand
        if key not in self._known:
            self._known[key] = self._count(choices.specs, demand)
        return self._known[key]

    def _count(self, specs: np.ndarray, demand: Demand) -> np.ndarray:
        met = np.zeros(len(specs))
        if not _is_ordered(demand):
            specs = dims_of(specs)
        for axis, states in enumerate(demand):
            if states is not None:
                inside = np.isin(specs[:, axis], sorted(states))
                met += inside * self._weights[axis]
        return met

    def _seconds(self, vertex: Vertex) -> np.ndarray:
        """With those strategies too that repeat work, as a restriction may want it."""
        if vertex.operator not in self.must_split or vertex.strategies is None:
            return vertex.seconds
        op = self.operators[vertex.operator]
        problem = self.problem
        seconds = strategy_seconds(op, vertex.strategies, problem.mesh, self.cluster)
        return seconds * problem.graph.blocks[op.block].weight
