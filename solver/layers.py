"""A graph of n equal layers in two small ones, coupled by tied messages.

    ring    NUM_COPIES copies of a layer in a circle, each reduced with the nodes held
            that have edges to the next: what a layer is amid others
    ends    the rest, the first layer and the last, the layers between left out

Messages on the ring, averaged over its copies (`TiedMessages`), go along every edge
between and inside the n - 2 layers left out. The full cost is then the sum of

    ends    with the messages from the second layer and the last but one at its nodes,
    n - 2   layers with the messages from both sides, each at least `of_layer`,
    n - 1   borders between layers, less both messages, each at least `of_border`,

so that the sum of the least costs is below every plan, whatever the messages are. A
node of the rest that every layer reads gets the least that its choices cost a layer
beyond the best; the layer gets that best.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from . import min_plus
from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph, Edge, Node
from .messages import Passing
from .reduce import Reduced, reduce
from .repeats import Repeats

NUM_COPIES = 2


@dataclass(frozen=True, eq=False)
class Layers:
    """The two graphs and the way back to the full one.

    Copy k of the ring has the nodes of `layer.graph` from `k * size` on; edges are the
    copy's own, then `borders` to the next. Ends are the nodes `end_nodes` of the full
    graph, in order. `borders` are between places of a layer and the next, `shared`
    between places of a layer and ends, with the costs that the layer's side pays.
    """

    repeats: Repeats
    layer: Reduced
    ring: ChoiceGraph
    ends: ChoiceGraph
    end_nodes: np.ndarray
    borders: tuple[Edge, ...]
    shared: tuple[Edge, ...]

    @property
    def num_between(self) -> int:
        """How many layers the ends leave out."""
        return len(self.repeats.layers) - 2

    def pattern(self, choices: Sequence[int]) -> list[np.ndarray]:
        """[place] choices of the layers left out, in turn, from those of the ring.

        One layer's over and over, or where that costs more those of all copies.
        """
        size = len(self.layer.graph.nodes)
        copies = [tuple(choices[k * size : (k + 1) * size]) for k in range(NUM_COPIES)]
        costs = [self.ring.cost(copy * NUM_COPIES) for copy in copies]
        best = int(np.argmin(costs))
        is_equal = costs[best] <= self.ring.cost(choices) * (1 + 1e-9)
        chosen = [copies[best]] if is_equal else copies
        return [np.array(self.layer.expand(copy), np.intp) for copy in chosen]

    def ends_beside(self, pattern: Sequence[np.ndarray]) -> ChoiceGraph:
        """The ends at what they cost beside layers of these choices."""
        first, last = pattern[0], pattern[(self.num_between - 1) % len(pattern)]
        extra: list[tuple[int, np.ndarray]] = []
        for edge in self.borders:
            column = edge.costs[:, edge.second_class[first[edge.second]]]
            extra.append((self._at_start(edge.first), column[edge.first_class]))
            row = edge.costs[edge.first_class[last[edge.first]]]
            extra.append((self._at_end(edge.second), row[edge.second_class]))
        for edge in self.shared:
            for number, chosen in enumerate(pattern):
                times = len(range(number, self.num_between, len(pattern)))
                row = edge.costs[edge.first_class[chosen[edge.first]]]
                extra.append((edge.second, times * row[edge.second_class]))
        return _with_costs(self.ends, extra, 0.0)

    def ends_with(self, messages: "TiedMessages") -> ChoiceGraph:
        """The ends with the messages into them; its constant is of the full graph."""
        extra: list[tuple[int, np.ndarray]] = []
        for edge, (into_first, into_second) in zip(
            self.borders, messages.at_borders, strict=True
        ):
            extra.append((self._at_start(edge.first), into_first[edge.first_class]))
            extra.append((self._at_end(edge.second), into_second[edge.second_class]))
        for edge in self.shared:
            paid = edge.costs.min(axis=1)
            rest = edge.costs - np.where(paid < inf, paid, 0.0)[:, None]
            beyond = rest.min(axis=0)
            extra.append((edge.second, self.num_between * beyond[edge.second_class]))
        number = self.num_between
        constant = number * messages.of_layer + (number + 1) * messages.of_border
        slack = number * self.layer.slack
        return _with_costs(self.ends, extra, constant - slack)

    def expand(
        self, choices: Sequence[int], pattern: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Choices of the full graph from those of the ends and of the layers."""
        layers = self.repeats.layers
        full = np.zeros(layers.size + self.repeats.rest.size, np.intp)
        full[self.end_nodes] = np.asarray(choices, np.intp)
        turns = np.arange(self.num_between) % len(pattern)
        full[layers[1:-1]] = np.array(pattern)[turns]
        return full

    def _at_start(self, place: int) -> int:
        return self.repeats.rest.size + place

    def _at_end(self, place: int) -> int:
        return self.repeats.rest.size + self.repeats.layers.shape[1] + place

    def __str__(self) -> str:
        return f"{self.repeats}; ring: {self.ring}; ends: {self.ends}"


