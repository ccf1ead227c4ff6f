"""A mesh of several axes, used as one: some plans of its own, found where few are."""

from functools import cache

import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.methods.axes_together import AxesTogether
from autopar.planner.budget_candidates import BudgetCandidates
from autopar.planner.intra_op import IntraOpSolution, plan_intra_op
from autopar.planner.planning import roles_of
from autopar.planner.sharding_problem import build_problem
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.resharding import Resharder
from autopar.sharding.spec import dims_of
from benchmarks.models import build

CLUSTER = Cluster.local()
ONE, TWO = parse_mesh("x:8"), parse_mesh("x:2;y:4")


@cache
def graph(name: str) -> OpGraph:
    workload = build(name)
    traced = trace(workload.step, workload.abstract(), {})
    return build_graph(traced, roles_of(traced))


def test_only_choices_that_split_by_all_axes_alike_are_left() -> None:
    resharder = Resharder(TWO, CLUSTER)
    problem = build_problem(graph("mlp"), TWO, CLUSTER, resharder)
    some_removed = False
    for before, after in zip(
        problem.vertices, AxesTogether().applied(problem).vertices, strict=True
    ):
        left = np.isfinite(after.seconds)
        assert left.any() and not (left & ~np.isfinite(before.seconds)).any()
        some_removed |= left.sum() < np.isfinite(before.seconds).sum()
        for access in (*after.writes, *after.reads):
            dims = dims_of(access.choices.specs)[left]
            assert (dims[:, 0] == dims[:, 1]).all()
    assert some_removed


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_its_cheapest_plan_costs_what_that_on_one_axis_does(name: str) -> None:
    together = plan_intra_op(
        graph(name), TWO, CLUSTER, restrictions=(AxesTogether(),)
    ).plan.predicted
    one = plan_intra_op(graph(name), ONE, CLUSTER).plan.predicted
    assert together.step_seconds == pytest.approx(one.step_seconds, rel=1e-3)


def best(mesh: str, budget_bytes: int) -> IntraOpSolution:
    batch = [each.tensor for each in graph("lstm").inputs if each.role == "batch"]
    place = graph("lstm"), parse_mesh(mesh), CLUSTER
    return BudgetCandidates(*place, budget_bytes, batch, {}, 1e-4).best()


@pytest.mark.slow
def test_within_a_budget_two_axes_do_what_one_does() -> None:
    free = plan_intra_op(graph("lstm"), ONE, CLUSTER).plan.predicted
    budget = int(0.7 * free.peak_bytes)
    one, two = best("x:8", budget), best("x:2;y:4", budget)
    assert two.plan.predicted.peak_bytes <= budget
    assert two.assignment.cost <= one.assignment.cost * 1.01
    assert two.assignment.bound <= one.assignment.cost
