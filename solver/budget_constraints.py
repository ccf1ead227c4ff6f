"""What one point of a program holds, as a linear function of an assignment.

A row may price what it says: `priced` adds prices on rows to a graph without a budget,
so that nodes and edges that were alike stay alike where the rows are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from .choice_graph import ChoiceGraph, TypedEdges, TypedNodes


@dataclass(frozen=True, eq=False)
class BudgetRow:
    """What one point of a program holds, as a linear function of an assignment.

        constant + sum_k node_bytes[k][x_(nodes[k])]
                 + sum_m edge_bytes[m][class of x_first, class of x_second]

    `nodes` [n] are nodes of a graph, `node_bytes` n arrays [choices]; `edges` [m] are
    indices of its edges, `edge_bytes` m matrices of the shape of that edge's `costs`.
    What is alike shares its array.
    """

    nodes: np.ndarray
    node_bytes: Sequence[np.ndarray]
    edges: np.ndarray
    edge_bytes: Sequence[np.ndarray]
    constant: float = 0.0

    def used(self, graph: ChoiceGraph, choices: Sequence[int]) -> float:
        """The bytes that one choice per node holds."""
        return float(self.used_by(graph, np.asarray(choices, np.intp)[None])[0])

    def used_by(self, graph: ChoiceGraph, plans: np.ndarray) -> np.ndarray:
        """[plans] the bytes of choices [plans, nodes]."""
        ends = edge_classes(graph).at(plans, self.edges)
        held = self.at_nodes(plans).sum(axis=1) + self.at_edges(*ends).sum(axis=-1)
        return self.constant + held

    def at_nodes(self, plans: np.ndarray) -> np.ndarray:
        """[plans, n] what each of `nodes` holds."""
        flat, starts, _ = self._nodes
        return flat[starts + plans[:, self.nodes]]

    def at_edges(
        self,
        first: np.ndarray,
        second: np.ndarray,
        which: np.ndarray | slice = slice(None),
    ) -> np.ndarray:
        """[..., m] what each of `edges` (or of `which` of them) holds, by classes."""
        flat, starts, widths = self._edges
        return flat[starts[which] + first * widths[which] + second]

    @cached_property
    def kinds(self) -> tuple["Kinds", "Kinds"]:
        """Of nodes and of edges."""
        return Kinds.of(self.node_bytes), Kinds.of(self.edge_bytes)

    @cached_property
    def _nodes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.kinds[0].flat()

    @cached_property
    def _edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.kinds[1].flat()

    def __str__(self) -> str:
        return (
            f"BudgetRow: {len(self.nodes)} nodes, {len(self.edges)} edges, "
            f"constant {self.constant:.6g}"
        )


def cost_row(graph: ChoiceGraph) -> BudgetRow:
    """The costs of a graph in the form of a row."""
    types = graph.types
    costs = [graph.nodes[index].costs for index in types.node_of.tolist()]
    matrices = [graph.edges[index].costs for index in types.edge_of.tolist()]
    return BudgetRow(
        np.arange(len(graph.nodes)),
        [costs[kind] for kind in types.node.tolist()],
        np.arange(len(graph.edges)),
        [matrices[kind] for kind in types.edge.tolist()],
        graph.constant,
    )


@dataclass(frozen=True, eq=False)
class Kinds:
    """The distinct arrays of some, and which of them each is."""

    distinct: list[np.ndarray]
    kind: np.ndarray

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> "Kinds":
        known = {id(array): array for array in arrays}
        number = {key: index for index, key in enumerate(known)}
        kind = np.array([number[id(array)] for array in arrays], np.intp)
        return cls(list(known.values()), kind)

    def flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All entries in a row; where each one's begin, and its last dimension."""
        flat = np.concatenate([*(a.reshape(-1) for a in self.distinct), np.zeros(0)])
        starts = np.cumsum([0, *(a.size for a in self.distinct)], dtype=np.intp)
        widths = np.array([a.shape[-1] for a in self.distinct], np.intp)
        return flat, starts[self.kind], widths[self.kind]


