"""Finding equal layers in a choice graph.

    colours    nodes that look alike as far as a few edges away share a colour; the
               nearer, the fewer layers differ because they are near an end (RADII)
               (`_Coloured`; Weisfeiler and Leman 1968, a few rounds, sums of hashes)
    orbits     from a colour whose nodes follow at equal distances, one node a layer,
               layers grow along edges: neighbours by equal edges of one node a layer
               are again one node a layer (`_Growth`)
    labels     an orbit may be shifted by a layer, so that few edges leave a layer
               (`_Growth._straighten`)
    check      every edge between layers is there for every layer, and edges to the
               rest for all layers or for the ends only (`_is_regular`)

Colours and orbits are guesses; what is returned was checked edge by edge. What is at
the ends, or differs, stays outside as the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .array_pool import ArrayPool
from .choice_graph import ChoiceGraph, Types

RADII = (1, 3)
FEWEST_LAYERS = 6
MOST_SEEDS = 8
MOST_SHIFTS = 8
WORTH = 0.5  # of all nodes, in layers


@dataclass(frozen=True, eq=False)
class Repeats:
    """`layers` [n, p] are the nodes of n equal layers, `rest` all other nodes.

    Node p of a layer has the same costs in each. Edges of a layer are inside it, to the
    next or the one before, to the rest in every layer, or at an end to the rest.
    """

    layers: np.ndarray
    rest: np.ndarray

    def __str__(self) -> str:
        number, size = self.layers.shape
        return f"Repeats: {number} layers of {size} nodes, {self.rest.size} others"


def find_repeats(graph: ChoiceGraph, pool: ArrayPool) -> Repeats | None:
    """The largest run of equal layers, or None where none is worth folding."""
    typed = _by_content(graph, pool)
    for radius in RADII:
        found = _largest(_Coloured(typed, radius))
        if found is not None:
            return found
    return None


def _largest(coloured: "_Coloured") -> Repeats | None:
    typed = coloured.typed
    best: Repeats | None = None
    for seed in coloured.seeds():
        if best is not None and seed.size * typed.node.size < best.layers.size:
            continue
        found = _Growth(coloured, seed).run()
        if found is not None and (best is None or found.layers.size > best.layers.size):
            best = found
            if best.layers.size > 0.8 * typed.node.size:
                break
    if best is None or best.layers.size < WORTH * typed.node.size:
        return None
    return best


def _by_content(graph: ChoiceGraph, pool: ArrayPool) -> Types:
    """The graph's types, those of equal arrays made one."""
    types, adopt = graph.types, pool.adopt
    nodes, edges = {}, {}
    node_type = [
        nodes.setdefault(id(adopt(graph.nodes[index].costs, np.float64)), len(nodes))
        for index in types.node_of
    ]
    edge_type = []
    for edge in (graph.edges[index] for index in types.edge_of):
        key = (
            id(adopt(edge.first_class, np.intp)),
            id(adopt(edge.second_class, np.intp)),
            id(adopt(edge.costs, np.float64)),
        )
        edge_type.append(edges.setdefault(key, len(edges)))
    return replace(
        types,
        node=np.array(node_type, np.intp)[types.node],
        edge=np.array(edge_type, np.intp)[types.edge],
    )


