"""Layouts as an integer program, and what is in memory at points of their plans.

See `auto_layout.py` for the formulation. Every plan under a layout holds a tensor in as
many parts, so a point's bytes are linear in the choices of the sets of dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import pulp

from ..costs.memory import MemoryProfile
from ..graph.op_graph import OpGraph
from ..methods.dim_names import Dim, DimTies
from ..methods.layout_rules import LayoutRules, given_names
from ..sharding.mesh import MeshShape
from ..sharding.spec import num_shards
from .memory_constraints import fullest

STRETCHES = 48

Layout = Mapping[str, int]  # the mesh axis of each name that has one
Sign = tuple[tuple[str, frozenset[int]], ...]  # the names of a tensor, and their axes


@dataclass(frozen=True, eq=False)
class NamedDims:
    """Named dims: `reach[name][axis]` are the dims that the axis splits by its rule.

    Axes that cannot split a name are left out of it.
    """

    graph: OpGraph
    mesh: MeshShape
    reach: Mapping[str, Mapping[int, frozenset[Dim]]]

    @classmethod
    def of(
        cls, rules: LayoutRules, graph: OpGraph, mesh: MeshShape, batch: Sequence[int]
    ) -> NamedDims:
        """The dims that the rules name, or `batch`."""
        names = dict(given_names(rules, graph, batch))
        ties = DimTies.of(graph, mesh)
        return cls(
            graph,
            mesh,
            {
                name: dict(_axes_of(name, names, ties, mesh))
                for name in dict.fromkeys(names.values())
            },
        )

    @cached_property
    def splits(self) -> dict[int, Sign]:
        """By tensor, its names and the axes that split it by the rule of each."""
        found: dict[int, dict[str, frozenset[int]]] = {}
        for name, by_axis in self.reach.items():
            for axis, dims in by_axis.items():
                for tensor, _ in dims:
                    own = found.setdefault(tensor, {})
                    own[name] = own.get(name, frozenset()) | {axis}
        return {tensor: tuple(sorted(own.items())) for tensor, own in found.items()}

    def parts(self, sign: Sign, layout: Layout) -> int:
        """Into how many parts a layout splits a tensor with such names."""
        split = (layout[name] for name, axes in sign if layout.get(name) in axes)
        return prod(self.mesh.axis_sizes[axis] for axis in split)

    def text(self, layout: Layout) -> str:
        """The layout as rules."""
        return ";".join(
            f"{name}:{self.mesh.axis_names[axis]}" for name, axis in layout.items()
        )


def _axes_of(
    name: str, names: Mapping[Dim, str], ties: DimTies, mesh: MeshShape
) -> Iterator[tuple[int, frozenset[Dim]]]:
    """Each axis that divides all dims of a name, and no tensor twice."""
    origins = [dim for dim, given in names.items() if given == name]
    sizes = [ties.graph.tensors[tensor].type.shape[dim] for tensor, dim in origins]
    for axis, parts in enumerate(mesh.axis_sizes):
        if any(size % parts for size in sizes):
            continue
        dims = frozenset(ties.reach(origins, parts))
        is_twice = len({tensor for tensor, _ in dims}) < len(dims)
        if not is_twice and all(names.get(dim, name) == name for dim in dims):
            yield axis, dims


class LayoutProgram:
    """All layouts: an axis or none for each name, and bytes at points of plans."""

    def __init__(self, dims: NamedDims) -> None:
        self.dims = dims
        self.points: list[Mapping[Sign, float]] = []  # bytes, were all whole

    def add(self, profile: MemoryProfile, layout: Layout) -> None:
        """Adds the fullest points of the plan of a layout."""
        fixed = dict(_arguments_and_results(profile))
        for point in _points(profile):
            whole: dict[Sign, float] = {}
            for tensor, size in (*fixed.items(), *point.items()):
                sign = self.dims.splits.get(tensor, ())
                more = float(size * self.dims.parts(sign, layout))
                whole[sign] = whole.get(sign, 0.0) + more
            self.points.append(whole)

    def best(self, others: Iterable[Layout]) -> tuple[Layout, float] | None:
        """The layout, none of `others`, that holds the least, and how much.

        Among equal ones that of the most splits; None where there is no other.
        """
        program = pulp.LpProblem("layout", pulp.LpMinimize)
        pairs = [
            (name, axis) for name, axes in self.dims.reach.items() for axis in axes
        ]
        x = {
            pair: pulp.LpVariable(f"x_{i}", cat="Binary")
            for i, pair in enumerate(pairs)
        }
        most = pulp.LpVariable("t", lowBound=0)
        program += most - 1e-7 * pulp.lpSum(x.values())
        for name in self.dims.reach:
            program += pulp.lpSum(v for (own, _), v in x.items() if own == name) <= 1
        y: dict[Sign, list[tuple[int, pulp.LpVariable]]] = {}
        for sign in dict.fromkeys(self.dims.splits.values()):
            y[sign] = []
            by_pair: dict[tuple[str, int], list[pulp.LpVariable]] = {}
            for state in _states(sign):
                variable = pulp.LpVariable(f"y_{len(y)}_{len(y[sign])}", 0, 1)
                parts = prod(self.dims.mesh.axis_sizes[axis] for _, axis in state)
                y[sign].append((parts, variable))
                for pair in state:
                    by_pair.setdefault(pair, []).append(variable)
            program += pulp.lpSum(variable for _, variable in y[sign]) == 1
            for name, axes in sign:
                for axis in axes:
                    program += pulp.lpSum(by_pair[name, axis]) == x[name, axis]
        size = max((sum(point.values()) for point in self.points), default=1.0)
        for point in self.points:
            held = []
            for sign, whole in point.items():
                states = y.get(sign, [(1, 1.0)])
                held += [whole / size / parts * variable for parts, variable in states]
            program += pulp.lpSum(held) <= most
        for layout in others:
            same = [v if layout.get(n) == a else -v for (n, a), v in x.items()]
            program += pulp.lpSum(same) <= len(layout) - 1
        program.solve(pulp.HiGHS(msg=False))
        if program.status != pulp.LpStatusOptimal:
            return None
        layout = {n: a for (n, a), v in x.items() if (v.value() or 0.0) > 0.5}
        return layout, float(most.value() or 0.0) * size


def _states(sign: Sign) -> Iterator[tuple[tuple[str, int], ...]]:
    """The axes that the dims of a tensor may have together, each axis once."""
    options = [[None, *((name, axis) for axis in sorted(axes))] for name, axes in sign]
    for chosen in product(*options):
        state = tuple(pair for pair in chosen if pair is not None)
        if len({axis for _, axis in state}) == len(state):
            yield state


def _arguments_and_results(profile: MemoryProfile) -> Iterator[tuple[int, int]]:
    """Bytes by tensor of what is held throughout; -1 stands for no tensor."""
    graph, plan = profile.graph, profile.plan
    rest = profile.output_bytes
    held: dict[int, int] = {}
    for each, placed in zip(graph.inputs, plan.inputs, strict=True):
        if placed.memory == "device":
            held[each.tensor] = placed.bytes
    returned = {each.output for each in graph.inputs}
    for position, operand in enumerate(graph.outputs):
        if isinstance(operand, int) and position not in returned:
            spec = plan.outputs[0][position]
            parts = num_shards(spec, plan.mesh.axis_sizes)
            size = graph.tensors[operand].type.bytes // parts
            held[operand] = held.get(operand, 0) + size
            rest -= size
    yield from held.items()
    yield -1, rest


def _points(profile: MemoryProfile) -> Iterator[dict[int, int]]:
    """What is live at the fullest points of a program, bytes by tensor."""
    for position in fullest(profile.blocks[0].bytes, STRETCHES):
        held: dict[int, int] = {}
        for block, place in profile.path_to(position):
            for each in profile.blocks[block].live(place):
                held[each.tensor] = held.get(each.tensor, 0) + each.bytes
        yield held
