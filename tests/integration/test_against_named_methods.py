"""No named method that fits is predicted to be faster than the plan that is chosen."""

from typing import Any

import jax
import pytest

import autopar
from autopar.errors import InfeasiblePlanError
from autopar.methods.named_methods import NamedMethod
from autopar.options import Options
from autopar.planner.graph_plan import plan_graph
from autopar.planner.plan_request import PlanRequest
from autopar.planner.planned import Planned
from autopar.planner.planning import plan_traced
from autopar.planner.whole_step import batch_tensors, trace_whole
from autopar.plans.plan import Prediction
from benchmarks.models import build
from benchmarks.models.workload import Workload

FAMILIES = ("mlp", "gpt", "llama", "bert", "moe", "vit", "lstm", "resnet", "unet")
LAYERED = ("gpt", "llama", "bert", "moe", "vit")
MESHES = ("x:8", "x:2;y:4")
QUICK = [("mlp", "x:2;y:4")]
# Where a budget binds the search may stop at this distance from its bound.
SLACK = 1.01


def cases(quick: list[tuple[str, str]]) -> list[Any]:
    """Every family on every mesh; those that are not quick are marked slow."""
    return [
        pytest.param(
            *(family, mesh),
            marks=() if (family, mesh) in quick else pytest.mark.slow,
        )
        for family in FAMILIES
        for mesh in MESHES
    ]


def made(family: str) -> Workload:
    """A model of the zoo at its tiny size, one layer of it where layers repeat."""
    return build(family, num_layers=1) if family in LAYERED else build(family)


def planned(workload: Workload, mesh: str, budget: int | None = None) -> Planned:
    options = options_on(mesh, budget)
    whole = trace_whole(workload.step, workload.abstract(), {}, options)
    return plan_traced(whole, options)


def options_on(mesh: str, budget: int | None) -> Options:
    step = autopar.parallelize(lambda x: x, mesh=mesh, memory_budget=budget)
    return step._options


def methods(mesh: str) -> tuple[NamedMethod, ...]:
    last = int(mesh.rpartition(":")[2])
    return (
        autopar.DataParallel(),
        *(autopar.Zero(stage) for stage in (1, 2, 3)),
        autopar.Zero(3, reshard_after_forward=False),
        autopar.Megatron(last),
        autopar.Megatron(last, sequence=True),
        autopar.LayoutRules("batch:x"),
    )


def plans(
    workload: Workload, found: Planned, mesh: str, budget: int | None
) -> dict[str, Prediction]:
    """What each method that fits and is not refused predicts, by its name."""
    leaves, options = jax.tree.leaves(workload.abstract()), options_on(mesh, budget)
    batch = batch_tensors(found.traced, found.graph, options)
    request = PlanRequest(found.graph, leaves, batch, found.cluster, options)
    predicted = {}
    for method in methods(mesh):
        try:
            plan = plan_graph(request.asking(method=method))
        except (InfeasiblePlanError, NotImplementedError, ValueError):
            continue
        predicted[str(method)] = plan.predicted
    return predicted


@pytest.mark.parametrize(("family", "mesh"), cases(QUICK))
def test_no_method_is_faster(family: str, mesh: str) -> None:
    workload = made(family)
    found = planned(workload, mesh)
    chosen = found.plan.predicted
    others = plans(workload, found, mesh, None)
    assert len(others) >= 4
    slack = 1 + chosen.optimality_gap + 1e-9
    faster = {
        name: each.step_seconds
        for name, each in others.items()
        if chosen.step_seconds > each.step_seconds * slack
    }
    assert not faster


@pytest.mark.parametrize(("family", "mesh"), cases([]))
def test_no_method_that_fits_is_faster_within_a_budget(family: str, mesh: str) -> None:
    """The budget lies between what the cheapest plan takes and what a method needs."""
    workload = made(family)
    found = planned(workload, mesh)
    free = found.plan.predicted
    named = plans(workload, found, mesh, None)
    least = min(each.peak_bytes for each in named.values())
    if least >= free.peak_bytes:
        pytest.skip("no method takes less memory than the cheapest plan")
    budget = (least + free.peak_bytes) // 2
    chosen = planned(workload, mesh, budget).plan.predicted
    assert chosen.peak_bytes <= budget < free.peak_bytes
    others = plans(workload, found, mesh, budget)
    assert others
    faster = {
        name: each.step_seconds
        for name, each in others.items()
        if chosen.step_seconds > each.step_seconds * SLACK
    }
    assert not faster
