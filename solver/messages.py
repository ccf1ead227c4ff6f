"""A lower bound and plans by sequential tree-reweighted message passing (TRW-S).

After Kolmogorov, "Convergent tree-reweighted message passing for energy minimization"
(PAMI 2006). A message M_e per direction of an edge e = (i, j), on the classes of the
node it enters, reparametrises the cost without changing it:

    node i:  f_i(x) = costs_i(x) + sum_e M_e(class of x)       (messages into i)
    edge e:  costs_e(a, b) - M_e(b) - M_e'(a)

Nodes are swept in order (`sweep_order`) and in reverse. At node i, with w_i =
1 / max(edges to earlier nodes, edges to later nodes), the message ahead along e is
M_e(b) = min_a (min_{x in a} w_i f_i(x) - M_e'(a) + costs_e(a, b)), and every minimum
subtracted on the way back adds to the bound (`_sweep`). Plans are rounded before a
sweep: a node takes the best choice given its earlier neighbours' choices and the
messages of its later ones (`_rounded`). The bound holds whatever finite number stands
for inf, because that only makes the problem easier.

Nodes that have no edges between them are swept at once, level by level (`_Level`):
their arrays lie one behind the other in flat ones, and one call of numpy does for all.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby
from math import inf

import networkx as nx
import numpy as np

from .choice_graph import ChoiceGraph
from .clock import Clock
from .descent import Descent

STALL_ROUNDS = 10
STALLED = 0.1  # of the distance left, in STALL_ROUNDS
FEW_ENTRIES = 2048  # of edges along which messages are sent together
# Seconds of a usual core, there and back: of a level, and of an entry of an edge.
_LEVEL, _ENTRY = 1e-4, 5e-9
least_of, sum_of = np.minimum.reduceat, np.add.reduceat


@dataclass(eq=False)
class _Half:
    """An edge seen from one end: `matrix` [classes here, classes there].

    `order` and `starts` sort the choices here by class; `message` is where that into
    `node` lies in the state.
    """

    node: int
    classes: np.ndarray
    matrix: np.ndarray
    order: np.ndarray
    starts: np.ndarray
    message: np.ndarray
    mirror: "_Half" = field(init=False, repr=False)


class _Ahead:
    """What the nodes of a level send one way.

    `by_class` and `starts` sort choices of the level by edge and class. `incoming` and
    `outgoing` are where the messages of both directions lie in the state. Of edges of
    few entries, which come first, `few` are the costs, one behind the other, each with
    its class here, and where those of a class there begin; the others are `large`.
    """

    def __init__(self, halves: Sequence[_Half], begin: Mapping[int, int]) -> None:
        self.halves = sorted(halves, key=lambda half: half.matrix.size)
        every, few, self.large = [], [], []
        choice = row = column = entry = 0
        for half in self.halves:
            matrix, size = half.mirror.matrix, half.matrix.size
            there, here = matrix.shape
            places = half.order + begin[half.node], half.starts + choice
            every.append((*places, half.message, half.mirror.message))
            if size <= FEW_ENTRIES:
                rows = np.arange(size) % here + row
                few.append((matrix.reshape(-1), rows, np.arange(0, size, here) + entry))
            else:
                own = slice(row, row + here), slice(column, column + there)
                self.large.append((matrix, *own))
            choice, entry = choice + half.order.size, entry + size
            row, column = row + here, column + there
        self.by_class, self.starts, self.incoming, self.outgoing = _joined(every)
        self.few = _joined(few)

    def least(self, values: np.ndarray) -> np.ndarray:
        """By edge and class here, the least of a level's values."""
        return least_of(values.take(self.by_class), self.starts)

    def send(self, values: np.ndarray, state: np.ndarray) -> None:
        """Updates the messages."""
        least = self.least(values) - state.take(self.incoming)
        sent = np.empty(self.outgoing.size)
        if self.few:
            costs, rows, columns = self.few
            least_of(costs + least.take(rows), columns, out=sent[: columns.size])
        for matrix, rows, columns in self.large:
            np.minimum.reduce(matrix + least[rows], axis=1, out=sent[columns])
        state[self.outgoing] = sent


