"""A graph of equal layers with most of the layers left out, and the way back.

    T       one layer, reduced with the nodes held that have edges out of it
    rest    what is in no layer, reduced in the same way
    short   the rest and a chain of NUM_KEPT copies of T in place of all n

Reducing T leaves the edges between layers alone, so that it is exact for every layer of
the full graph at once: the full graph is the same chain with more copies of T. A plan
of the short graph becomes one of the full graph by repeating the choices of a layer
(`expand`).

So do messages. With R copies of layer j inserted after it, every message as at layer j,
the costs at nodes and edges are those at layer j, but for the edges between the copies:
there the message at the end before is that of the edge from j to j + 1, and the one at
the end after is that of the edge from j - 1 to j. Whatever the messages are, the sum of
least costs is below every plan of the full graph (`bound`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from . import min_plus
from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph, Edge
from .messages import Passing
from .reduce import Reduced, reduce
from .repeats import Repeats
from .sweep_order import sweep_order

NUM_KEPT = 5


@dataclass(frozen=True, eq=False)
class Layers:
    """The short graph, and where its nodes and edges belong.

    Nodes of the rest come first, then the copies of T: node p of copy k is
    `base[k] + p`. Edges `inside[k]` are in copy k, `between[k]` lead from it to the
    next, `to_shared[k]` to the nodes of the rest that every layer reads (`shared`);
    each list is in the same order for every k.
    """

    graph: ChoiceGraph
    repeats: Repeats
    rest: Reduced
    layer: Reduced
    base: tuple[int, ...]
    inside: tuple[range, ...]
    between: tuple[range, ...]
    to_shared: tuple[range, ...]
    shared: tuple[int, ...]

    @property
    def num_inserted(self) -> int:
        """How many layers the full graph has more."""
        return len(self.repeats.layers) - len(self.base)

    @property
    def slack(self) -> float:
        """Rounding of the reductions, in all layers of the full graph."""
        return self.rest.slack + len(self.repeats.layers) * self.layer.slack

    def sweep_order(self) -> list[int]:
        """Nodes that every layer reads first, then along the layers."""
        left_out = {edge for edges in self.to_shared for edge in edges}
        edges = [e for i, e in enumerate(self.graph.edges) if i not in left_out]
        shared = set(self.shared)
        order = sweep_order(ChoiceGraph(self.graph.nodes, tuple(edges)))
        return [*self.shared, *(node for node in order if node not in shared)]

    def expand(self, choices: Sequence[int], source: int) -> np.ndarray:
        """Choices of the full graph; layers left out choose as copy `source` does."""
        layers, size = self.repeats.layers, len(self.layer.graph.nodes)
        full = np.zeros(layers.size + self.repeats.rest.size, np.intp)
        full[self.repeats.rest] = self.rest.expand(choices[: self.base[0]])
        chosen = [self.layer.expand(choices[base : base + size]) for base in self.base]
        number = len(self.base)
        times = [1 + (copy == source) * self.num_inserted for copy in range(number)]
        full[layers] = np.repeat(np.array(chosen, np.intp), times, axis=0)
        return full

    def bound(self, passing: Passing) -> float:
        """A lower bound on every plan of the full graph, from messages on the short."""
        gains = [self._gain(passing, copy) for copy in range(1, len(self.base) - 1)]
        return passing.swept + max(gains) - self.slack

    def _gain(self, passing: Passing, copy: int) -> float:
        """What the bound gains by inserting copies of `copy` after it.

        As in a sweep, the costs beyond the least at a node pay for its edges to earlier
        nodes, in equal parts.
        """
        nodes = range(self.base[copy], self.base[copy] + len(self.layer.graph.nodes))
        beyond = {v: passing.reparametrised(v) for v in nodes}
        least = {v: float(values.min()) for v, values in beyond.items()}
        for v in nodes:
            beyond[v] = (beyond[v] - least[v]) * passing.weights[v]
        gain = self.layer.graph.constant + sum(least.values())
        num_paid = dict.fromkeys(nodes, 0)
        edges, rank, halves = self.graph.edges, passing.rank, passing.halves
        for here, there, payer in (
            *((i, i, i) for i in self.inside[copy]),
            *((i, i, i) for i in self.to_shared[copy]),
            *zip(
                self.between[copy],
                self.between[copy - 1],
                self.between[copy - 1],
                strict=True,
            ),
        ):
            first, second = halves[here][0], halves[there][1]
            costs = first.matrix - first.incoming[:, None] - second.incoming
            if rank[edges[payer].second] > rank[edges[payer].first]:
                node = edges[there].second
                costs += second.least_by_class(beyond[node])
            else:
                node = edges[here].first
                costs += first.least_by_class(beyond[node])[:, None]
            num_paid[node] += 1
            gain += float(costs.min())
        if any(num * passing.weights[v] > 1 + 1e-9 for v, num in num_paid.items()):
            return -inf  # the order of the sweeps differs between these layers
        return gain * self.num_inserted + self._gain_of_shared(passing, copy)

    def _gain_of_shared(self, passing: Passing, copy: int) -> float:
        """Nodes that every layer reads get the messages of the copies too."""
        before = {v: passing.reparametrised(v) for v in self.shared}
        after = {v: values.copy() for v, values in before.items()}
        for index in self.to_shared[copy]:
            edge, (first, second) = self.graph.edges[index], passing.halves[index]
            at_first = edge.first in after
            node, half = (edge.first, first) if at_first else (edge.second, second)
            after[node] += self.num_inserted * half.incoming[half.classes]
        return sum(float(after[v].min() - before[v].min()) for v in self.shared)


def keep_few_layers(graph: ChoiceGraph, repeats: Repeats, pool: ArrayPool) -> Layers:
    """The short graph of a graph with equal layers."""
    return _Builder(graph, repeats, pool).build()


class _Builder:
    """Every edge of the graph is looked at once, as an index.

    `at` and `place` [nodes] are the layer (-1 in the rest) and the place in it.
    """

    def __init__(self, graph: ChoiceGraph, repeats: Repeats, pool: ArrayPool) -> None:
        self.graph, self.repeats, self.pool = graph, repeats, pool
        layers = repeats.layers
        self.at = np.full(len(graph.nodes), -1)
        self.place = np.zeros(len(graph.nodes), np.intp)
        self.at[layers] = np.arange(len(layers))[:, None]
        self.place[layers] = np.arange(layers.shape[1])
        self.place[repeats.rest] = np.arange(repeats.rest.size)
        self.first, self.second = graph.types.first, graph.types.second
        self.edges: list[Edge] = []

    def build(self) -> Layers:
        graph, layers, rest = self.graph, self.repeats.layers, self.repeats.rest
        first, second = self.at[self.first], self.at[self.second]
        middle = len(layers) // 2
        is_out = (first >= 0) & (second >= 0)
        inside = np.flatnonzero((first == middle) & (second == middle))
        is_next = (np.minimum(first, second) == middle) & (first != second) & is_out
        between = np.flatnonzero(is_next)
        is_end = (np.minimum(first, second) < 0) & (np.maximum(first, second) >= 0)
        to_rest = {
            layer: np.flatnonzero(is_end & (np.maximum(first, second) == layer))
            for layer in (0, middle, len(layers) - 1)
        }
        held = self._held([between, *to_rest.values()], in_layer=True)
        layer = self._reduced(layers[middle], inside, held)
        in_rest = np.flatnonzero((first < 0) & (second < 0))
        rest_held = self._held(list(to_rest.values()), in_layer=False)
        others = self._reduced(rest, in_rest, rest_held)
        self.rest_index = {v: i for i, v in enumerate(others.kept)}
        self.layer_index = {v: i for i, v in enumerate(layer.kept)}
        num_rest, size = len(others.graph.nodes), len(layer.graph.nodes)
        base = tuple(num_rest + k * size for k in range(NUM_KEPT))
        self.edges += others.graph.edges
        ranges_inside = tuple(self._add_inside(layer.graph, start) for start in base)
        ranges_between = tuple(
            self._add(between, start, start + size) for start in base[:-1]
        )
        shared = {
            self.rest_index[int(self.place[v])]
            for e in to_rest[middle]
            for v in (self.first[e], self.second[e])
            if self.at[v] < 0
        }
        ranges_shared = []
        for k, start in enumerate(base):
            which = {0: 0, NUM_KEPT - 1: len(layers) - 1}.get(k, middle)
            ends = np.array([self._rest_end(e) in shared for e in to_rest[which]], bool)
            self._add(to_rest[which][~ends], start, start)
            ranges_shared.append(self._add(to_rest[which][ends], start, start))
        nodes = [*others.graph.nodes]
        for _ in base:
            nodes += layer.graph.nodes
        constant = (
            graph.constant + others.graph.constant + NUM_KEPT * layer.graph.constant
        )
        short = ChoiceGraph(tuple(nodes), tuple(self.edges), constant=constant)
        return Layers(
            *(short, self.repeats, others, layer, base, ranges_inside),
            *(ranges_between, tuple(ranges_shared), tuple(sorted(shared))),
        )

    def _rest_end(self, edge: int) -> int:
        first, second = self.first[edge], self.second[edge]
        return self.rest_index[int(self.place[first if self.at[first] < 0 else second])]

    def _held(self, edges: Sequence[np.ndarray], in_layer: bool) -> set[int]:
        """Places of nodes in (or out of) layers at the ends of edges."""
        chosen = np.concatenate(edges)
        ends = np.concatenate([self.first[chosen], self.second[chosen]])
        return set(self.place[ends[(self.at[ends] >= 0) == in_layer]].tolist())

    def _reduced(
        self, members: np.ndarray, edges: np.ndarray, held: set[int]
    ) -> Reduced:
        nodes = tuple(self.graph.nodes[v] for v in members)
        inner = []
        for index in edges:
            edge = self.graph.edges[index]
            ends = self.place[edge.first], self.place[edge.second]
            inner.append(replace(edge, first=int(ends[0]), second=int(ends[1])))
        return reduce(ChoiceGraph(nodes, tuple(inner)), self.pool, held=held)

    def _add_inside(self, layer: ChoiceGraph, start: int) -> range:
        begin = len(self.edges)
        self.edges += [
            replace(edge, first=edge.first + start, second=edge.second + start)
            for edge in layer.edges
        ]
        return range(begin, len(self.edges))

    def _add(self, edges: np.ndarray, start: int, start_next: int) -> range:
        """Edges of the layer at `start` to the next one or the rest, layer first."""
        begin = len(self.edges)
        merged: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for index in edges.tolist():
            edge = self.graph.edges[index]
            ends = (edge.first, edge.second)
            adopt, call = self.pool.adopt, self.pool.call
            parts = call(
                min_plus.used_only,
                adopt(edge.first_class, np.intp),
                adopt(edge.second_class, np.intp),
                adopt(edge.costs, np.float64),
            )
            at, other = self.at[ends[0]], self.at[ends[1]]
            if at < 0 or 0 <= other < at:  # the lower layer comes first
                ends = ends[::-1]
                parts = (parts[1], parts[0], call(_transposed, parts[2]))
            first = start + self.layer_index[int(self.place[ends[0]])]
            second = int(self.place[ends[1]])
            if self.at[ends[1]] < 0:
                second = self.rest_index[second]
            else:
                second = start_next + self.layer_index[second]
            known = merged.get((first, second))
            if known is not None:
                parts = call(min_plus.merge_parallel, *known, *parts)
            merged[first, second] = parts
        self.edges += [Edge(*ends, *parts) for ends, parts in merged.items()]
        return range(begin, len(self.edges))


def _transposed(matrix: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(matrix.T)
