"""The way down to the plan of the least memory: where it aims, and where it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.planner import least_memory as least_memory_module
from autopar.planner.budget_candidates import BudgetCandidates
from autopar.planner.least_memory import LITTLE, NEAR, least_memory
from autopar.planner.planning import roles_of
from autopar.sharding.mesh import parse_mesh
from autopar.solver.choice_graph import Infeasible


class _Met:
    """Rows that rule out all below `bound` bytes; each plan found holds its aim."""

    def __init__(self, first: float, bound: float, work: float) -> None:
        graph = SimpleNamespace(name="step")
        choices = SimpleNamespace(num_choices=1)
        self.problem = SimpleNamespace(graph=graph, choice_graph=choices)
        self.held, self.row_bound, self.work = [first], bound, work
        self.aims: list[float] = []
        self.work_left, self.work_spent = 1e9, 0.0

    def least(self) -> Any:
        return SimpleNamespace(peak_bytes=min(self.held))

    def least_live_bytes(self) -> float:
        return min(self.held)

    def solve(self, limit: float, gap: float) -> Any:
        is_trial = limit <= 1.01 * LITTLE * self.held[0]
        self.work_spent += 0 if is_trial else self.work
        self.aims += [] if is_trial else [limit]
        if limit < self.row_bound:
            raise Infeasible("rows", self.row_bound, least_budget_bound=self.row_bound)
        self.held.append(limit)
        return SimpleNamespace(live_bytes=limit)

    def add_rows(self, found: Any) -> None: ...

    def lower_refuted(self) -> float:
        return 0.0


def ways(first: float, bound: float, enough: int, work: float = 0.0) -> _Met:
    met: Any = _Met(first, bound, work)
    least_memory(met, enough)
    return met


def test_no_step_is_aimed_at_what_is_known_to_be_out_of_reach() -> None:
    met = ways(1000.0, 850.0, 800)
    ruled_out = [aim for aim in met.aims if aim < 850]
    assert len(ruled_out) == 1, "the bound is known then"
    assert 850 <= min(met.held) <= 850 / (1 - NEAR)


def test_it_ends_soon_where_rows_rule_the_budget_out_and_later_where_not() -> None:
    out, may_fit = (ways(1000.0, 500.0, each, work=1e9) for each in (450, 550))
    assert len(out.aims) == len(may_fit.aims) == 1
    out, may_fit = (ways(1000.0, 500.0, each, work=11.0) for each in (450, 550))
    assert len(out.aims) == 2 and min(may_fit.held) <= 550
    assert may_fit.aims[: len(out.aims)] == out.aims, "one way, whatever the budget"


def small_step(w: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def loss(w: Any) -> jax.Array:
        y = x
        for each in w:
            y = jnp.tanh(y @ each)
        return (y * y).mean()

    value, gradients = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradients), value


def candidates(budget: int) -> BudgetCandidates:
    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    traced = trace(small_step, ((spec,) * 4, spec), {})
    graph = build_graph(traced, roles_of(traced))
    place = graph, parse_mesh("x:8"), Cluster.preset("8xH100")
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    return BudgetCandidates(*place, budget, batch, {}, 1e-4)


@pytest.mark.parametrize("most_work", [0.0, 20.0])
def test_what_a_short_way_names_is_planned(
    monkeypatch: pytest.MonkeyPatch, most_work: float
) -> None:
    monkeypatch.setattr(least_memory_module, "RULED_OUT_WORK", most_work)
    monkeypatch.setattr(least_memory_module, "FAR_BELOW", 1e9)
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        candidates(10_000).best()
    least = raised.value.least_budget_bytes
    assert least is not None
    assert candidates(least).best().plan.predicted.peak_bytes <= least
