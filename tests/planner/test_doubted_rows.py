"""Rows that say too much of plans that were not met are doubted, and refuted."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.planner import budget_search
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.plan_within import plan_within_binding
from autopar.planner.planning import roles_of
from autopar.sharding.mesh import parse_mesh
from benchmarks.models import build
from tests.planner.test_met_plans import met_plans, resnet


def test_doubted_rows_are_exact_of_their_own_plan_and_say_less_of_others() -> None:
    met = met_plans(0)
    free, zero = met.plans[0], met.see(resnet()[-1])
    for row, doubted in zip(met.rows, met.doubted_rows(0.2), strict=True):
        own = row.used(free.array)
        assert doubted.used(free.array) == pytest.approx(own)
        said = row.used(zero.array)
        differing = free.array[row.index] != zero.array[row.index]
        held = np.where(differing, row.held(zero.array), 0.0).sum()
        assert doubted.used(zero.array) == pytest.approx(said - 0.2 * held)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.84, 0.68])
def test_a_plan_that_fits_though_rows_rule_it_out_is_found(
    part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without doubts the gap that is told rules that plan out."""
    workload = build("mlp")
    traced = trace(workload.step, workload.abstract(), {})
    place = build_graph(traced, roles_of(traced)), parse_mesh("x:8"), Cluster.local()
    budget = int(part * plan_intra_op(*place).plan.predicted.peak_bytes)
    found = plan_within_binding(*place, budget)
    monkeypatch.setattr(budget_search, "meet_doubted", lambda _, best, *__: best)
    without = plan_within_binding(*place, budget)
    assert found.plan.predicted.peak_bytes <= budget
    assert found.assignment.cost < 0.98 * without.assignment.cost
    assert found.assignment.cost < without.assignment.bound
    assert found.assignment.gap <= budget_search.BUDGET_GAP
