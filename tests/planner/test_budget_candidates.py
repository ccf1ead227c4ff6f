"""No named method that fits is faster than what is chosen within a budget."""

from dataclasses import replace
from typing import Any

import pytest

from autopar.clusters.cluster import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.methods.named_methods import Megatron, NamedMethod, Zero, restriction_of
from autopar.planner import budget_candidates
from autopar.planner.budget_candidates import BudgetCandidates
from autopar.planner.intra_op import IntraOpSolution, plan_intra_op
from autopar.planner.planning import roles_of
from autopar.sharding.mesh import parse_mesh
from benchmarks.models import build


def test_a_search_that_says_it_is_done_is_held_against_the_methods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of memory may cut off a plan that fits: then their bound holds nothing."""
    workload = build("mlp")
    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    place = graph, parse_mesh("x:8"), Cluster.local()

    def planned(method: NamedMethod) -> IntraOpSolution:
        limits = (restriction_of(method, graph, place[1], batch),)
        return plan_intra_op(*place, restrictions=limits)

    free, slow = plan_intra_op(*place), planned(Zero(3))
    quick = planned(Megatron(8, sequence=True))
    fast, late = (each.plan.predicted.step_seconds for each in (quick, slow))
    held = quick.plan.predicted.peak_bytes
    assert held < free.plan.predicted.peak_bytes and fast < late / 1.02
    closed = replace(slow.assignment, bound=slow.assignment.cost)
    slow = IntraOpSolution(slow.plan, closed)
    monkeypatch.setattr(BudgetCandidates, "_search", lambda _: slow)
    rest: Any = batch, {}, 1e-4
    found = BudgetCandidates(*place, held, *rest).best()
    assert found.plan.predicted.step_seconds <= fast
    assert found.plan.predicted.peak_bytes <= held
    gap = fast / free.assignment.bound - 1
    assert 0 < found.plan.predicted.optimality_gap <= gap * (1 + 1e-6)

    less = BudgetCandidates(*place, held - 1, *rest).best()
    assert less.plan.predicted.peak_bytes < held
    assert fast < less.plan.predicted.step_seconds <= late


@pytest.mark.parametrize("is_ruled_out", [True, False])
def test_no_method_is_searched_where_rows_of_all_plans_rule_the_budget_out(
    monkeypatch: pytest.MonkeyPatch, is_ruled_out: bool
) -> None:
    workload = build("mlp")
    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    budget, searched = 40_000, []

    def refused(*_: Any, **__: Any) -> IntraOpSolution:
        error = InfeasiblePlanError("nothing fits", int(1.03 * budget))
        error.bound_bytes = int(1.02 * budget) if is_ruled_out else budget
        searched.append(error)
        raise error

    monkeypatch.setattr(budget_candidates, "plan_within_binding", refused)
    rest: Any = budget, batch, {}, 1e-4
    with pytest.raises(InfeasiblePlanError) as raised:
        BudgetCandidates(graph, parse_mesh("x:8"), Cluster.local(), *rest).best()
    assert raised.value.least_budget_bytes == int(1.03 * budget)
    assert (len(searched) == 1) == is_ruled_out


@pytest.mark.parametrize(
    ("mesh", "groups"), [("x:1", []), ("x:8", [8]), ("x:2;y:4", [4, 8])]
)
def test_megatron_is_tried_with_each_group_that_a_mesh_has(
    mesh: str, groups: list[int]
) -> None:
    workload = build("mlp")
    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    shape = parse_mesh(mesh, 1 if mesh == "x:1" else 8)
    rest: Any = [], {}, 1e-4
    tried = BudgetCandidates(graph, shape, Cluster.local(), 10**9, *rest)._methods()
    found = [each for each in tried if isinstance(each, Megatron)]
    assert [each.tensor for each in found if not each.sequence] == groups
    assert [each.tensor for each in found if each.sequence] == groups
