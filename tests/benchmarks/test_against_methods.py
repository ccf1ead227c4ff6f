"""The sweep of the solver's choice beside named methods: what it counts and finds."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.against_methods import (
    MODELS,
    RING,
    SEARCHED,
    Case,
    Named,
    cases,
    summary,
)

FAST, SMALL = Named("fast", 1.0, 100), Named("small", 3.0, 10)
REFUSED = Named("none", refused="dim 3 has no such size")


def case(
    seconds: float | None = 2.0, gap: float = 0.0, budget: int | None = None
) -> Case:
    return Case("mlp", "x:8", budget, seconds, 50, gap, (SMALL, FAST, REFUSED))


def test_a_faster_method_that_fits_is_a_violation() -> None:
    assert case().violations == (FAST,)
    assert case(seconds=1.0).violations == ()
    assert "**VIOLATION**" in str(case())
    assert "fast takes" in summary([case()])


def test_a_method_counts_only_where_it_fits() -> None:
    within = case(budget=50)
    assert within.violations == within.faster == ()
    assert within.fitting == (SMALL,)
    assert "| 1 / 1 / 1 |" in str(within)


def test_within_the_stated_gap_a_method_may_be_faster_and_is_told() -> None:
    near = case(seconds=1.01, gap=0.02)
    assert near.violations == () and near.faster == (FAST,)
    assert "within the gap, or a ring" in str(near)
    assert case(seconds=1.01, gap=0.005).violations == (FAST,)


def test_a_ring_is_another_program() -> None:
    found = replace(case(), named=(SMALL, Named(RING, 1.0, 100)))
    assert found.violations == () and len(found.faster) == 1
    assert "as a ring, in 1" in summary([found])


def test_nothing_chosen_where_a_method_fits_is_a_violation() -> None:
    assert case(seconds=None, budget=50).violations == (SMALL,)
    assert case(seconds=None, budget=5).violations == ()


def test_refusals_are_counted_by_their_reason() -> None:
    text = summary([case(), replace(case(), mesh="x:2;y:4")])
    assert "2 times none: dim # has no such size" in text


def test_no_method_is_faster_than_the_choice() -> None:
    """Small enough for every run; the slow test has the whole zoo."""
    found = list(cases("mlp", "x:8", (0.7,), num_layers=2))
    for each in found:
        assert not each.violations, str(each)
        assert each.ratio is not None and each.ratio >= 1 - each.gap
    free, within = found
    assert len(free.fitting) >= 7
    assert within.budget_bytes is not None
    assert within.peak_bytes <= within.budget_bytes < free.peak_bytes
    assert (free.fraction, within.fraction) == (None, 0.7)
    assert 0 < free.cpu_seconds < within.cpu_seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh"), [*((model, "x:2;y:4") for model in MODELS), ("gpt", SEARCHED)]
)
def test_no_method_is_faster_for_any_model(model: str, mesh: str) -> None:
    """One layer where layers repeat, and no budget: budgets take minutes a model."""
    layered = MODELS[model][0] in ("gpt", "bert", "llama", "moe", "vit")
    options: dict[str, Any] = {}
    if layered:
        options["num_layers"] = 1 + (model == "moe")
    for each in cases(model, mesh, (), **options):
        assert not each.violations, str(each)
        assert each.fitting
