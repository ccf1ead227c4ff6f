"""Prices on memory: the Lagrangian relaxation of the budget.

With a price m_r >= 0 on the bytes of row r, the problem without a budget

    g(m) = min_x  cost(x) + sum_r m_r (used_r(x) - budget)                    (`price`)

is below every assignment that fits, for any prices, and easy. With costs left out and
prices that sum to 1, sum_r m_r used_r(x) is below the peak of every assignment
(`price_of_peak`). The best prices are the duals of the linear relaxation's rows; where
that is looser than messages are, those of cutting planes (`best_prices`).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pulp

from .choice_graph import ChoiceGraph, Node
from .memory_rows import MemoryRow


def price(
    graph: ChoiceGraph, rows: Sequence[MemoryRow], prices: np.ndarray, budget: float
) -> ChoiceGraph:
    """The graph without a budget, at a price [rows] per byte over it."""
    constant = graph.constant + _constant(rows, prices) - float(prices.sum()) * budget
    nodes = tuple(_charged(graph.nodes, _charges(graph, rows, prices)))
    return ChoiceGraph(nodes, graph.edges, constant=constant)


def price_of_peak(
    graph: ChoiceGraph, rows: Sequence[MemoryRow], prices: np.ndarray
) -> ChoiceGraph:
    """The graph in which only priced bytes cost, at prices [rows] that sum to 1."""
    nodes = [replace(n, costs=_forbidden_only(n.costs)) for n in graph.nodes]
    matrices = {id(e.costs): _forbidden_only(e.costs) for e in graph.edges}
    edges = tuple(replace(e, costs=matrices[id(e.costs)]) for e in graph.edges)
    charged = tuple(_charged(nodes, _charges(graph, rows, prices)))
    return ChoiceGraph(charged, edges, constant=_constant(rows, prices))


def _charges(
    graph: ChoiceGraph, rows: Sequence[MemoryRow], prices: np.ndarray
) -> dict[int, np.ndarray]:
    """[k] what each choice costs more, by node."""
    charges: dict[int, np.ndarray] = {}
    for row, amount in zip(rows, prices.tolist(), strict=True):
        if not amount:
            continue
        for node, weights in zip(row.nodes, row.weights, strict=True):
            known = charges.get(node)
            more = amount * weights
            charges[node] = more if known is None else known + more
    return charges


def _charged(nodes: Sequence[Node], charges: dict[int, np.ndarray]) -> list[Node]:
    """Nodes with their charges; equal ones share an array, as they did before."""
    known: dict[tuple[int, bytes], Node] = {}
    charged = list(nodes)
    for index, charge in charges.items():
        node = nodes[index]
        key = id(node.costs), charge.tobytes()
        if key not in known:
            known[key] = Node(node.name, node.costs + charge, node.bytes)
        charged[index] = known[key]
    return charged


def _constant(rows: Sequence[MemoryRow], prices: np.ndarray) -> float:
    pairs = zip(rows, prices.tolist(), strict=True)
    return sum(amount * row.constant for row, amount in pairs)


def _forbidden_only(costs: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(costs), 0.0, np.inf)


def best_prices(
    costs: Sequence[float], used: Sequence[np.ndarray], budget: float
) -> np.ndarray:
    """The prices [rows] that maximise the least line of some assignments (Kelley).

    Assignment k, of `costs[k]` and `used[k]` [rows], bounds g by a line in the prices:
    cost_k + sum_r m_r (used_kr - budget). Some assignment must fit the budget. Rows
    that no assignment puts above it most get no price.
    """
    scale = max(max(map(abs, costs)), 1e-250)
    slopes = (np.stack(used) - budget) / max(budget, 1e-250)
    above = slopes.max(axis=1) > 0
    relevant = np.unique(slopes.argmax(axis=1)[above]).tolist()
    problem = pulp.LpProblem("prices", pulp.LpMaximize)
    value = pulp.LpVariable("z")
    prices = {row: pulp.LpVariable(f"m_{row}", 0) for row in relevant}
    problem += value
    for cost, slope in zip(costs, slopes, strict=True):
        terms = [(prices[row], float(slope[row])) for row in relevant]
        problem += value <= cost / scale + pulp.LpAffineExpression(terms)
    problem.solve(pulp.HiGHS(msg=False, threads=1))
    result = np.zeros(slopes.shape[1])
    for row, variable in prices.items():
        result[row] = max(variable.varValue or 0.0, 0.0)
    return result * scale / max(budget, 1e-250)
