"""Plans near the best one that fits: cheaper, and within by the model's own word."""

import math

import pytest

from autopar.planner import packed_plans
from autopar.planner.near_plans import improve_near
from autopar.planner.packed_plans import fit_near
from tests.planner.test_met_plans import met_plans, resnet


@pytest.mark.slow
def test_near_a_method_cheaper_plans_fit_by_the_model() -> None:
    zero = resnet()[-1]
    budget = met_plans(0).see(zero).peak_bytes
    met = met_plans(budget)
    met.meet_start(zero)
    start = met.fitting(budget)
    assert start is not None
    gap = 1 - met.bound(budget, start) / start.assignment.cost
    best = improve_near(met, budget, 0.9 * gap)
    assert best is not None and best is met.fitting(budget)
    assert best.assignment.cost <= 0.99 * start.assignment.cost
    assert met.look_at(best.assignment).peak_bytes <= budget
    assert met.said(best, packed=True) <= budget * (1 + 1e-9)


def test_near_nothing_that_fits_nothing_is_found() -> None:
    met = met_plans(1)
    assert improve_near(met, 1, 0.0) is None
    assert len(met.plans) == 1


def test_near_a_plan_that_needs_more_than_is_live_others_fit() -> None:
    met = met_plans(math.inf)
    zero, above = met.see(resnet()[-1]), met.plans[0]
    budget = above.peak_bytes - 1
    assert zero.peak_bytes <= budget and above.live_bytes < above.peak_bytes
    best = fit_near(met, above, budget, 0.0)
    assert best is not None and best is met.fitting(budget)
    assert best.assignment.cost < 0.9 * zero.assignment.cost
    assert met.look_at(best.assignment).peak_bytes <= budget


def test_once_a_plan_fits_none_above_the_cutoff_is_looked_for() -> None:
    met = met_plans(math.inf)
    zero, above = met.see(resnet()[-1]), met.plans[0]
    place = met, above, above.peak_bytes - 1
    assert fit_near(*place, 0.0, cutoff=above.assignment.cost) is zero


def test_a_plan_that_fits_packed_is_left_as_it_is() -> None:
    met = met_plans(math.inf)
    above = met.plans[0]
    assert fit_near(met, above, above.peak_bytes, 0.0) is above
    assert len(met.plans) == 1


def test_large_problems_are_not_searched_for_what_fits_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_plans, "MOST_NODES", 0)
    met = met_plans(math.inf)
    above = met.plans[0]
    assert fit_near(met, above, above.peak_bytes - 1, 0.0) is None
    assert len(met.plans) == 1