@dataclass(frozen=True, eq=False)
class TiedMessages:
    """Messages that are the same in every layer.

    `at_borders` are, for each border, those into the layer before and into the one
    after; `of_layer` and `of_border` are the least costs that remain.
    """

    at_borders: tuple[tuple[np.ndarray, np.ndarray], ...]
    of_layer: float
    of_border: float

    @classmethod
    def of(cls, layers: Layers, passing: Passing) -> "TiedMessages":
        """Those on the ring, averaged over its copies.

        The bound is concave in the messages: the average is as good as they are.
        """
        graph, size = layers.layer.graph, len(layers.layer.graph.nodes)
        num_inside, num_edges = len(graph.edges), len(layers.ring.edges) // NUM_COPIES
        plain = passing.plain()
        starts = range(0, len(layers.ring.edges), num_edges)
        averaged = [
            (
                np.mean([plain[k + e][0] for k in starts], axis=0),
                np.mean([plain[k + e][1] for k in starts], axis=0),
            )
            for e in range(num_edges)
        ]
        values = [np.minimum(node.costs, passing.ceiling) for node in graph.nodes]
        least = []
        for edge, (into, into2) in zip(layers.ring.edges, averaged, strict=False):
            values[edge.first % size] += into[edge.first_class]
            values[edge.second % size] += into2[edge.second_class]
            matrix = np.minimum(edge.costs, passing.ceiling) - into[:, None] - into2
            least.append(float(matrix.min()))
        of_nodes = sum(float(costs.min()) for costs in values)
        of_layer = graph.constant + of_nodes + sum(least[:num_inside])
        return cls(tuple(averaged[num_inside:]), of_layer, sum(least[num_inside:]))


def fold(graph: ChoiceGraph, repeats: Repeats, pool: ArrayPool) -> Layers:
    """The ring and the ends of a graph with equal layers (at least 3)."""
    return _Folding(graph, repeats, pool).run()


