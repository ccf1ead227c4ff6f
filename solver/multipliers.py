"""Prices on memory: the Lagrangian relaxation of the budget.

With a price m_t >= 0 on the bytes of live set t, the problem without a budget

    g(m) = min_x  cost(x) + sum_t m_t (bytes_t(x) - budget)                    (`price`)

is below every plan that fits, for any prices, and easy. The best prices are found by
cutting planes (Kelley): every plan x_k seen bounds g by a line, and the next prices
maximise the least of these lines (`best_prices`),

    maximise z   subject to  z <= cost(x_k) + sum_t m_t (bytes_t(x_k) - budget)  each k.

With cost left out and prices that sum to 1, the same gives the least budget of all
(`least_peak_prices`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pulp

from .choice_graph import ChoiceGraph, Edge, Node


@dataclass(frozen=True, eq=False)
class SeenPlan:
    """A plan, its cost, and [live sets] the bytes it uses."""

    choices: tuple[int, ...]
    cost: float
    used: np.ndarray

    def __str__(self) -> str:
        return f"plan of cost {self.cost:.6g}, peak bytes {self.used.max():.6g}"


def price(graph: ChoiceGraph, prices: np.ndarray, with_costs: bool) -> ChoiceGraph:
    """The graph without a budget, at a price [live sets] per byte over it.

    Without costs, only the price of bytes counts, and forbidden stays forbidden.
    """
    rate = np.zeros(len(graph.nodes))
    for live, amount in zip(graph.live_sets, prices, strict=True):
        if amount:
            rate[list(live)] += amount
    known: dict[tuple[int, int, float], Node] = {}
    nodes = []
    for node, per_byte in zip(graph.nodes, rate.tolist(), strict=True):
        key = (id(node.costs), id(node.bytes), per_byte)
        if key not in known:
            costs = node.costs if with_costs else _forbidden_only(node.costs)
            known[key] = Node(node.name, costs + per_byte * node.bytes, node.bytes)
        nodes.append(known[key])
    if with_costs:
        constant = graph.constant - float(prices.sum()) * (graph.budget or 0.0)
        return ChoiceGraph(tuple(nodes), graph.edges, constant=constant)
    matrices = {id(e.costs): _forbidden_only(e.costs) for e in graph.edges}
    edges = tuple(_with_costs(e, matrices[id(e.costs)]) for e in graph.edges)
    return ChoiceGraph(tuple(nodes), edges)


def best_prices(plans: Sequence[SeenPlan], budget: float) -> tuple[np.ndarray, float]:
    """The prices [live sets] that maximise the least line, and that maximum.

    Some plan must fit the budget.
    """
    scale = max(max(abs(plan.cost) for plan in plans), 1e-250)
    unit = scale / max(budget, 1e-250)
    lines = [(plan.cost / scale, (plan.used - budget) * unit / scale) for plan in plans]
    prices, value = _maximise(lines, sums_to_one=False)
    return prices * unit, value * scale


def least_peak_prices(plans: Sequence[SeenPlan]) -> tuple[np.ndarray, float]:
    """Prices that sum to 1 and maximise the least priced bytes, and that maximum."""
    scale = max(max(float(plan.used.max()) for plan in plans), 1e-250)
    prices, value = _maximise([(0.0, plan.used / scale) for plan in plans], True)
    return prices, value * scale


def _maximise(
    lines: Sequence[tuple[float, np.ndarray]], sums_to_one: bool
) -> tuple[np.ndarray, float]:
    """Live sets that no plan puts over the budget (or on top) get no price."""
    slopes = np.stack([slope for _, slope in lines])
    if not slopes.shape[1]:
        return np.zeros(0), min(intercept for intercept, _ in lines)
    if sums_to_one:
        relevant = np.unique(slopes.argmax(axis=1))
    else:
        relevant = np.unique(slopes.argmax(axis=1)[slopes.max(axis=1) > 0])
    problem = pulp.LpProblem("prices", pulp.LpMaximize)
    value = pulp.LpVariable("z")
    prices = {t: pulp.LpVariable(f"m_{t}", 0) for t in relevant.tolist()}
    problem += value
    for intercept, slope in lines:
        terms = [(prices[t], float(slope[t])) for t in prices]
        problem += value <= intercept + pulp.LpAffineExpression(terms)
    if sums_to_one:
        problem += pulp.lpSum(prices.values()) == 1
    problem.solve(pulp.HiGHS(msg=False))
    result = np.zeros(slopes.shape[1])
    for t, variable in prices.items():
        result[t] = max(variable.varValue or 0.0, 0.0)
    return result, float(value.varValue or 0.0)


def _forbidden_only(costs: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(costs), 0.0, np.inf)


def _with_costs(edge: Edge, costs: np.ndarray) -> Edge:
    return replace(edge, costs=costs)