class _Coloured:
    """Colours, and every node's edges in an order that equal layers share.

    Half-edge h leaves node `source[h]` for `target[h]`; those of node v are `start[v]`
    to `start[v + 1]`, sorted by type, direction, colour there and place in the graph.
    """

    def __init__(self, typed: Types, radius: int) -> None:
        self.typed = typed
        count = typed.node.size
        rng = np.random.default_rng(0)
        source = np.concatenate([typed.first, typed.second])
        target = np.concatenate([typed.second, typed.first])
        sided = np.concatenate([2 * typed.edge, 2 * typed.edge + 1])
        draw = rng.integers(0, 2**63, size=int(sided.max(initial=0)) + 2, dtype="u8")
        hashes = rng.integers(0, 2**63, size=count + 1, dtype="u8")[typed.node]
        before = hashes
        for _ in range(radius):
            before = hashes
            around = np.zeros(count, np.uint64)
            np.add.at(around, source, _mix(draw[sided] + _mix(hashes[target])))
            hashes = _mix(hashes + _mix(around))
        self.colour = np.unique(hashes, return_inverse=True)[1].reshape(-1)
        there = np.unique(before, return_inverse=True)[1].reshape(-1)[target]
        order = np.lexsort((np.arange(source.size), there, sided, source))
        self.source, self.target = source[order], target[order]
        self.sided, self.there = sided[order], there[order]
        self.start = np.searchsorted(self.source, np.arange(count + 1))

    def seeds(self) -> Iterator[np.ndarray]:
        """Nodes of a colour at equal distances in the graph, longest rows first.

        One of each number of layers: others would grow into the same layers.
        """
        order = np.argsort(self.colour, kind="stable")
        colours = self.colour[order]
        ends = np.flatnonzero(np.diff(colours, append=-1)) + 1
        by_size: dict[int, list[np.ndarray]] = {}
        for members in np.split(order, ends[:-1]):
            if members.size >= FEWEST_LAYERS - 2:
                row = _longest_row(members)
                by_size.setdefault(row.size, []).append(row)
        sizes = [size for size in by_size if size >= FEWEST_LAYERS]
        sizes.sort(key=lambda size: -size * len(by_size[size]))
        for size in sizes[:MOST_SEEDS]:
            yield by_size[size][0]


