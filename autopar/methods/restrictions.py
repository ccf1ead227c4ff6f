"""What a method leaves of the sharding problem: the choices that are as it demands.

A restriction demands, for tensors and mesh axes, some of the states that the axis may
have there; the order of the axes of a dim only where a state has a turn. Of every
vertex the choices stay that meet most of it, which are all of it wherever a rule offers
them; the solver chooses among these as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..clusters.cluster import Cluster
from ..planner.pin_choices import ChoicePins
from ..planner.sharding_problem import ShardingProblem
from ..planner.spec_choices import SpecChoices
from ..planner.strategies import operators_to_split, strategy_seconds, tensor_specs
from ..planner.vertices import Access, Vertex
from ..sharding.spec import (
    MAX,
    MIN,
    REPLICATED,
    SUM,
    TURN,
    Spec,
    State,
    dims_of,
    format_spec,
)
from .axes_together import AxesTogether

PENDING = frozenset((SUM, MAX, MIN))
NOT_SPLIT = PENDING | {REPLICATED}
WHOLE = frozenset((REPLICATED,))

_EPSILON = 1e-9
_LESS_WEIGHT = 1e-3

States = frozenset[State] | None  # None: any
Demand = tuple[States, ...]  # by mesh axis
Demands = Mapping[int, Demand]  # by tensor


@dataclass(frozen=True)
class Restriction:
    """Demands on tensors: where they are read or made, only where made, where at home.

    `everywhere` holds for every copy of a tensor, `made` for what operators and borders
    of loops write, `homes` for where arguments lie and state returns to. The narrower
    demand stands in place of the wider. Of homes that meet it alike those `preferred`
    stay, if there are any. `returned` holds for what the function returns that is no
    state. `name` is what errors call it.
    """

    name: str
    everywhere: Demands
    made: Demands
    homes: Demands
    preferred: Demands = field(default_factory=dict)
    returned: Demands = field(default_factory=dict)

    def of(self, vertex: Vertex, access: Access, *, is_write: bool) -> Demand | None:
        """What a vertex must do with a tensor; None if anything goes."""
        demands = [self.everywhere]
        if is_write and vertex.kind in ("operator", "port"):
            demands.insert(0, self.made)
        if is_write and vertex.kind == "home":
            demands.insert(0, self.homes)
        if not is_write and vertex.kind == "result":
            demands.insert(0, self.returned)
        return next((d[access.tensor] for d in demands if access.tensor in d), None)


Limit = Restriction | ChoicePins | AxesTogether


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
    restricted = _Restricted(problem, restrictions, cluster)
    vertices = list(map(restricted.vertex, problem.vertices))
    for relay in _relays_too_small(problem, vertices):
        vertices[relay] = problem.vertices[relay]
    return problem.with_vertices(vertices)


def _relays_too_small(
    problem: ShardingProblem, vertices: Sequence[Vertex]
) -> Iterator[int]:
    """Relays that hold less than some reader needs under all choices that are left.

    Readers that no rule lets meet a demand need more of a tensor than the demand says.
    """
    needed: dict[int, float] = {}
    for vertex in vertices:
        for access in vertex.reads if vertex.kind != "relay" else ():
            least = _fractions(vertex, access).min(initial=1.0)
            needed[access.tensor] = max(needed.get(access.tensor, 0.0), least)
    for tensor, relay in problem.relays.items():
        vertex = vertices[relay]
        most = _fractions(vertex, vertex.writes[0]).max(initial=0.0)
        if needed.get(tensor, 0.0) > most + _EPSILON:
            yield relay


def _fractions(vertex: Vertex, access: Access) -> np.ndarray:
    """What a device holds of a tensor under each choice that is left."""
    return access.choices.fractions[np.isfinite(vertex.seconds)]


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

    def vertex(self, vertex: Vertex) -> Vertex:
        """The vertex, with its other choices at infinite cost."""
        each_met = [self._met(vertex, each) for each in self.restrictions]
        if vertex.kind == "home":
            self._check_home(vertex, each_met)
        met = np.sum(each_met, axis=0) + self._preferred(vertex)
        seconds = self._seconds(vertex)
        possible = np.isfinite(seconds)
        if not possible.any():
            return vertex
        allowed = possible & (met >= met[possible].max() - _EPSILON)
        if vertex.operator in self.must_split and vertex.strategies is not None:
            share = vertex.strategies.share
            allowed &= share <= share[allowed].min() * 1.001
        return replace(vertex, seconds=np.where(allowed, seconds, np.inf))

    def _met(self, vertex: Vertex, restriction: Restriction) -> np.ndarray:
        """How much of a restriction each choice of a vertex meets."""
        met = np.zeros(len(vertex.seconds))
        for access, is_write in self._accesses(vertex):
            demand = restriction.of(vertex, access, is_write=is_write)
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
            demand = restriction.of(vertex, access, is_write=True)
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
