"""Layouts as an integer program, and what is in memory at points of their plans.

See `auto_layout.py` for the formulation. Every plan under a layout holds a tensor in as
many parts, so a point's bytes are linear in the choices of the sets of dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf, prod

import numpy as np
import pulp

from autopar.solver.budget_rows import BudgetRow
from autopar.solver.choice_graph import ChoiceGraph, Edge, Node

from ..costs.memory import MemoryProfile
from ..graph.op_graph import OpGraph
from ..methods.dim_names import Dim, DimTies
from ..methods.layout_rules import LayoutRules, given_names
from ..sharding.mesh import MeshShape
from ..sharding.spec import num_shards
from .memory_rows import fullest

STRETCHES = 48

Layout = Mapping[str, int]  # the mesh axis of each name that has one


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
    def splits(self) -> dict[int, dict[str, frozenset[int]]]:
        """By tensor and name, the axes that split it there by that name's rule."""
        found: dict[int, dict[str, frozenset[int]]] = {}
        for name, by_axis in self.reach.items():
            for axis, dims in by_axis.items():
                for tensor, _ in dims:
                    own = found.setdefault(tensor, {})
                    own[name] = own.get(name, frozenset()) | {axis}
        return found

    def parts(self, tensor: int, layout: Layout) -> int:
        """Into how many parts a layout splits a tensor."""
        axes = self.splits.get(tensor, {})
        split = (layout[n] for n, known in axes.items() if layout.get(n) in known)
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
    """The choices of all layouts: an axis or none for each name, and what follows.

    `graph` costs 1 for each name that no axis splits. Nodes are names, then sets of
    dims, whose bytes are the part of a tensor that one device holds.
    """

    def __init__(self, dims: NamedDims) -> None:
        self.dims = dims
        self.names = [name for name, axes in dims.reach.items() if axes]
        self.axes = [(None, *dims.reach[name]) for name in self.names]
        signs = {t: tuple(sorted(each.items())) for t, each in dims.splits.items()}
        self.sets = list(dict.fromkeys(signs.values()))
        first = len(self.names)
        self.set_of = {t: first + self.sets.index(sign) for t, sign in signs.items()}
        self.choices_of_set = [_states(each) for each in self.sets]
        self.graph = self._choice_graph()

    def layout(self, choices: Sequence[int]) -> Layout:
        """The layout that an assignment stands for."""
        pairs = zip(self.names, self.axes, choices, strict=False)
        chosen = ((name, axes[choice]) for name, axes, choice in pairs)
        return {name: axis for name, axis in chosen if axis is not None}

    def rows(self, profile: MemoryProfile, layout: Layout) -> Iterator[BudgetRow]:
        """What layouts hold at the fullest points of the plan of one."""
        fixed = dict(_arguments_and_results(profile))
        for point in _points(profile):
            yield self._row(fixed, point, layout)

    def _row(
        self,
        fixed: Mapping[int, int],
        point: Mapping[int, int],
        layout: Layout,
    ) -> BudgetRow:
        weights: dict[int, np.ndarray] = {}
        constant = 0.0
        for tensor, held in (*fixed.items(), *point.items()):
            node = self.set_of.get(tensor)
            if node is None:
                constant += held
                continue
            whole = float(held * self.dims.parts(tensor, layout))
            more = whole * self.graph.nodes[node].bytes
            weights[node] = weights[node] + more if node in weights else more
        nodes = np.array(list(weights), np.intp)
        none = np.zeros(0, np.intp)
        return BudgetRow(nodes, list(weights.values()), none, [], constant)

    def best(
        self, rows: Sequence[BudgetRow], others: Iterable[Sequence[int]]
    ) -> tuple[tuple[int, ...], float] | None:
        """The layout that holds the least by the rows, none of `others`, and how much.

        Among equal ones that of the most splits; None where there is no other.
        """
        program = pulp.LpProblem("layout", pulp.LpMinimize)
        x = [
            [
                pulp.LpVariable(f"x_{v}_{k}", cat="Binary")
                for k in range(node.costs.size)
            ]
            for v, node in enumerate(self.graph.nodes)
        ]
        size = max(max((row.constant for row in rows), default=1.0), 1.0)
        most = pulp.LpVariable("t", lowBound=0)
        costs = [
            cost * x[v][k]
            for v, node in enumerate(self.graph.nodes)
            for k, cost in enumerate(node.costs.tolist())
        ]
        program += most + 1e-7 * pulp.lpSum(costs)
        for own in x:
            program += pulp.lpSum(own) == 1
        for edge in self.graph.edges:
            for a, b in zip(*np.nonzero(np.isinf(edge.costs)), strict=True):
                program += x[edge.first][a] + x[edge.second][b] <= 1
        for row in rows:
            held = [
                float(bytes_ / size) * x[v][k]
                for v, own in zip(row.nodes.tolist(), row.node_bytes, strict=True)
                for k, bytes_ in enumerate(own.tolist())
            ]
            program += pulp.lpSum(held) + row.constant / size <= most
        for choices in others:
            program += (
                pulp.lpSum(x[v][k] for v, k in enumerate(choices[: len(self.names)]))
                <= len(self.names) - 1
            )
        program.solve(pulp.HiGHS(msg=False))
        if program.status != pulp.LpStatusOptimal:
            return None
        chosen = tuple(
            int(np.argmax([variable.value() or 0.0 for variable in own])) for own in x
        )
        return chosen, float(most.value() or 0.0) * size

    def _choice_graph(self) -> ChoiceGraph:
        sizes = self.dims.mesh.axis_sizes
        nodes = [
            Node(
                name,
                np.array([float(axis is None) for axis in axes]),
                np.zeros(len(axes)),
            )
            for name, axes in zip(self.names, self.axes, strict=True)
        ]
        for each, states in zip(self.sets, self.choices_of_set, strict=True):
            parts = [prod(sizes[a] for a in s if a is not None) for s in states]
            name = " ".join(name for name, _ in each)
            nodes.append(Node(name, np.zeros(len(states)), 1.0 / np.array(parts)))
        edges = [*self._legal_pairs(), *self._agreement()]
        return ChoiceGraph(tuple(nodes), tuple(edges))

    def _legal_pairs(self) -> Iterator[Edge]:
        """No axis splits two dims of a tensor."""
        together = {
            frozenset((first, second))
            for each in self.sets
            for first, _ in each
            for second, _ in each
            if first != second
        }
        for i, first in enumerate(self.names):
            for j, second in enumerate(self.names[:i]):
                if frozenset((first, second)) in together:
                    costs = np.array(
                        [
                            [inf if a == b is not None else 0.0 for b in self.axes[j]]
                            for a in self.axes[i]
                        ]
                    )
                    yield Edge(i, j, *_each(costs), costs)

    def _agreement(self) -> Iterator[Edge]:
        """Sets of dims have the axes of their dims."""
        for k, (each, states) in enumerate(
            zip(self.sets, self.choices_of_set, strict=True)
        ):
            for position, (name, known) in enumerate(each):
                node = self.names.index(name)
                seen = [a if a in known else None for a in self.axes[node]]
                costs = np.array(
                    [
                        [0.0 if a == state[position] else inf for a in seen]
                        for state in states
                    ]
                )
                first = len(self.names) + k
                yield Edge(first, node, *_each(costs), costs)


def _states(
    each: tuple[tuple[str, frozenset[int]], ...],
) -> list[tuple[int | None, ...]]:
    """The axes that the dims of a set may have together."""
    options = [(None, *sorted(axes)) for _, axes in each]
    return [
        state
        for state in product(*options)
        if all(axis is None or state.count(axis) == 1 for axis in state)
    ]


def _each(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every choice in a class of its own."""
    return np.arange(costs.shape[0]), np.arange(costs.shape[1])


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