class _Folding:
    """`at` and `place` [nodes] are a node's layer, -1 for the rest, and place in it."""

    def __init__(self, graph: ChoiceGraph, repeats: Repeats, pool: ArrayPool) -> None:
        self.graph, self.repeats, self.pool = graph, repeats, pool
        layers, rest = repeats.layers, repeats.rest
        self.at = np.full(len(graph.nodes), -1)
        self.place = np.zeros(len(graph.nodes), np.intp)
        self.at[layers] = np.arange(len(layers))[:, None]
        self.place[layers] = np.arange(layers.shape[1])
        self.place[rest] = np.arange(rest.size)

    def run(self) -> Layers:
        layers, types = self.repeats.layers, self.graph.types
        first, second = self.at[types.first], self.at[types.second]
        low, high, middle = np.minimum(first, second), np.maximum(first, second), 1
        inside = np.flatnonzero((low == middle) & (high == middle))
        border = np.flatnonzero((low == middle) & (high == middle + 1))
        shared = np.flatnonzero((low < 0) & (high == middle))
        borders = self._edges(border, np.arange(layers.shape[1]))
        shares = self._edges(shared, np.arange(self.repeats.rest.size))
        nodes = [self.graph.nodes[v] for v in layers[middle].tolist()]
        for edge in shares:
            node, paid = nodes[edge.first], edge.costs.min(axis=1)[edge.first_class]
            nodes[edge.first] = Node(node.name, node.costs + paid, node.bytes)
        inner = [
            replace(
                self.graph.edges[e],
                first=int(self.place[types.first[e]]),
                second=int(self.place[types.second[e]]),
            )
            for e in inside.tolist()
        ]
        held = {place for edge in borders for place in (edge.first, edge.second)}
        template = ChoiceGraph(tuple(nodes), tuple(inner))
        layer = reduce(template, self.pool, held=held)
        end_nodes = np.concatenate([self.repeats.rest, layers[0], layers[-1]])
        return Layers(
            *(self.repeats, layer, _ring(layer, borders), self._ends(end_nodes)),
            *(end_nodes, tuple(borders), tuple(shares)),
        )

    def _edges(self, chosen: np.ndarray, there: np.ndarray) -> list[Edge]:
        """Edges from places of a layer to the next or the rest, parallel ones merged.

        `there` numbers the places at the other end.
        """
        adopt, call = self.pool.adopt, self.pool.call
        merged: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for edge in (self.graph.edges[index] for index in chosen):
            ends = (edge.first, edge.second)
            parts = call(
                min_plus.used_only,
                adopt(edge.first_class, np.intp),
                adopt(edge.second_class, np.intp),
                adopt(edge.costs, np.float64),
            )
            at, other = self.at[ends[0]], self.at[ends[1]]
            if at < 0 or 0 <= other < at:
                ends = ends[::-1]
                parts = (parts[1], parts[0], call(_transposed, parts[2]))
            key = int(self.place[ends[0]]), int(there[self.place[ends[1]]])
            if key in merged:
                parts = call(min_plus.merge_parallel, *merged[key], *parts)
            merged[key] = parts
        return [Edge(*ends, *parts) for ends, parts in merged.items()]

    def _ends(self, members: np.ndarray) -> ChoiceGraph:
        index = np.full(len(self.graph.nodes), -1)
        index[members] = np.arange(members.size)
        types = self.graph.types
        first, second = index[types.first], index[types.second]
        edges = tuple(
            replace(self.graph.edges[e], first=int(first[e]), second=int(second[e]))
            for e in np.flatnonzero((first >= 0) & (second >= 0)).tolist()
        )
        nodes = tuple(self.graph.nodes[v] for v in members.tolist())
        return ChoiceGraph(nodes, edges, constant=self.graph.constant)


def _ring(layer: Reduced, borders: Sequence[Edge]) -> ChoiceGraph:
    """Copies of a layer in a circle, with edges across the borders."""
    graph = layer.graph
    size = len(graph.nodes)
    index = {place: number for number, place in enumerate(layer.kept)}
    edges = []
    for copy in range(NUM_COPIES):
        start, after = copy * size, (copy + 1) % NUM_COPIES * size
        edges += [
            replace(edge, first=start + edge.first, second=start + edge.second)
            for edge in graph.edges
        ]
        edges += [
            replace(
                edge,
                first=start + index[edge.first],
                second=after + index[edge.second],
            )
            for edge in borders
        ]
    constant = NUM_COPIES * graph.constant
    nodes = tuple(graph.nodes) * NUM_COPIES
    return ChoiceGraph(nodes, tuple(edges), constant=constant)


def _with_costs(
    graph: ChoiceGraph, extra: Sequence[tuple[int, np.ndarray]], constant: float
) -> ChoiceGraph:
    """The graph with more costs [k] at nodes; what may be below 0 in its constant."""
    nodes, constant = list(graph.nodes), constant + graph.constant
    for index, costs in extra:
        node, least = nodes[index], float(costs.min())
        least = least if least < inf else 0.0
        constant += least
        nodes[index] = Node(node.name, node.costs + (costs - least), node.bytes)
    return replace(graph, nodes=tuple(nodes), constant=constant)


def _transposed(matrix: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrix.T)
