"""A lower bound and plans by sequential tree-reweighted message passing (TRW-S).

After Kolmogorov, "Convergent tree-reweighted message passing for energy minimization"
(PAMI 2006). A message M_e per direction of an edge e = (i, j), on the classes of the
node it enters, reparametrises the cost without changing it:

    node i:  f_i(x) = costs_i(x) + sum_e M_e(class of x)       (messages into i)
    edge e:  costs_e(a, b) - M_e(b) - M_e'(a)

Nodes are swept in order (`sweep_order`) and in reverse. At node i, with w_i =
1 / max(edges to earlier nodes, edges to later nodes), the message ahead along e is
M_e(b) = min_a (min_{x in a} w_i f_i(x) - M_e'(a) + costs_e(a, b)), and every minimum
subtracted on the way back adds to the bound (`_send`). Plans are rounded while
sweeping: a node takes the best choice given its earlier neighbours' choices and the
messages of its later ones (`_round`). The bound holds whatever finite number stands for
inf, because that only makes the problem easier.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import networkx as nx
import numpy as np

from .choice_graph import ChoiceGraph
from .clock import Clock
from .descent import Descent

STALL_ROUNDS = 10
STALLED = 0.1  # of the distance left, in STALL_ROUNDS
# Seconds of a usual core, there and back: of a node, an edge and an entry of one.
_NODE, _EDGE, _ENTRY = 2.5e-5, 1.2e-5, 3e-9
least_of = np.minimum.reduce


@dataclass(frozen=True, eq=False)
class Messages:
    """What message passing found.

    `bound` is below every assignment's cost; `choices` is the best plan seen, of `cost`
    (None when none was feasible); `marginals[v]` [k] is a lower bound on the cost of
    the assignments that make each choice of node v; `is_finished` says that the gap is
    closed or the bound stalls, so that more rounds are of little use.
    """

    bound: float
    choices: tuple[int, ...] | None
    cost: float
    marginals: tuple[np.ndarray, ...] = field(repr=False)
    num_rounds: int
    is_finished: bool

    def __str__(self) -> str:
        return (
            f"Messages: bound {self.bound:.6g}, cost {self.cost:.6g}, "
            f"{self.num_rounds} rounds"
        )


@dataclass(eq=False)
class Half:
    """An edge seen from one end: `matrix` [classes here, classes there].

    `order` and `starts` sort the choices here by class (None when each choice is its
    own class, in order); `incoming` is the message from there.
    """

    other: int
    classes: np.ndarray
    matrix: np.ndarray
    order: np.ndarray | None
    starts: np.ndarray | None
    incoming: np.ndarray
    mirror: "Half" = field(init=False, repr=False)

    def least_by_class(self, values: np.ndarray) -> np.ndarray:
        if self.order is None or self.starts is None:
            return values
        return np.minimum.reduceat(values[self.order], self.starts)

    def add_incoming(self, values: np.ndarray) -> None:
        if self.order is None:
            values += self.incoming
        else:
            values += self.incoming[self.classes]


class Passing:
    """Messages on one graph, whose budget is not looked at.

    `cost` is that of a plan already known (inf for none), `clock` is told of the work.
    `bound` is the best so far, `halves` each edge as seen from its first and its second
    node.
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
        self.costs = [np.minimum(node.costs, self.ceiling) for node in graph.nodes]
        self.order = sweep_order(graph)
        self.halves = _halves(graph, self.ceiling)
        self.rank = np.empty(len(graph.nodes), np.intp)
        self.rank[self.order] = np.arange(len(graph.nodes))
        self.earlier, self.later = _around(graph, self.halves, self.rank.tolist())
        self.weights = [
            1.0 / max(len(before), len(after), 1)
            for before, after in zip(self.earlier, self.later, strict=True)
        ]
        self.best: tuple[int, ...] | None = None
        self.best_cost = inf
        self.bound = -inf
        self.num_rounds = 0
        self.marginals = [np.full(costs.size, -inf) for costs in self.costs]
        entries = sum(here.matrix.size for here, _ in self.halves)
        seconds = _NODE * len(self.costs) + _EDGE * len(self.halves)
        self._round_seconds = seconds + _ENTRY * entries

    def run(
        self,
        gap: float,
        *,
        cost: float = inf,
        enough: float = inf,
        max_rounds: int = 200,
        work_limit: float = 30.0,
    ) -> Messages:
        """Sweeps on until the gap is closed, the bound stalls, or a limit is reached.

        Args:
            gap: relative distance of bound to cost at which to stop.
            cost: the cost of a plan found elsewhere meanwhile.
            enough: a bound at which to stop, too, once there is a plan.
            max_rounds: most sweeps there and back.
            work_limit: most seconds of work.
        """
        until, checkpoint = self.clock.spent + work_limit, self.bound
        is_finished = False
        for num_rounds in range(1, max_rounds + 1):
            is_rounding = self.num_rounds < 4 or self.num_rounds % 4 == 3
            self._sweep_forward(is_rounding)
            self._sweep_backward()
            self.num_rounds += 1
            self.clock.spend(self._round_seconds)
            least = min(self.best_cost, cost)
            distance = least - self.bound
            is_enough = distance <= gap * abs(least) or self.bound >= enough
            is_finished = least < inf and is_enough
            if num_rounds % STALL_ROUNDS == 0:
                gained, checkpoint = self.bound - checkpoint, self.bound
                is_finished |= gained < STALLED * min(distance, abs(self.bound))
            if is_finished or self.clock.now() > until:
                break
        return Messages(
            *(self.bound, self.best, self.best_cost),
            tuple(marginal.copy() for marginal in self.marginals),
            self.num_rounds,
            is_finished,
        )

    def _sweep_forward(self, is_rounding: bool) -> None:
        choices = [0] * len(self.costs)
        for node in self.order:
            if is_rounding:
                choices[node] = self._round(node, choices)
            self._send(node, self.earlier[node], self.later[node])
        if is_rounding:
            self._offer(choices)

    def _sweep_backward(self) -> None:
        bound = self.graph.constant
        for node in reversed(self.order):
            bound += self._send(node, self.later[node], self.earlier[node])
        self.bound = max(self.bound, bound)

    def reparametrised(self, node: int) -> np.ndarray:
        """[k] the costs of a node with all messages into it."""
        values = self.costs[node].copy()
        for half in (*self.earlier[node], *self.later[node]):
            half.add_incoming(values)
        return values

    def _send(self, node: int, behind: list[Half], ahead: list[Half]) -> float:
        """Updates the messages ahead; returns what the bound gains on the way back."""
        values = self.costs[node].copy()
        for half in behind:
            half.add_incoming(values)
        for half in ahead:
            half.add_incoming(values)
        gained = least_of(values)
        values -= gained
        if self.bound > -inf:
            np.maximum(
                self.marginals[node], values + self.bound, out=self.marginals[node]
            )
        values *= self.weights[node]
        for half in ahead:
            least = half.least_by_class(values) - half.incoming
            half.mirror.incoming = least_of(half.matrix + least[:, None], axis=0)
        return float(gained)

    def _round(self, node: int, choices: list[int]) -> int:
        values = self.costs[node].copy()
        for half in self.earlier[node]:
            there = half.mirror.classes[choices[half.other]]
            values += half.mirror.matrix[there][half.classes]
        for half in self.later[node]:
            half.add_incoming(values)
        return int(values.argmin())

    def _offer(self, choices: list[int]) -> None:
        improved = self.descent.improve(choices)
        cost = self.graph.cost(improved)
        if cost < self.best_cost:
            self.best, self.best_cost = tuple(improved), cost


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
    matrices = {id(edge.costs): edge.costs for edge in graph.edges}
    largest = {key: _largest(matrix) for key, matrix in matrices.items()}
    return (
        sum(_largest(node.costs) for node in graph.nodes)
        + sum(largest[id(edge.costs)] for edge in graph.edges)
        + 1e-300
    )


