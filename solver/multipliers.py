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

from .choice_graph import ChoiceGraph, Node, TypedNodes
from .memory_rows import MemoryRow


def price(
    graph: ChoiceGraph, rows: Sequence[MemoryRow], prices: np.ndarray, budget: float
) -> ChoiceGraph:
    """The graph without a budget, at a price [rows] per byte over it."""
    constant = graph.constant + _constant(rows, prices) - float(prices.sum()) * budget
    nodes = _charged(graph.nodes, rows, prices, is_peak=False)
    return ChoiceGraph(nodes, graph.edges, constant=constant)


def price_of_peak(
    graph: ChoiceGraph, rows: Sequence[MemoryRow], prices: np.ndarray
) -> ChoiceGraph:
    """The graph in which only priced bytes cost, at prices [rows] that sum to 1."""
    nodes = _charged(graph.nodes, rows, prices, is_peak=True)
    matrices = {id(e.costs): _forbidden_only(e.costs) for e in graph.edges}
    edges = tuple(replace(e, costs=matrices[id(e.costs)]) for e in graph.edges)
    return ChoiceGraph(nodes, edges, constant=_constant(rows, prices))


def _charged(
    nodes: Sequence[Node],
    rows: Sequence[MemoryRow],
    prices: np.ndarray,
    *,
    is_peak: bool,
) -> TypedNodes:
    """Nodes that cost what they hold besides; those alike in all rows share arrays.

    `is_peak`: they cost nothing else.
    """
    typed = TypedNodes.of(nodes)
    priced = [(r, m) for r, m in zip(rows, prices.tolist(), strict=True) if m]
    kinds = np.full((len(priced) + 1, len(nodes)), -1)
    kinds[0] = key = typed.type_of
    for number, (row, _) in enumerate(priced, 1):
        kinds[number, row.index] = row.kinds[1]
        key = key * (len(row.kinds[0]) + 1) + kinds[number] + 1
        key = np.unique(key, return_inverse=True)[1].reshape(-1)
    _, examples, type_of = np.unique(key, return_index=True, return_inverse=True)
    types: list[tuple[np.ndarray, np.ndarray]] = []
    for own, *charges in kinds[:, examples].T.tolist():
        costs, held = typed.types[own]
        costs = _forbidden_only(costs) if is_peak else costs
        for (row, amount), kind in zip(priced, charges, strict=True):
            if kind >= 0:
                costs = costs + amount * row.kinds[0][kind]
        types.append((costs, held))
    return TypedNodes(types, type_of.reshape(-1), typed.name_of)


def _constant(rows: Sequence[MemoryRow], prices: np.ndarray) -> float:
    pairs = zip(rows, prices.tolist(), strict=True)
    return sum(amount * row.constant for row, amount in pairs)


def _forbidden_only(costs: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(costs), 0.0, np.inf)


def best_prices(
    costs: Sequence[float],
    used: np.ndarray,
    budget: float,
    *,
    most: float = np.inf,
) -> tuple[np.ndarray, float]:
    """The prices [rows] that maximise the least line of some assignments (Kelley).

    Assignment k, of `costs[k]` and `used[k]` [rows], bounds g by a line in the prices:
    cost_k + sum_r m_r (used_kr - budget). Rows that no assignment puts above the budget
    most get no price. A budget's worth of bytes costs at most `most`; it must be finite
    unless some assignment fits.

    Returns the prices, and the value of the least line there: no g is above it, unless
    `most` is in the way.
    """
    scale = max(max(map(abs, costs)), 1e-250)
    slopes = (used - budget) / max(budget, 1e-250)
    above = slopes.max(axis=1) > 0
    relevant = np.unique(slopes.argmax(axis=1)[above]).tolist()
    problem = pulp.LpProblem("prices", pulp.LpMaximize)
    value = pulp.LpVariable("z")
    prices = {row: pulp.LpVariable(f"m_{row}", 0) for row in relevant}
    problem += value
    for cost, slope in zip(costs, slopes, strict=True):
        terms = [(prices[row], float(slope[row])) for row in relevant]
        problem += value <= cost / scale + pulp.LpAffineExpression(terms)
    if most < np.inf:
        problem += pulp.lpSum(prices.values()) <= most / scale
    problem.solve(pulp.HiGHS(msg=False, threads=1))
    result = np.zeros(slopes.shape[1])
    for row, variable in prices.items():
        result[row] = max(variable.varValue or 0.0, 0.0)
    lines = np.array(costs) / scale + slopes @ result
    return result * scale / max(budget, 1e-250), float(lines.min()) * scale
