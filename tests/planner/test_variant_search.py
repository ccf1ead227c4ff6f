"""Variants of remat within a budget: the same is chosen, with less searched."""

from dataclasses import replace
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.option_values import NO_BUDGET
from autopar.options import check_options, resolve_options
from autopar.planner import variant_search
from autopar.planner.graph_plan import plan_graph
from autopar.planner.plan_request import PlanRequest
from autopar.planner.step_variants import StepVariants
from autopar.planner.variant_search import Chosen, best_variant
from autopar.planner.whole_step import roles_of
from autopar.plans.plan import ShardingPlan
from tests.planner.deep_step import step

WIDTH, NUM_LAYERS = 64, 3


class Searched:
    """The variants of a small step, searched with cutoffs or without."""

    def __init__(self, num_rows: int = 2048) -> None:
        kernel = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        x = jax.ShapeDtypeStruct((num_rows, WIDTH), jnp.float32)
        self.args = [kernel] * NUM_LAYERS, x
        traced = trace(step, self.args, {})
        roles = roles_of(traced)
        self.graph = build_graph(traced, roles)
        self.batch = [i.tensor for i in self.graph.inputs if i.role == "batch"]
        self.variants = StepVariants(traced, self.graph, roles, self.batch)
        self.cluster = Cluster.preset("1x8xH100")
        checked = check_options(mesh="x:8", cluster=self.cluster, remat="auto")
        self.options = resolve_options(step, checked)
        self.cutoffs: list[float] = []

    def request(self, graph: OpGraph, budget_bytes: int) -> PlanRequest:
        leaves = jax.tree.leaves(self.args)
        options = replace(self.options, memory_budget=budget_bytes)
        return PlanRequest(graph, leaves, self.batch, self.cluster, options)

    def chosen(self, budget_bytes: int, *, cuts: bool) -> Chosen:
        def planned(request: PlanRequest, cutoff: float = inf) -> ShardingPlan:
            if request.options.memory_budget != NO_BUDGET:
                self.cutoffs.append(cutoff)
            return plan_graph(request, cutoff=cutoff if cuts else inf)

        self.cutoffs = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(variant_search, "plan_graph", planned)
            request = self.request(self.graph, budget_bytes)
            return best_variant([self.variants], request)


@pytest.mark.slow
def test_cutoffs_leave_the_variant_that_is_chosen() -> None:
    searched = Searched(num_rows=2**20)
    free = searched.chosen(NO_BUDGET - 1, cuts=False)
    budget = int(0.75 * free.plan.predicted.peak_bytes)
    whole = searched.chosen(budget, cuts=False)
    found = searched.chosen(budget, cuts=True)
    assert min(searched.cutoffs) < inf
    assert str(found.variant) == str(whole.variant)
    assert found.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert found.plan.predicted.peak_bytes <= budget


def test_a_plan_that_is_of_no_use_is_not_kept_in_the_cache(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    searched = Searched()
    request = searched.request(searched.graph, NO_BUDGET)
    ended = plan_graph(request, cutoff=1e-9)
    assert ended.predicted.optimality_gap > 1e-4
    best = plan_graph(request)
    assert best.predicted.optimality_gap <= 1e-4