@dataclass(frozen=True, eq=False)
class EdgeClasses:
    """The classes of both ends of all edges, to look many up at once."""

    ends: tuple[np.ndarray, np.ndarray]
    flat: tuple[np.ndarray, np.ndarray]
    starts: tuple[np.ndarray, np.ndarray]

    def at(self, plans: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[plans, edges] the classes of the first and of the second ends."""
        sides = zip(self.ends, self.flat, self.starts, strict=True)
        first, second = (
            flat[starts[edges] + plans[:, ends[edges]]] for ends, flat, starts in sides
        )
        return first, second


_KNOWN: "WeakKeyDictionary[ChoiceGraph, EdgeClasses]" = WeakKeyDictionary()


def edge_classes(graph: ChoiceGraph) -> EdgeClasses:
    """Those of a graph, made once."""
    if graph not in _KNOWN:
        types = graph.types
        examples = [graph.edges[index] for index in types.edge_of.tolist()]
        own = [[e.first_class for e in examples], [e.second_class for e in examples]]
        flat = [np.concatenate([*each, np.zeros(0, np.intp)]) for each in own]
        starts = [
            np.cumsum([0, *(a.size for a in each)], dtype=np.intp)[types.edge]
            for each in own
        ]
        _KNOWN[graph] = EdgeClasses(
            (types.first, types.second), (flat[0], flat[1]), (starts[0], starts[1])
        )
    return _KNOWN[graph]


def priced(
    graph: ChoiceGraph,
    rows: Sequence[BudgetRow],
    prices: np.ndarray,
) -> ChoiceGraph:
    """The graph that also costs what it holds, at a price a byte of each row."""
    pairs = [(row, m) for row, m in zip(rows, prices.tolist(), strict=True) if m]
    types = graph.types

    def charged(
        own: np.ndarray, costs: Sequence[np.ndarray], charges: Sequence[_Charge]
    ) -> tuple[np.ndarray, list[tuple[int, np.ndarray]], float]:
        """New types of items, what each was before and costs now, and what is less."""
        type_of, found = _combined(own, charges)
        priced_types, shifts = [], np.zeros(len(found))
        for kind, (before, held) in enumerate(found):
            now = costs[before]
            for charge in held:
                now = now + charge
            shifts[kind] = least = min(float(now.min(initial=0.0)), 0.0)
            priced_types.append((before, now - least if least else now))
        return type_of, priced_types, float(shifts[type_of].sum())

    examples = [graph.nodes[index] for index in types.node_of.tolist()]
    charges = [c for r, m in pairs for c in _charges(r.nodes, r.kinds[0], m)]
    costs = [each.costs for each in examples]
    type_of, found, less = charged(types.node, costs, charges)
    node_types = [(now, examples[before].bytes) for before, now in found]
    nodes = TypedNodes(node_types, type_of, lambda index: graph.nodes[index].name)

    joins = [graph.edges[index] for index in types.edge_of.tolist()]
    charges = [c for r, m in pairs for c in _charges(r.edges, r.kinds[1], m)]
    costs = [each.costs for each in joins]
    type_of, found, less_of_edges = charged(types.edge, costs, charges)
    ends = [
        (joins[before].first_class, joins[before].second_class) for before, _ in found
    ]
    edge_types = [(*own, now) for own, (_, now) in zip(ends, found, strict=True)]
    edges = TypedEdges(edge_types, type_of, types.first, types.second)
    constant = graph.constant + sum(m * r.constant for r, m in pairs)
    return ChoiceGraph(nodes, edges, constant=constant + less + less_of_edges)


_Charge = tuple[np.ndarray, np.ndarray, list[np.ndarray]]  # items, their kind, by kind


def _charges(index: np.ndarray, kinds: Kinds, price: float) -> Iterator[_Charge]:
    """What a row adds to nodes or edges; each is charged once at a time."""
    by_kind = [price * array for array in kinds.distinct]
    left = np.arange(len(index))
    while left.size:
        once = np.unique(index[left], return_index=True)[1]
        yield index[left[once]], kinds.kind[left[once]], by_kind
        left = np.delete(left, once)


def _combined(
    own: np.ndarray, charges: Sequence[_Charge]
) -> tuple[np.ndarray, list[tuple[int, list[np.ndarray]]]]:
    """Types of items that are alike in all: the type of each, and what makes it up."""
    kinds, key = [own], own
    for items, kind, by_kind in charges:
        kinds.append(np.full(len(own), -1))
        kinds[-1][items] = kind
        key = key * (len(by_kind) + 1) + kinds[-1] + 1
        key = np.unique(key, return_inverse=True)[1].reshape(-1)
    _, examples, type_of = np.unique(key, return_index=True, return_inverse=True)
    found = []
    for first, *others in np.stack(kinds)[:, examples].T.tolist():
        held = [
            by_kind[kind]
            for kind, (_, _, by_kind) in zip(others, charges, strict=True)
            if kind >= 0
        ]
        found.append((first, held))
    return type_of.reshape(-1), found