def _joined(several: Sequence[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    return [np.concatenate(each) for each in zip(*several, strict=True)]


class _Level:
    """Nodes without edges between them; their choices lie node by node.

    `starts` are the first choices of nodes, `node_of` and `weights` [choices]. The
    value of choice k is the sum of the state at `terms` from `term_starts[k]` on.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        costs: Sequence[np.ndarray],
        earlier: Sequence[_Half],
        later: Sequence[_Half],
    ) -> None:
        self.nodes = nodes
        sizes = [own.size for own in costs]
        begin = dict(zip(nodes, accumulate(sizes, initial=0), strict=False))
        self.starts = np.array([begin[node] for node in nodes])
        self.node_of = np.repeat(np.arange(len(nodes)), sizes)
        terms, owners = [np.concatenate(costs)], [np.arange(sum(sizes))]
        for half in (*earlier, *later):
            terms.append(half.message[half.classes])
            owners.append(np.arange(half.classes.size) + begin[half.node])
        owner = np.concatenate(owners)
        self.terms = np.concatenate(terms)[np.argsort(owner, kind="stable")]
        self.term_starts = np.cumsum([0, *np.bincount(owner)[:-1]])
        sides = [Counter(half.node for half in side) for side in (earlier, later)]
        most = [max(1, *(side[node] for side in sides)) for node in nodes]
        self.weights = 1.0 / np.repeat(most, sizes)
        self.earlier = _Ahead(earlier, begin) if earlier else None
        self.later = _Ahead(later, begin) if later else None

    def values(self, state: np.ndarray) -> np.ndarray:
        """[choices] what each costs with all messages into its node."""
        return sum_of(state.take(self.terms), self.term_starts)

    def beyond(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[choices] what each costs beyond the best of its node, and [nodes] those."""
        values = self.values(state)
        least = least_of(values, self.starts)
        return values - least.take(self.node_of), least

    def by_node(self, values: np.ndarray) -> Iterable[tuple[int, np.ndarray]]:
        """Each node with its part of them."""
        return zip(self.nodes, np.split(values, self.starts[1:]), strict=True)


class Passing:
    """Messages on one graph, whose budget is not looked at.

    `cost` is that of a plan already known (inf for none), `clock` is told of the work.
    `bound` is below every plan's cost; `best` is the best plan seen, of `best_cost`
    (None and inf when none was feasible). `state` has the costs of all nodes and all
    messages.
    """

    def __init__(
        self,
        graph: ChoiceGraph,
        cost: float = inf,
        clock: Clock | None = None,
    ) -> None:
        self.graph, self.clock = graph, clock or Clock()
        self.descent = Descent(graph)
        self.ceiling = _ceiling(graph, cost)
        costs = [np.minimum(node.costs, self.ceiling) for node in graph.nodes]
        ends = list(accumulate([own.size for own in costs], initial=0))
        self.halves, end = _halves(graph, self.ceiling, ends[-1])
        self.state = np.concatenate([*costs, np.zeros(end - ends[-1])])
        self.levels = _levels(graph, self.halves, [*map(np.arange, ends, ends[1:])])
        self._marginals = [np.full(own.size, -inf) for own in costs]
        self.best: tuple[int, ...] | None = None
        self.best_cost = inf
        self.bound = self._bound_before = -inf  # the last round
        self.num_rounds = 0
        entries = sum(here.matrix.size for here, _ in self.halves)
        self._round_seconds = _LEVEL * len(self.levels) + _ENTRY * entries

    def run(
        self,
        gap: float,
        *,
        cost: float = inf,
        enough: float = inf,
        max_rounds: int = 200,
        work_limit: float = 30.0,
    ) -> bool:
        """Sweeps on until the gap is closed, the bound stalls, or a limit is reached.

        Args:
            gap: relative distance of bound to cost at which to stop.
            cost: the cost of a plan found elsewhere meanwhile.
            enough: a bound at which to stop, too, once there is a plan.
            max_rounds: most sweeps there and back.
            work_limit: most seconds of work.

        Returns:
            Whether more rounds are of little use.
        """
        until, checkpoint = self.clock.spent + work_limit, self.bound
        for num_rounds in range(1, max_rounds + 1):
            if self.num_rounds < 4 or self.num_rounds % 4 == 3:
                self._offer(self._rounded())
            self._bound_before = self.bound
            self._sweep(is_forward=True)
            self.bound = max(self.bound, self._sweep(is_forward=False))
            self.num_rounds += 1
            self.clock.spend(self._round_seconds)
            least = min(self.best_cost, cost)
            distance = least - self.bound
            is_enough = distance <= gap * abs(least) or self.bound >= enough
            if least < inf and is_enough:
                return True
            if num_rounds % STALL_ROUNDS == 0:
                gained, checkpoint = self.bound - checkpoint, self.bound
                if gained < STALLED * min(distance, abs(self.bound)):
                    return True
            if self.clock.now() > until:
                break
        return False

    def marginals(self) -> list[np.ndarray]:
        """[nodes][choices] a lower bound on the cost of the plans that make each."""
        for level in self.levels:
            beyond, _ = level.beyond(self.state)
            for node, found in level.by_node(beyond + self._bound_before):
                self._marginals[node] = np.maximum(self._marginals[node], found)
        return list(self._marginals)

    def _sweep(self, is_forward: bool) -> float:
        """Updates the messages one way; on the way back what it gains is a bound."""
        gained = self.graph.constant
        for level in self.levels if is_forward else reversed(self.levels):
            values, least = level.beyond(self.state)
            gained += float(least.sum())
            if ahead := level.later if is_forward else level.earlier:
                ahead.send(values * level.weights, self.state)
        return gained

    def _rounded(self) -> list[int]:
        """A plan, node by node as they are swept."""
        choices, state = [0] * len(self.graph.nodes), self.state.copy()
        for level in self.levels:
            for node, values in level.by_node(level.values(state)):
                choices[node] = int(values.argmin())
            for half in level.later.halves if level.later else ():
                row = half.classes[choices[half.node]]
                state[half.mirror.message] = half.matrix[row]
        return choices

    def _offer(self, choices: list[int]) -> None:
        improved = self.descent.improve(choices)
        cost = self.graph.cost(improved)
        if cost < self.best_cost:
            self.best, self.best_cost = tuple(improved), cost

    def plain(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per edge, the messages into its ends, with which the sum of minima is the
        bound.

        What a node costs beyond its least pays for its edges to earlier nodes, in equal
        parts; here it is moved there.
        """
        state = self.state.copy()
        for level in self.levels:
            if level.earlier:
                beyond, _ = level.beyond(self.state)
                paid = level.earlier.least(beyond * level.weights)
                state[level.earlier.incoming] -= paid
        return [(state[one.message], state[two.message]) for one, two in self.halves]


def sweep_order(graph: ChoiceGraph) -> list[int]:
    """Every node once, each part of the graph from one of its ends to the other.

    A sweep carries a message as far as the order is monotone along a path, as by the
    distance from an end (Cuthill and McKee 1969); in the order in which a graph was
    built, with its copies last, it takes two to five times as many sweeps.
    """
    links = nx.Graph()
    links.add_nodes_from(range(len(graph.nodes)))
    links.add_edges_from((edge.first, edge.second) for edge in graph.edges)
    order: list[int] = []
    for part in nx.connected_components(links):
        order += nx.utils.cuthill_mckee_ordering(nx.Graph(links.subgraph(part)))
    return order


def _ceiling(graph: ChoiceGraph, cost: float) -> float:
    """A finite number that no entry of a plan worth having exceeds."""
    if cost < inf:
        return max(cost - graph.constant, 0.0)
    every = chain((n.costs for n in graph.nodes), (e.costs for e in graph.edges))
    return sum(map(_largest, every)) + 1e-300


def _largest(costs: np.ndarray) -> float:
    return float(np.max(costs, where=np.isfinite(costs), initial=0.0))


def _halves(
    graph: ChoiceGraph, ceiling: float, end: int
) -> tuple[list[tuple[_Half, _Half]], int]:
    """Per edge, how it looks from its first and from its second node.

    Their messages lie in the state from `end` on; returns where they end, too.
    """
    sorted_by_id: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    matrix_by_id: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    pairs = []
    for edge in graph.edges:
        if id(edge.costs) not in matrix_by_id:
            matrix = np.minimum(edge.costs, ceiling)
            matrix_by_id[id(edge.costs)] = matrix, np.ascontiguousarray(matrix.T)
        matrix, transposed = matrix_by_id[id(edge.costs)]
        sides = (
            (edge.first, edge.first_class, matrix),
            (edge.second, edge.second_class, transposed),
        )
        halves = []
        for node, classes, costs in sides:
            if id(classes) not in sorted_by_id:
                sorted_by_id[id(classes)] = _sort_by_class(classes, len(costs))
            own = sorted_by_id[id(classes)]
            message = np.arange(end, end + len(costs))
            halves.append(_Half(node, classes, costs, *own, message))
            end += len(costs)
        here, there = halves
        here.mirror, there.mirror = there, here
        pairs.append((here, there))
    return pairs, end


def _levels(
    graph: ChoiceGraph,
    halves: Sequence[tuple[_Half, _Half]],
    costs: Sequence[np.ndarray],
) -> list[_Level]:
    """The levels in the order of sweeps, each beyond its nodes' earlier neighbours.

    `costs` say where those of each node lie in the state.
    """
    order = sweep_order(graph)
    rank = {node: place for place, node in enumerate(order)}
    earlier: list[list[_Half]] = [[] for _ in order]
    later: list[list[_Half]] = [[] for _ in order]
    for pair in halves:
        before, after = sorted(pair, key=lambda half: rank[half.node])
        later[before.node].append(before)
        earlier[after.node].append(after)
    depth = [0] * len(order)
    for node in order:
        before = [depth[half.mirror.node] + 1 for half in earlier[node]]
        depth[node] = max(before, default=0)
    levels = []
    order.sort(key=depth.__getitem__)
    for _, same in groupby(order, depth.__getitem__):
        nodes = list(same)
        sides = [[h for node in nodes for h in side[node]] for side in (earlier, later)]
        levels.append(_Level(nodes, [costs[node] for node in nodes], *sides))
    return levels


def _sort_by_class(classes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(classes, kind="stable")
    used, starts = np.unique(classes[order], return_index=True)
    if used.size != count:
        raise ValueError(
            f"every class of an edge must have a choice for messages, but {used.size} "
            f"of {count} have; use reduce() first."
        )
    return order, starts
