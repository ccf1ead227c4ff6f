"""No plan of a method holds less than its arguments do at least."""

from typing import Any

import pytest
from rich.console import Console

import autopar
from autopar.clusters.cluster import Cluster
from autopar.commands.method_comparison import Row, comparison_table
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.methods.named_methods import (
    DataParallel,
    Megatron,
    NamedMethod,
    Zero,
    restriction_of,
)
from autopar.planner import plan_within
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.least_inputs import least_input_bytes
from autopar.planner.planning import roles_of
from autopar.sharding.mesh import parse_mesh
from benchmarks.models import build


@pytest.mark.parametrize(
    "method", [DataParallel(), Zero(1), Zero(2), Zero(3), Megatron(4)], ids=str
)
def test_arguments_of_a_plan_hold_no_less(method: NamedMethod) -> None:
    workload = build("mlp")
    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    mesh = parse_mesh("x:2;y:4")
    restriction = restriction_of(method, graph, mesh, batch)
    least = least_input_bytes(graph, mesh, restriction)
    plan = plan_intra_op(graph, mesh, Cluster.local(), restrictions=(restriction,)).plan
    assert 0 < least <= plan.predicted.peak_bytes
    state = sum(
        graph.tensors[each.tensor].type.bytes
        for each in graph.inputs
        if each.role == "state"
    )
    if isinstance(method, DataParallel):
        assert least > state
    else:
        assert least < state


def test_a_method_whose_arguments_do_not_fit_is_refused_without_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def searched(*_: Any, **__: Any) -> None:
        raise AssertionError

    workload = build("mlp")

    def plan(budget: int) -> autopar.Plan:
        own: Any = {"cluster": Cluster.preset("8xA100"), "memory_budget": budget}
        step = autopar.parallelize(workload.step, method=DataParallel(), **own)
        return step.plan(*workload.abstract())

    monkeypatch.setattr(plan_within, "plan_within_binding", searched)
    with pytest.raises(autopar.InfeasiblePlanError, match="arguments alone") as raised:
        plan(100_000)
    least = raised.value.least_budget_bytes
    assert least is not None
    assert 100_000 < raised.value.far_bound_bytes < least
    assert plan(least).predicted.peak_bytes <= least
    rows = [Row("this plan", plan(least).sharding), Row("one", raised.value)]
    console = Console(width=100)
    with console.capture() as shown:
        console.print(comparison_table(rows))
    assert "needs over" in shown.get()
