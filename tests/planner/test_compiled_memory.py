"""Compile in the loop: what programs were seen to hold decides, and corrects."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.audit import compiled_memory
from autopar.audit.compiled_memory import (
    MOST_CORRECTIONS,
    fit_compiled,
    plan_fitting,
)
from autopar.audit.memory_use import MemoryUse
from autopar.errors import InfeasiblePlanError
from autopar.options import Options
from autopar.planner.planning import Planned, plan_function
from autopar.plans.parallel_plan import Plan
from tests.rows.test_fairscale import f2


def planned_options() -> Options:
    return autopar.parallelize(lambda x: x, mesh="x:8")._options


@cache
def planned() -> Planned:
    """Any plan; what its program holds is made up by the tests."""
    options = planned_options()
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return plan_function(lambda x: (x @ x).sum(), (x,), {}, options)


def of_peak(peak_bytes: int) -> Planned:
    found = planned().plan.sharding
    predicted = replace(found.predicted, peak_bytes=peak_bytes)
    return replace(planned(), plan=Plan(replace(found, predicted=predicted)))


@pytest.mark.parametrize("seen", [700, 900, 1000])
def test_a_prediction_is_not_read_back_from_its_program(seen: int) -> None:
    found = fit_compiled(of_peak(800), 1000, lambda _: seen, of_peak)
    assert found.plan.predicted.peak_bytes == 800
    assert found.plan.predicted.memory_correction == 1
    assert found.plan.predicted.budget_bytes == 1000


def test_the_budget_is_lowered_by_the_error_seen() -> None:
    """The model is a fifth too low; its second plan uses all that it was given."""
    asked: list[int] = []

    def plan_again(budget_bytes: int) -> Planned:
        asked.append(budget_bytes)
        return of_peak(budget_bytes)

    found = fit_compiled(
        *(of_peak(1000), 1000, lambda p: round(p.plan.predicted.peak_bytes * 1.2)),
        plan_again,
    )
    assert asked == [833]
    assert found.plan.predicted.peak_bytes == 1000  # 833 times 1.2


def test_what_is_far_below_the_budget_is_not_compiled() -> None:
    def compiled_bytes(_: Planned) -> int:
        raise AssertionError("compiled")

    found = fit_compiled(of_peak(400), 1000, compiled_bytes, of_peak)
    assert found.plan.predicted.peak_bytes == 400


def test_programs_that_never_fit_are_refused_with_the_least_seen() -> None:
    seen = iter([1500, 1300, 1400, 1350, 1320])
    with pytest.raises(InfeasiblePlanError, match="give memory_budget=1300") as raised:
        fit_compiled(of_peak(1000), 1000, lambda _: next(seen), of_peak)
    assert raised.value.least_budget_bytes == 1300
    assert next(seen, None) is None and MOST_CORRECTIONS == 3


@pytest.mark.parametrize("holds", [950, 1250])
def test_the_least_plan_is_tried_where_corrections_do_not_help(holds: int) -> None:
    """Every program is above the budget by a byte."""
    asked: list[int] = []

    def plan_again(budget_bytes: int) -> Planned:
        asked.append(budget_bytes)
        if budget_bytes < 600:
            error = InfeasiblePlanError("nothing", 650)
            error.largest_users = "  1 B  x"
            raise error
        return of_peak(budget_bytes)

    def compiled_bytes(planned: Planned) -> int:
        peak_bytes = planned.plan.predicted.peak_bytes
        return holds if peak_bytes == 650 else max(1001, round(1.3 * peak_bytes))

    def search() -> Planned:
        start, least = of_peak(1000), lambda _: of_peak(650)
        return fit_compiled(start, 1000, compiled_bytes, plan_again, least)

    if holds < 1000:
        assert search().plan.predicted.peak_bytes == round(650 * 1.3051)
    else:
        with pytest.raises(
            InfeasiblePlanError, match=r"memory_budget=1001,.*\nMost .*\n  1 B  x"
        ):
            search()
    assert asked == [769, 768, 767, 500]


def test_a_model_that_is_too_low_does_not_break_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs that hold a hundredth more than is said of them are refused."""
    case = f2(optax.adam(1e-2))
    data_parallel = autopar.DataParallel()
    free = autopar.parallelize(case.step, mesh="x:8", method=data_parallel)
    compiled = free.lower(*case.args).compile()
    use_of = MemoryUse.of
    held = int(1.01 * use_of(compiled.compiled).device_bytes)
    said = compiled.plan.predicted.peak_bytes
    assert 0.98 * held < said < held

    def more(compiled: jax.stages.Compiled, host_bytes: int = 0) -> MemoryUse:
        return MemoryUse(int(1.01 * use_of(compiled, host_bytes).device_bytes), 0, 0, 0)

    monkeypatch.setattr(MemoryUse, "of", more)

    def within(budget: int) -> Plan:
        step = autopar.parallelize(
            case.step, mesh="x:8", method=data_parallel, memory_budget=budget
        )
        return step.plan(*case.args)

    for too_little in ((held + said) // 2, said - 1):
        with pytest.raises(InfeasiblePlanError) as raised:
            within(too_little)
        assert raised.value.least_budget_bytes == held
        assert f"memory_budget={held}," in str(raised.value)
    assert within(held).predicted.peak_bytes == said


@pytest.mark.slow
def test_what_is_predicted_not_to_fit_is_compiled_before_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs that hold four fifths of what is said of them leave more room."""
    case = f2(optax.adam(1e-2))
    held = MemoryUse.of

    def less(compiled: jax.stages.Compiled, host_bytes: int = 0) -> MemoryUse:
        seen = held(compiled, host_bytes)
        return MemoryUse(int(0.8 * seen.device_bytes), 0, 0, 0)

    monkeypatch.setattr(MemoryUse, "of", less)

    def within(budget: int) -> Plan:
        step = autopar.parallelize(case.step, mesh="x:8", memory_budget=budget)
        return step.plan(*case.args)

    def least(budget: int) -> int:
        with pytest.raises(InfeasiblePlanError) as raised:
            within(budget)
        return raised.value.least_budget_bytes or 0

    predicted = least(1)  # so far below that nothing is compiled
    assert within(int(0.9 * predicted)).predicted.peak_bytes <= 0.9 * predicted
    compiled = least(int(0.7 * predicted))
    assert 0.7 * predicted < compiled < predicted
    assert within(compiled).predicted.peak_bytes <= compiled


def test_the_least_plan_is_tried_where_none_is_predicted_to_fit() -> None:
    """Its program is less than the error of another plan makes of it."""
    seen = {1000: 1200, 900: 980}

    def plan_again(budget_bytes: int) -> Planned:
        raise InfeasiblePlanError(f"nothing below {budget_bytes}", 900)

    found = fit_compiled(
        *(of_peak(1000), 1000, lambda p: seen[p.plan.predicted.peak_bytes]),
        *(plan_again, lambda _: of_peak(900)),
    )
    assert found.plan.predicted.peak_bytes == 1000


def test_the_least_plan_is_tried_also_where_more_is_predicted_of_it() -> None:
    """Of unlike plans the model's errors are unlike: only programs tell."""
    seen = {1000: 1500, 1100: 980, 1200: 1010}

    def within(budget: int, least: int) -> Planned:
        def plan_again(_: int) -> Planned:
            raise InfeasiblePlanError("nothing", least)

        return fit_compiled(
            *(of_peak(1000), budget, lambda p: seen[p.plan.predicted.peak_bytes]),
            *(plan_again, lambda _: of_peak(least)),
        )

    assert within(1000, 1100).plan.predicted.peak_bytes == 1000
    with pytest.raises(InfeasiblePlanError, match="give memory_budget=1010,"):
        within(1000, 1200)


@pytest.mark.parametrize(
    ("cheapest", "seen"),
    [(1050, {1100: 1000, 1050: 1010}), (1300, {1300: 1000, 1100: 1200})],
    ids=["the least, as a raised budget finds worse", "the cheapest, predicted higher"],
)
def test_of_the_least_plan_and_the_cheapest_the_one_that_holds_less_is_taken(
    cheapest: int, seen: Mapping[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are compiled before anything is refused.

    `cheapest` is what the plan is predicted to hold that is found where it fits, 1100
    is that of the least plan; `seen` is what their programs hold.
    """

    def plan_together(*given: Any) -> Planned:
        options: Options = given[3]
        if options.plan is not None:
            return replace(planned(), plan=options.plan)
        if (options.memory_budget or 0) >= cheapest:
            return of_peak(cheapest)
        error = InfeasiblePlanError("nothing is predicted to fit", 1100)
        error.least_plan = of_peak(1100).plan.sharding
        raise error

    def program_of(planned: Planned) -> Any:
        peak = planned.plan.predicted.peak_bytes
        return SimpleNamespace(compile=lambda: peak, host_bytes=0)

    monkeypatch.setattr(compiled_memory, "plan_together", plan_together)
    monkeypatch.setattr(MemoryUse, "of", lambda peak, _: MemoryUse(seen[peak], 0, 0, 0))

    def within(budget: int) -> Planned:
        options = replace(planned_options(), memory_budget=budget)
        return plan_fitting(lambda x: x, (), {}, options, program_of)

    assert within(1000).plan.predicted.peak_bytes == min(seen.values())
    with pytest.raises(InfeasiblePlanError, match="give memory_budget=1000,"):
        within(999)


def test_a_plan_that_is_the_least_too_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[int] = []

    def plan_together(*given: Any) -> Planned:
        options: Options = given[3]
        if options.plan is not None:
            return replace(planned(), plan=options.plan)
        if options.memory_budget == 1000:
            return of_peak(1000)
        error = InfeasiblePlanError("nothing is predicted to fit", 1000)
        least = of_peak(1000).plan.sharding
        proved = replace(least.predicted, optimality_gap=0.5)
        error.least_plan = replace(least, predicted=proved)
        raise error

    def program_of(planned: Planned) -> Any:
        compiled.append(planned.plan.predicted.peak_bytes)
        return SimpleNamespace(compile=lambda: None, host_bytes=0)

    monkeypatch.setattr(compiled_memory, "plan_together", plan_together)
    monkeypatch.setattr(MemoryUse, "of", lambda *_: MemoryUse(1200, 0, 0, 0))
    options = replace(planned_options(), memory_budget=1000)
    with pytest.raises(InfeasiblePlanError, match="give memory_budget=1200,"):
        plan_fitting(lambda x: x, (), {}, options, program_of)
    assert compiled == [1000]


@pytest.mark.slow
def test_what_recomputes_and_needs_the_least_is_compiled_as_it_is() -> None:
    """A refused step with `remat="auto"` names the least of what it makes again."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            y = x
            for _ in range(4):
                y = jnp.tanh(jnp.sin(y @ w))
            return (y * y).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value

    args = jnp.ones((64, 64)), jnp.ones((512, 64))
    held = MemoryUse.of(
        autopar.parallelize(step, mesh="x:8", remat="full")
        .lower(*args)
        .compile()
        .compiled
    ).device_bytes
    again = autopar.parallelize(
        step, mesh="x:8", remat="auto", memory_budget=int(0.6 * held)
    )
    with pytest.raises(InfeasiblePlanError, match="A compiled program must fit"):
        again.plan(*args)
