"""Plans near the best one that fits: cheaper, and within by the model's own word."""

from autopar.planner.near_plans import improve_near
from tests.planner.test_met_plans import met_plans, resnet


def test_near_a_method_cheaper_plans_fit_by_the_model() -> None:
    zero = resnet()[-1]
    budget = met_plans(0).see(zero).live_bytes
    met = met_plans(budget)
    met.meet_start(zero)
    start = met.cheapest(budget)
    assert start is not None
    gap = 1 - met.bound(budget, start) / start.assignment.cost
    best = improve_near(met, budget, 0.9 * gap)
    assert best is not None and best is met.cheapest(budget)
    assert best.assignment.cost <= 0.99 * start.assignment.cost
    assert met.look_at(best.assignment).live_bytes <= budget
    assert max(row.used(best.choices) for row in met.rows) <= budget * (1 + 1e-9)


def test_near_nothing_that_fits_nothing_is_found() -> None:
    met = met_plans(1)
    assert improve_near(met, 1, 0.0) is None
    assert len(met.plans) == 1