def _largest(costs: np.ndarray) -> float:
    return float(np.max(costs, where=np.isfinite(costs), initial=0.0))


def _halves(graph: ChoiceGraph, ceiling: float) -> list[tuple[Half, Half]]:
    """Per edge, how it looks from its first and from its second node."""
    sorted_by_id: dict[int, tuple[np.ndarray | None, np.ndarray | None]] = {}
    matrix_by_id: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    pairs = []
    for edge in graph.edges:
        if id(edge.costs) not in matrix_by_id:
            matrix = np.minimum(edge.costs, ceiling)
            matrix_by_id[id(edge.costs)] = matrix, np.ascontiguousarray(matrix.T)
        matrix, transposed = matrix_by_id[id(edge.costs)]
        sides = (
            (edge.second, edge.first_class, matrix),
            (edge.first, edge.second_class, transposed),
        )
        halves = []
        for other, classes, costs in sides:
            if id(classes) not in sorted_by_id:
                sorted_by_id[id(classes)] = _sort_by_class(classes, len(costs))
            order, starts = sorted_by_id[id(classes)]
            incoming = np.zeros(len(costs))
            halves.append(Half(other, classes, costs, order, starts, incoming))
        here, there = halves
        here.mirror, there.mirror = there, here
        pairs.append((here, there))
    return pairs


def _around(
    graph: ChoiceGraph, halves: Sequence[tuple[Half, Half]], rank: Sequence[int]
) -> tuple[list[list[Half]], list[list[Half]]]:
    """Per node, its edges to earlier and to later nodes in the order of the sweeps."""
    earlier: list[list[Half]] = [[] for _ in graph.nodes]
    later: list[list[Half]] = [[] for _ in graph.nodes]
    for edge, (here, there) in zip(graph.edges, halves, strict=True):
        is_forward = rank[edge.first] < rank[edge.second]
        (later if is_forward else earlier)[edge.first].append(here)
        (earlier if is_forward else later)[edge.second].append(there)
    return earlier, later


def _sort_by_class(
    classes: np.ndarray, count: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    if classes.size == count and (classes == np.arange(count)).all():
        return None, None
    order = np.argsort(classes, kind="stable")
    used, starts = np.unique(classes[order], return_index=True)
    if used.size != count:
        raise ValueError(
            f"every class of an edge must have a choice for messages, but {used.size} "
            f"of {count} have; use reduce() first."
        )
    return order, starts
