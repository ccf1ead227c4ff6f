"""Plans that were met: what fits is taken, and what rows rule out though it fits."""

from dataclasses import replace
from functools import cache

import pytest

from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.methods.named_methods import Zero, restriction_of
from autopar.methods.restrictions import restrict
from autopar.planner import mixed_plans
from autopar.planner.budget_search import BudgetSearch
from autopar.planner.met_plans import FAR_OFF, MetPlans
from autopar.planner.planning import roles_of
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.resharding import Resharder
from autopar.solver import solve
from autopar.solver.assignment import Assignment
from autopar.solver.choice_graph import Infeasible
from benchmarks.models import build

MESH, CLUSTER = parse_mesh("x:8"), Cluster.local()


@cache
def resnet_graph() -> OpGraph:
    workload = build("resnet")
    traced = trace(workload.step, workload.abstract(), {})
    return build_graph(traced, roles_of(traced))


@cache
def resnet() -> tuple[ShardingProblem, Assignment, Assignment]:
    """A problem, its cheapest plan and that of ZeRO-1, unlike it in all layers."""
    graph = resnet_graph()
    resharder = Resharder(MESH, CLUSTER)
    problem = build_problem(graph, MESH, CLUSTER, resharder, counts_memory=True)
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    limit = restriction_of(Zero(1), graph, MESH, batch)
    limited = restrict(problem, (limit,), CLUSTER).choice_graph
    return problem, solve(problem.choice_graph), solve(limited)


def met_plans(limit_bytes: float) -> MetPlans:
    problem, free, _ = resnet()
    place = problem, CLUSTER, Resharder(MESH, CLUSTER), free
    return MetPlans(*place, 0.0, limit_bytes=limit_bytes)


def test_a_plan_unlike_all_others_lowers_rows_only_once_it_is_let() -> None:
    zero = resnet()[-1]
    budget = met_plans(0).see(zero).live_bytes
    met = met_plans(budget)
    met.meet_start(zero)
    found, free = met.plans[-1], met.plans[0]
    assert met.said(found) > FAR_OFF * found.live_bytes
    assert met.admit_far()
    assert met.said(found) <= budget * (1 + 1e-9)
    assert max(row.used(free.choices) for row in met.rows) == free.live_bytes
    assert not met.admit_far()


def test_a_plan_that_alone_fits_is_let_at_once() -> None:
    zero = resnet()[-1]
    budget = met_plans(0).see(zero).live_bytes
    met = met_plans(budget)
    met.meet_start(zero)
    found = met.plans[-1].choices
    met.admit_within(budget - 1)
    assert max(row.used(found) for row in met.rows) > FAR_OFF * budget
    met.admit_within(budget)
    assert max(row.used(found) for row in met.rows) <= budget * (1 + 1e-9)


def test_a_start_is_told_its_gap_to_the_plan_without_a_budget() -> None:
    """Not to that of the problem in which it is the best."""
    zero = resnet()[-1]
    met = met_plans(0)
    free, told = met.free, met.see(zero).profile.plan.predicted
    assert zero.gap < 1e-2 < 1 - free.bound / zero.cost
    assert told.optimality_gap == pytest.approx(1 - free.bound / zero.cost)


