"""The problem: pick one choice per node at least total cost.

    minimise    constant + sum_v costs_v[x_v] + sum_e costs_e[a_e(x_u), b_e(x_v)]

where edge e joins the nodes u (first) and v (second).

`a_e` and `b_e` are the edge's classes: choices that need the same thing from the other
end of an edge share a class, so an edge's matrix is as small as what it distinguishes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .made_when_read import MadeWhenRead

MANY_NODES = 1000


@dataclass(frozen=True, eq=False)
class Node:
    """One decision.

    `costs` [k] is at least 0, and inf where a choice is forbidden; `bytes` [k] is what
    each choice holds, which no solver reads: `budget.py` asks an oracle.
    """

    name: str
    costs: np.ndarray
    bytes: np.ndarray

    def __str__(self) -> str:
        return f"{self.name}: {self.costs.size} choices"


@dataclass(frozen=True, eq=False)
class Edge:
    """A cost between two nodes, given on classes of their choices.

    `first_class` [k_first] and `second_class` [k_second] are the class of each choice;
    `costs` [first classes, second classes] may hold inf for a forbidden pair. Edges
    that repeat should share their arrays: the solver works once per distinct array.
    """

    first: int
    second: int
    first_class: np.ndarray
    second_class: np.ndarray
    costs: np.ndarray

    def __str__(self) -> str:
        rows, columns = self.costs.shape
        return f"{self.first} -- {self.second}: {rows} x {columns} classes"


@dataclass(frozen=True, eq=False)
class TypedNodes(MadeWhenRead[Node]):
    """Nodes of few types: their costs and bytes, `type_of` [nodes], names by index."""

    types: Sequence[tuple[np.ndarray, np.ndarray]]
    type_of: np.ndarray
    name_of: Callable[[int], str]

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> "TypedNodes":
        """The same nodes; those that share both arrays are of one type."""
        if isinstance(nodes, TypedNodes):
            return nodes
        keys = [(id(node.costs), id(node.bytes)) for node in nodes]
        type_of, examples = _numbered(keys)
        types = [(nodes[i].costs, nodes[i].bytes) for i in examples.tolist()]
        return cls(types, type_of, lambda index: nodes[index].name)

    def __len__(self) -> int:
        return len(self.type_of)

    def item(self, index: int) -> Node:
        """The node at an index."""
        return Node(self.name_of(index), *self.types[self.type_of[index]])

    @property
    def num_choices(self) -> int:
        """All choices of all nodes."""
        return int(
            np.array([len(costs) for costs, _ in self.types])[self.type_of].sum()
        )

    def numbered(self) -> tuple[np.ndarray, np.ndarray]:
        """As `Types.node` and `node_of`."""
        return _by_appearance(
            _numbered([id(c) for c, _ in self.types])[0][self.type_of]
        )


EdgeType = tuple[np.ndarray, np.ndarray, np.ndarray]  # classes of both ends, costs


@dataclass(frozen=True, eq=False)
class TypedEdges(MadeWhenRead[Edge]):
    """Edges of few types: what they share, and `type_of`, `first`, `second` [edges]."""

    types: Sequence[EdgeType]
    type_of: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @classmethod
    def of(
        cls,
        types: Sequence[EdgeType | None],
        type_of: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
    ) -> "TypedEdges":
        """Without the edges whose type is None."""
        number = np.cumsum([each is not None for each in types], dtype=np.intp) - 1
        kept = np.array([each is not None for each in types], bool)[type_of]
        left = [each for each in types if each is not None]
        return cls(left, number[type_of[kept]], first[kept], second[kept])

    def __len__(self) -> int:
        return len(self.type_of)

    def item(self, index: int) -> Edge:
        """The edge at an index."""
        ends = int(self.first[index]), int(self.second[index])
        return Edge(*ends, *self.types[self.type_of[index]])

    def numbered(self) -> tuple[np.ndarray, np.ndarray]:
        """As `Types.edge` and `edge_of`."""
        same = _numbered([tuple(map(id, each)) for each in self.types])[0]
        return _by_appearance(same[self.type_of])


@dataclass(frozen=True, eq=False)
class ChoiceGraph:
    """Nodes and pairwise costs (parallel edges add up)."""

    nodes: Sequence[Node]
    edges: Sequence[Edge]
    constant: float = 0.0

    @cached_property
    def types(self) -> "Types":
        """Which nodes and edges share their arrays."""
        return Types.of(self)

    @property
    def num_choices(self) -> int:
        """All choices of all nodes."""
        if isinstance(self.nodes, TypedNodes):
            return self.nodes.num_choices
        return sum(node.costs.size for node in self.nodes)

    def cost(self, choices: Sequence[int]) -> float:
        """The total cost of one choice per node; inf where something is forbidden."""
        if len(self.nodes) > MANY_NODES:
            return self.types.cost(self, choices)
        total = self.constant
        for node, choice in zip(self.nodes, choices, strict=True):
            total += node.costs[choice]
        for edge in self.edges:
            row = edge.first_class[choices[edge.first]]
            column = edge.second_class[choices[edge.second]]
            total += edge.costs[row, column]
        return float(total)

    def __str__(self) -> str:
        sizes = [node.costs.size for node in self.nodes]
        lines = [
            f"ChoiceGraph: {len(sizes)} nodes, {sum(sizes)} choices, "
            f"{len(self.edges)} edges, constant {self.constant:.6g}",
        ]
        lines += [f"  {index} {node}" for index, node in enumerate(self.nodes[:12])]
        lines += [f"  {edge}" for edge in self.edges[:12]]
        hidden = max(len(sizes) - 12, 0) + max(len(self.edges) - 12, 0)
        return "\n".join(lines + ([f"  ... {hidden} more"] if hidden else []))


@dataclass(frozen=True, eq=False)
class Types:
    """Nodes and edges by type: those that share their arrays are of one.

    `node` [nodes] and `edge` [edges] are types, `first` and `second` [edges] the ends;
    `node_of` and `edge_of` [types] are one index of each type.
    """

    node: np.ndarray
    node_of: np.ndarray
    edge: np.ndarray
    edge_of: np.ndarray
    first: np.ndarray
    second: np.ndarray

    @classmethod
    def of(cls, graph: ChoiceGraph) -> "Types":
        nodes, edges = graph.nodes, graph.edges
        if isinstance(nodes, TypedNodes):
            node = nodes.numbered()
        else:
            node = _numbered([id(node.costs) for node in nodes])
        if isinstance(edges, TypedEdges):
            return cls(*node, *edges.numbered(), edges.first, edges.second)
        keys = [(id(e.first_class), id(e.second_class), id(e.costs)) for e in edges]
        first = np.array([edge.first for edge in edges], np.intp)
        second = np.array([edge.second for edge in edges], np.intp)
        return cls(*node, *_numbered(keys), first, second)

    def cost(self, graph: ChoiceGraph, choices: Sequence[int]) -> float:
        """The total cost of one choice per node."""
        chosen = np.asarray(choices, np.intp)
        total = graph.constant
        for index, members in zip(self.node_of, self._node_members, strict=True):
            total += graph.nodes[index].costs[chosen[members]].sum()
        for index, members in zip(self.edge_of, self._edge_members, strict=True):
            edge = graph.edges[index]
            rows = edge.first_class[chosen[self.first[members]]]
            columns = edge.second_class[chosen[self.second[members]]]
            total += edge.costs[rows, columns].sum()
        return float(total)

    @cached_property
    def _node_members(self) -> list[np.ndarray]:
        return _members(self.node, self.node_of.size)

    @cached_property
    def _edge_members(self) -> list[np.ndarray]:
        return _members(self.edge, self.edge_of.size)


class Infeasible(ValueError):
    """No assignment exists."""


def _by_appearance(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `_numbered`, of an array of numbers."""
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return rank[number.reshape(-1)], first[order]


def _numbered(keys: list) -> tuple[np.ndarray, np.ndarray]:
    """The number of each key in order of appearance, and where each appears first."""
    numbers: dict[object, int] = {}
    each = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.intp)
    return each, np.unique(each, return_index=True)[1]


def _members(types: np.ndarray, count: int) -> list[np.ndarray]:
    order = np.argsort(types, kind="stable")
    ends = np.searchsorted(types[order], np.arange(count + 1))
    return [order[low:high] for low, high in zip(ends, ends[1:], strict=False)]