class _Growth:
    """Layers grown from one orbit."""

    def __init__(self, coloured: _Coloured, seed: np.ndarray) -> None:
        self.coloured, self.number = coloured, seed.size
        count = coloured.colour.size
        self.orbit = np.full(count, -1)
        self.label = np.zeros(count, np.intp)
        self.orbits: list[np.ndarray] = []  # node by label, -1 where there is none
        self._add(seed)

    def run(self) -> Repeats | None:
        index = 0
        while index < len(self.orbits):
            self._grow(self.orbits[index])
            index += 1
        self._straighten()
        return self._checked()

    def _add(self, nodes: np.ndarray) -> None:
        """A new orbit; nodes of another colour than most are at an end, and left."""
        known = nodes[nodes >= 0]
        colours, counts = np.unique(self.coloured.colour[known], return_counts=True)
        common = colours[counts.argmax()]
        nodes = np.where(self.coloured.colour[nodes] == common, nodes, -1)
        known = np.flatnonzero(nodes >= 0)
        if known.size < max(FEWEST_LAYERS, self.number // 2):
            return
        self.orbit[nodes[known]] = len(self.orbits)
        self.label[nodes[known]] = known
        self.orbits.append(nodes)

    def _grow(self, nodes: np.ndarray) -> None:
        """The neighbours of an orbit by equal edges are orbits, unless one and all."""
        coloured = self.coloured
        known = np.flatnonzero(nodes >= 0)
        start = coloured.start[nodes[known]]
        size = int(coloured.start[nodes[known[0]] + 1] - start[0])
        around = coloured.target[start[:, None] + np.arange(size)]
        is_new = self.orbit[around] < 0
        for slot in np.flatnonzero(is_new.any(axis=0)):
            others = around[:, slot]
            free = self.orbit[others] < 0
            if np.unique(others[free]).size < free.sum() or free.sum() < known.size / 2:
                continue
            found = np.full(self.number, -1)
            found[known[free]] = others[free]
            self._add(found)

    def _straighten(self) -> None:
        """Shifts orbits until no shift of one alone shortens its edges."""
        typed = self.coloured.typed
        orbit, other = self.orbit[typed.first], self.orbit[typed.second]
        inside = (orbit >= 0) & (other >= 0) & (orbit != other)
        apart = self.label[typed.second] - self.label[typed.first]
        count, least = len(self.orbits), int(apart.min(initial=0))
        width = int(apart.max(initial=0)) - least + 1
        pair = orbit[inside] * count + other[inside]
        keys, counts = np.unique(
            pair * width + (apart[inside] - least), return_counts=True
        )
        is_common = counts >= self.number // 2
        around: list[list[tuple[int, int]]] = [[] for _ in self.orbits]
        pair, distance = np.divmod(keys[is_common], width)
        ends = *np.divmod(pair, count), distance + least
        for first, second, distance in zip(*map(np.ndarray.tolist, ends), strict=True):
            around[first].append((second, distance))
            around[second].append((first, -distance))
        shift = [0] * len(self.orbits)
        for _ in range(MOST_SHIFTS):
            moved = False
            for index, edges in enumerate(around):
                wanted = sorted(d + shift[v] for v, d in edges)
                if wanted:
                    low, high = wanted[(len(wanted) - 1) // 2], wanted[len(wanted) // 2]
                    best = min(max(shift[index], low), high)
                    moved |= best != shift[index]
                    shift[index] = best
            if not moved:
                break
        self.shift = np.array(shift, np.intp)

    def _checked(self) -> Repeats | None:
        least = int(self.shift.min())
        length = self.number + int(self.shift.max()) - least
        table = np.full((length, len(self.orbits)), -1)
        for index, nodes in enumerate(self.orbits):
            first = int(self.shift[index]) - least
            table[first : first + self.number, index] = nodes
        is_whole = np.all(table >= 0, axis=1, keepdims=True)[:, 0]
        first, last = _longest_run(is_whole)
        while last - first >= FEWEST_LAYERS:
            layers = table[first:last]
            worst = _irregular_layers(self.coloured.typed, layers)
            if worst is None:
                return None
            if not worst.size:
                is_rest = np.ones(self.orbit.size, bool)
                is_rest[layers.reshape(-1)] = False
                return Repeats(layers, np.flatnonzero(is_rest))
            is_good = np.ones(last - first, bool)
            is_good[worst] = False
            begin, end = _longest_run(is_good)
            first, last = first + begin, first + end
        return None


def _irregular_layers(typed: Types, layers: np.ndarray) -> np.ndarray | None:
    """Layers with an edge that others have not, or without one that others have.

    None where an edge leads further than to the next layer.
    """
    number, size = layers.shape
    count = typed.node.size
    layer = np.full(count, -1)
    place = np.arange(count) + size  # of nodes in no layer
    layer[layers] = np.arange(number)[:, None]
    place[layers] = np.arange(size)
    first, second = layer[typed.first], layer[typed.second]
    inside = (first >= 0) & (second >= 0)
    apart = np.where(inside, second - first, 0)
    if np.abs(apart).max(initial=0) > 1:
        return None
    kind = np.where(inside, 0, np.where(first >= 0, 1, 2))
    at = np.where(first >= 0, first, second)
    at = np.where(inside, np.minimum(first, second), at)
    chosen = np.flatnonzero(at >= 0)
    at, kind, apart = at[chosen], kind[chosen], apart[chosen]
    hashes = np.zeros(len(chosen), np.uint64)
    ends = place[typed.first[chosen]], place[typed.second[chosen]]
    for part in (typed.edge[chosen], 3 * kind + apart + 1, *ends):
        hashes = _mix(hashes + part.astype(np.uint64))
    _, key = np.unique(hashes, return_inverse=True)
    key = key.reshape(-1)
    num_keys = int(key.max(initial=-1)) + 1
    table = np.zeros((num_keys, number), np.intp)
    np.add.at(table, (key, at), 1)
    is_inside = np.zeros(num_keys, bool)
    is_inside[key] = kind == 0
    is_apart = np.zeros(num_keys, bool)
    is_apart[key] = apart != 0
    usual = np.median(table[:, 1:-1], axis=1)
    differs = table != usual[:, None]
    differs[is_apart, -1] = False  # counted at the earlier of two layers
    differs[~is_inside, 0] = differs[~is_inside, -1] = False
    return np.flatnonzero(differs.any(axis=0))


def _longest_run(is_in: np.ndarray) -> tuple[int, int]:
    """The longest run of True: [begin, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_in.astype(np.int8), [0]])))
    if not edges.size:
        return 0, 0
    begins, ends = edges[::2], edges[1::2]
    longest = int((ends - begins).argmax())
    return int(begins[longest]), int(ends[longest])


def _longest_row(members: np.ndarray) -> np.ndarray:
    """The longest stretch of ascending numbers at equal distances."""
    steps = np.diff(members)
    changes = np.flatnonzero(np.diff(steps)) + 1
    begins = np.concatenate([[0], changes])
    ends = np.concatenate([changes, [steps.size]])
    longest = int((ends - begins).argmax())
    return members[begins[longest] : ends[longest] + 1]


def _mix(values: np.ndarray) -> np.ndarray:
    """Scrambled 64-bit numbers (splitmix64)."""
    values = values ^ (values >> np.uint64(31))
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = values ^ (values >> np.uint64(29))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    return values ^ (values >> np.uint64(32))
