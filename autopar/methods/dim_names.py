"""Names of dims, spread from the tensors that have them to all that share their dims.

The dims that a factor of an operator ties are one dim of the program: whatever splits
one splits the other. So are those of a tensor that enters a loop or branch, and those
of state and its next value. A name goes wherever an axis that splits it can go: not
through a factor that the axis does not divide, and not through a pin, which is where a
program gives its dim another place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

from ..graph.build_graph import SHARD_MAP, STRUCTURED
from ..graph.op_graph import GraphInput, Operator, OpGraph
from ..rules.base import factors_of
from ..sharding.mesh import MeshShape
from ..sharding.ports import ports_of

Dim = tuple[int, int]  # tensor, dim


@dataclass(frozen=True)
class DimTie:
    """Dims that are split together, and what the number of their parts must divide.

    `operator` is the index of the one that ties them, None for state.
    """

    dims: tuple[Dim, ...]
    size: int
    operator: int | None = None


@dataclass(frozen=True)
class NamedDim:
    """A dim that has a name, and the dim that it got the name from."""

    name: str
    origin: Dim


@dataclass(frozen=True, eq=False)
class _Ties:
    """Ties in the order of their operators, and those that each dim is in."""

    ties: tuple[DimTie, ...]

    @cached_property
    def by_dim(self) -> dict[Dim, list[DimTie]]:
        found: dict[Dim, list[DimTie]] = {}
        for tie in self.ties:
            for dim in tie.dims:
                found.setdefault(dim, []).append(tie)
        return found


_KNOWN = WeakKeyDictionary["OpGraph", dict["MeshShape | None", "_Ties"]]()


@dataclass(frozen=True, eq=False)
class DimTies:
    """All ties of a graph on a mesh, and what is found by following them."""

    graph: OpGraph
    _found: _Ties

    @classmethod
    def of(cls, graph: OpGraph, mesh: MeshShape) -> DimTies:
        """The ties of every operator, of every border of a block, and of state."""
        known = _KNOWN.setdefault(graph, {})
        has_borders = any(op.kind in STRUCTURED for op in graph.operators())
        place = mesh if has_borders else None  # only borders may be pinned
        if place not in known:
            known[place] = _Ties(_all_ties(graph, mesh))
        return cls(graph, known[place])

    @property
    def ties(self) -> tuple[DimTie, ...]:
        return self._found.ties

    def spread(
        self, names: Mapping[Dim, str], num_parts: Mapping[str, int]
    ) -> dict[Dim, tuple[NamedDim, ...]]:
        """Every dim that a name reaches, with all names that reach it.

        Args:
          names: the dims that are given one.
          num_parts: by name, into how many parts its dims are split.
        """
        found: dict[Dim, dict[str, NamedDim]] = {}
        for name, parts in num_parts.items():
            origins = [dim for dim, given in names.items() if given == name]
            for dim, origin in self.reach(origins, parts).items():
                found.setdefault(dim, {})[name] = NamedDim(name, origin)
        return {dim: tuple(named.values()) for dim, named in found.items()}

    def reach(self, origins: Iterable[Dim], num_parts: int) -> dict[Dim, Dim]:
        """Each dim that is tied to one of `origins`, with the origin that is nearest.

        Only ties count whose size `num_parts` divides.
        """
        found = {dim: dim for dim in origins}
        queue = deque(found)
        while queue:
            dim = queue.popleft()
            for tie in self._found.by_dim.get(dim, ()):
                if tie.size % num_parts:
                    continue
                for other in tie.dims:
                    if other not in found:
                        found[other] = found[dim]
                        queue.append(other)
        return found

    def classes(self, num_parts: int) -> tuple[frozenset[Dim], ...]:
        """All dims that `num_parts` divides, those that are one dim together."""
        left = dict.fromkeys(self._all_dims(num_parts))
        found = []
        while left:
            dim = next(iter(left))
            found.append(frozenset(self.reach([dim], num_parts)))
            for each in found[-1]:
                left.pop(each, None)
        return tuple(found)

    def _all_dims(self, num_parts: int) -> Iterator[Dim]:
        for tensor in self.graph.tensors:
            for dim, size in enumerate(tensor.type.shape):
                if size and size % num_parts == 0:
                    yield tensor.index, dim


def _all_ties(graph: OpGraph, mesh: MeshShape) -> tuple[DimTie, ...]:
    ties = []
    for op in graph.operators():
        borders = op.kind in STRUCTURED
        ties += _port_ties(graph, op, mesh) if borders else _factor_ties(op)
    for graph_input in graph.inputs:
        ties += _state_ties(graph, graph_input)
    return tuple(tie for tie in ties if len(tie.dims) > 1)


def _factor_ties(op: Operator) -> Iterator[DimTie]:
    for factor in factors_of(op):
        states = [*zip(op.operands, factor.operands, strict=True)]
        states += zip(op.results, factor.results, strict=True)
        dims = [(t, dim) for t, dim in states if isinstance(t, int) and dim >= 0]
        yield DimTie(tuple(dict.fromkeys(dims)), factor.size, op.index)


def _port_ties(graph: OpGraph, op: Operator, mesh: MeshShape) -> Iterator[DimTie]:
    if op.kind == SHARD_MAP:
        return
    for port in ports_of(graph, op):
        if port.is_whole or port.pin(mesh) is not None:
            continue
        sides = [*port.writes, *((tensor, extra) for tensor, extra, _ in port.reads)]
        for dim, size in enumerate(port.type.shape):
            dims = (((tensor, dim + extra)) for tensor, extra in sides)
            yield DimTie(tuple(dict.fromkeys(dims)), size, op.index)


def _state_ties(graph: OpGraph, graph_input: GraphInput) -> Iterator[DimTie]:
    if graph_input.output is None:
        return
    following = graph.outputs[graph_input.output]
    if isinstance(following, int):
        for dim, size in enumerate(graph.tensors[graph_input.tensor].type.shape):
            yield DimTie(((graph_input.tensor, dim), (following, dim)), size)
