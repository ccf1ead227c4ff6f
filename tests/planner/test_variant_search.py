"""Variants of remat within a budget: the same is chosen, with less searched."""

from dataclasses import replace
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.options import check_options, resolve_options
from autopar.planner.memory_budget import NO_BUDGET
from autopar.planner.memory_search import Chosen, choose_variant
from autopar.planner.planning import plan_graph, roles_of
from autopar.planner.step_variants import StepVariant, StepVariants
from autopar.plans.parallel_plan import Plan
from tests.planner.deep_step import step

ROWS, WIDTH, NUM_LAYERS = 2048, 64, 3


class Searched:
    """The variants of a small step, searched with cutoffs or without."""

    def __init__(self) -> None:
        kernel = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
        x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
        self.args = [kernel] * NUM_LAYERS, x
        traced = trace(step, self.args, {})
        roles = roles_of(traced)
        self.graph = build_graph(traced, roles)
        self.batch = [i.tensor for i in self.graph.inputs if i.role == "batch"]
        self.variants = StepVariants(traced, self.graph, roles, self.batch)
        self.cluster = Cluster.preset("1x8xH100")
        checked = check_options(mesh="x:8", cluster=self.cluster, remat="auto")
        self.options = resolve_options(step, checked)
        self.free: dict[int, Plan] = {}
        self.cutoffs: list[float] = []

    def chosen(self, budget_bytes: int, *, cuts: bool) -> Chosen:
        def plan_variant(variant: StepVariant, budget: int, cutoff: float) -> Plan:
            graph = variant.graph
            if budget == NO_BUDGET and id(graph) in self.free:
                return self.free[id(graph)]
            if budget < NO_BUDGET:
                self.cutoffs.append(cutoff)
            leaves = jax.tree.leaves(self.args)
            plan = plan_graph(
                *(graph, leaves, self.batch, self.cluster),
                replace(self.options, memory_budget=budget),
                cutoff=cutoff if cuts else inf,
            )
            if budget == NO_BUDGET:
                self.free[id(graph)] = plan
            return plan

        self.cutoffs = []
        ends = budget_bytes, plan_variant
        return choose_variant(self.variants, "auto", None, *ends)


@pytest.mark.slow
def test_cutoffs_leave_the_variant_that_is_chosen() -> None:
    searched = Searched()
    free = searched.chosen(NO_BUDGET - 1, cuts=False)
    budget = int(0.65 * free.plan.predicted.peak_bytes)
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
    leaves = jax.tree.leaves(searched.args)
    place = searched.graph, leaves, searched.batch, searched.cluster, searched.options
    ended = plan_graph(*place, cutoff=1e-9)
    assert ended.predicted.optimality_gap > 1e-4
    best = plan_graph(*place)
    assert best.predicted.optimality_gap <= 1e-4
    assert isinstance(best, autopar.Plan)
