"""Predicted memory beside that of compiled programs, as the benchmark says it."""

import pytest

from benchmarks.memory_error import MODELS, Measurement, measure


def test_a_plan_is_corrected_by_the_error_of_another_program() -> None:
    seen = Measurement("mlp", "x:8", 100, 88, 92, 96, 10, 0.0, correction=1.1)
    assert seen.ratio == pytest.approx(88 / 96)
    assert seen.corrected_ratio == pytest.approx(1.1 * 88 / 96)
    assert "| 0.917 | 1.008 | 0.958 |" in str(seen) and not seen.is_above


def test_a_program_above_its_budget_is_told() -> None:
    above = Measurement("mlp", "x:8", 95, 88, 92, 96, 10, 0.0)
    assert above.is_above and "above the budget" in str(above)
    assert not Measurement("mlp", "x:8", 0, 88, 92, 96, 10, 0.0).is_above


def test_without_budgets_the_free_plan_is_measured_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MODELS, "small", ("mlp", {"num_layers": 2}))
    (free,) = measure("small", "x:8", [])
    assert not free.correction and not free.budget_bytes
    assert free.ratio == pytest.approx(1, abs=0.25)


@pytest.mark.slow
def test_the_free_plan_corrects_that_within_a_budget() -> None:
    free, within = measure("mlp", "x:8", [0.8])
    assert not free.correction and not free.budget_bytes
    assert within.correction == pytest.approx(
        free.compiled_bytes / free.predicted_bytes
    )
    assert within.compiled_bytes <= within.budget_bytes < free.compiled_bytes
    assert within.corrected_ratio == pytest.approx(1, abs=0.15)


def test_every_model_of_the_zoo_is_there() -> None:
    names = {name for name, _ in MODELS.values()}
    assert {"t5", "moe", "unet", "llama"} <= names