def test_a_plan_that_solutions_came_by_is_taken_if_it_fits() -> None:
    zero = resnet()[-1]
    holds = met_plans(0).see(zero).live_bytes
    budget = met_plans(0).plans[0].live_bytes - 1
    met = met_plans(budget)
    assert met.look_through(budget, 8) is None  # only the free plan was met
    met._priced.add(zero.choices)
    assert met.look_through(holds // 2, 8) is None  # rows put it far above
    assert met.look_through(budget, 0) is None
    found = met.look_through(budget, 1)
    assert found is not None and found is met.cheapest(budget)
    assert found.live_bytes == holds
    assert found.assignment.cost == pytest.approx(zero.cost)
    assert met.look_through(budget, 8) is None  # none is cheaper


def test_rounds_lower_rows_that_leave_nothing_and_forget_their_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    zero = resnet()[-1]
    budget = met_plans(0).see(zero).live_bytes
    met = met_plans(budget)
    met.meet_start(zero)
    within = BudgetSearch(resnet_graph(), MESH, CLUSTER, None, (), budget, 0.0)
    met._proved.add((1 + within.gap) * within.free.cost, budget, met.rows)
    assert met.bound(budget) > within.free.cost

    def solve(*args: object, packed: bool) -> None:
        raise Infeasible("rows leave nothing")

    monkeypatch.setattr(met, "solve", solve)
    within._solve_in_rounds(met, within.gap, packed=False)
    assert within.is_ruled_out
    assert met.bound(budget) < within.free.cost


def test_packed_rows_say_what_a_plan_needs_and_bound_nothing_that_is_live() -> None:
    above = met_plans(0).plans[0]
    budget = above.peak_bytes - 1
    assert above.live_bytes <= budget
    met = met_plans(budget)
    met.add_packed()
    number = len(met.rows_of(packed=True))
    met.add_packed()
    assert len(met.rows_of(packed=True)) == number > len(met.rows)
    assert met.said(above) == above.live_bytes
    assert met.said(above, packed=True) == above.peak_bytes
    dear = 2 * above.assignment.cost
    met._proved.add(dear, budget, met.rows_of(packed=True))
    assert met.bound(budget, packed=True) == dear > met.bound(budget)
    met._proved.add(dear, budget, met.rows)
    assert met.bound(budget) == dear


def test_a_plan_that_fits_lowers_packed_rows() -> None:
    above = met_plans(0).plans[0]
    budget = above.peak_bytes - 1
    met = met_plans(budget)
    zero, row = met.look_at(resnet()[-1]), met.own_rows(above, packed=True)[0]
    at = next(i for i, v in enumerate(row.nodes) if zero.choices[v] != above.choices[v])
    weights = [*row.weights[:at], row.weights[at].copy(), *row.weights[at + 1 :]]
    weights[at][zero.choices[row.nodes[at]]] += 1 + budget - row.used(zero.array)
    met._add(above, [replace(row, weights=tuple(weights))], packed=True)
    assert zero.peak_bytes <= budget < met.said(zero, packed=True)
    assert met.take(zero) is met.fitting(budget)
    assert met.said(zero, packed=True) <= budget * (1 + 1e-9)
    assert met.said(above, packed=True) == above.peak_bytes


def test_solutions_within_packed_rows_leave_out_what_its_holes_keep_out() -> None:
    above = met_plans(0).plans[0]
    budget = above.peak_bytes - 1
    met = met_plans(budget)
    met.see(resnet()[-1])
    met.add_packed()
    live, packed = met.solve(budget, 0.1), met.solve(budget, 0.1, packed=True)
    assert live.choices == above.choices
    assert packed.assignment.cost > above.assignment.cost
    assert met.bound(budget) <= above.assignment.cost


def test_mixtures_fit_where_a_solution_holds_more_than_rows_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the free plan, which is above the budget, and ZeRO-1's, far below it."""
    monkeypatch.setattr(mixed_plans, "MOST_NODES", 0)
    zero, met = resnet()[-1], met_plans(0)
    free, least = met.plans[0], met.see(zero)
    limit = 0.8 * free.live_bytes + 0.2 * least.live_bytes
    met = met_plans(limit)
    met.meet_start(zero)
    above = met.plans[0]
    mixed_plans.meet_mixtures(met, above, limit, packed=False)
    best = met.cheapest(int(limit))
    assert best is not None
    assert free.assignment.cost <= best.assignment.cost < least.assignment.cost
    monkeypatch.undo()
    number = len(met.plans)
    mixed_plans.meet_mixtures(met, above, limit, packed=False)
    assert len(met.plans) == number  # a small problem is branched
