"""Compile in the loop: what programs were seen to hold decides, and corrects."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partialmethod
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autopar
from autopar.errors import InfeasiblePlanError
from autopar.lowering.memory_use import MemoryUse
from autopar.options import Options
from autopar.planner import planning
from autopar.planner.fit import MOST_CORRECTIONS
from autopar.planner.planned import Planned
from autopar.planner.planning import plan_step, plan_traced
from autopar.planner.whole_step import trace_whole
from autopar.plans.staged_plan import sharding_of
from autopar.steps.parallel_plan import Plan
from benchmarks.models import build
from tests.rows.test_fairscale import f2


def planned_options() -> Options:
    return autopar.parallelize(lambda x: x, mesh="x:8")._options


@cache
def planned() -> Planned:
    """Any plan; what its program holds is made up by the tests."""
    options = planned_options()
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    whole = trace_whole(lambda x: (x @ x).sum(), (x,), {}, options)
    return plan_traced(whole, options)


def of_peak(peak_bytes: int) -> Planned:
    found = planned().plan
    predicted = replace(found.predicted, peak_bytes=peak_bytes)
    return replace(planned(), plan=replace(found, predicted=predicted))


@dataclass
class Modelled:
    """A planner whose plans hold what is made up, as predicted and as compiled.

    `predicts` [budget] is what the plan found is predicted to hold, `holds` [predicted]
    what its program does. Nothing is found below the `least`, which an error names.
    """

    holds: Callable[[int], int]
    predicts: Callable[[int], int] = lambda budget: budget
    least: int = 0
    zero: int = 0  # of a named method, if there is one
    asked: list[int] = field(default_factory=list)
    compiled: list[int] = field(default_factory=list)

    def plan_traced(self, _: Any, options: Options) -> Planned:
        if options.plan is not None:
            return replace(planned(), plan=sharding_of(options.plan))
        if isinstance(options.method, autopar.Zero):
            if self.zero:
                return of_peak(self.zero)
            raise ValueError("the batch is not split evenly")
        budget = options.memory_budget or 0
        self.asked.append(budget)
        if budget >= self.least:
            return of_peak(self.predicts(budget))
        error = InfeasiblePlanError("nothing is predicted to fit", self.least)
        error.largest_users = "  1 B  x"
        error.least_plan = of_peak(self.least).plan
        raise error

    def compiled_bytes(self, planned: Planned, _: float) -> int:
        self.compiled.append(planned.plan.predicted.peak_bytes)
        return self.holds(planned.plan.predicted.peak_bytes)

    def within(self, budget: int) -> Planned:
        options = replace(planned_options(), memory_budget=budget)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "plan_traced", self.plan_traced)
            patch.setattr(Planned, "compiled_bytes", partialmethod(compiled_of, self))
            return plan_step(lambda x: x, (1.0,), {}, options)


def compiled_of(planned: Planned, model: Modelled, limit_seconds: float) -> int:
    return model.compiled_bytes(planned, limit_seconds)


@pytest.mark.parametrize("seen", [700, 900, 1000])
def test_a_prediction_is_not_read_back_from_its_program(seen: int) -> None:
    predicted = Modelled(lambda _: seen, lambda _: 800).within(1000).plan.predicted
    assert predicted.peak_bytes == 800
    assert predicted.memory_correction == 1
    assert predicted.budget_bytes == 1000


def test_the_budget_is_lowered_by_the_error_seen() -> None:
    """The model is a fifth too low; its second plan uses all that it was given."""
    model = Modelled(lambda predicted: round(predicted * 1.2))
    found = model.within(1000)
    assert model.asked == [1000, 833]
    assert found.plan.predicted.peak_bytes == 1000  # 833 times 1.2
    assert found.plan.predicted.budget_bytes == 1000


def test_a_compiler_that_refuses_a_program_says_what_it_would_hold() -> None:
    def holds(predicted: int) -> int:
        if predicted > 900:
            raise InfeasiblePlanError("1.2K of 1.0K", round(predicted * 1.2))
        return predicted

    model = Modelled(holds)
    assert model.within(1000).plan.predicted.budget_bytes == 1000
    assert model.asked == [1000, 833]


def test_zero_is_taken_where_nothing_else_fits_as_compiled() -> None:
    model = Modelled(lambda predicted: 990 if predicted == 1200 else 1100, zero=1200)
    assert model.within(1000).plan.predicted.peak_bytes == 1000
    model.zero = 1300
    with pytest.raises(InfeasiblePlanError, match="least of those compiled"):
        model.within(1000)


def test_what_is_far_below_a_named_budget_is_compiled_too() -> None:
    """What no model counts may be more than the rest."""
    model = Modelled(lambda predicted: predicted + 700, lambda budget: budget * 2 // 5)
    assert model.within(1000).plan.predicted.peak_bytes <= 1000
    assert model.compiled == [400, 145]


def test_programs_that_never_fit_are_refused_with_the_least_seen() -> None:
    """The budget falls at each of them, by a little at least."""
    seen = iter([1500, 1300, 1400, 1350, 1320])
    model = Modelled(lambda _: next(seen))
    with pytest.raises(InfeasiblePlanError, match="give memory_budget=1300") as raised:
        model.within(1000)
    assert raised.value.least_budget_bytes == 1300
    assert len(model.compiled) == len(model.asked) == 1 + MOST_CORRECTIONS
    assert model.asked == sorted(set(model.asked), reverse=True)


def test_the_least_plan_is_compiled_where_none_is_predicted_to_fit() -> None:
    """Its program holds less than is said of it, by the error of no other plan."""
    model = Modelled({1100: 980}.__getitem__, lambda _: 1100, least=1100)
    found = model.within(1000).plan.predicted
    assert found.peak_bytes == 980
    assert found.budget_bytes == 1000


def test_the_least_plan_is_compiled_after_corrections() -> None:
    """What another program holds above its prediction does not tell of this one."""
    model = Modelled({1000: 1200, 900: 980}.__getitem__, least=900)
    assert model.within(1000).plan.predicted.peak_bytes <= 1000
    assert model.compiled == [1000, 900]


def test_a_least_plan_that_does_not_fit_is_refused_with_its_users() -> None:
    model = Modelled({1000: 1200, 900: 1010}.__getitem__, least=900)
    refusal = r"memory_budget=1010,.*\nMost .*\n  1 B  x"
    with pytest.raises(InfeasiblePlanError, match=refusal) as raised:
        model.within(1000)
    assert raised.value.least_budget_bytes == 1010


@pytest.mark.parametrize(("quicker", "is_taken"), [(990, True), (1010, False)])
def test_a_quicker_plan_is_tried_once_the_error_of_the_least_is_known(
    quicker: int, *, is_taken: bool
) -> None:
    """Within 1000, as 800 of the 1100 predicted of the least plan are held."""
    model = Modelled({1100: 800, 1300: quicker}.__getitem__, lambda _: 1300, 1100)
    found = model.within(1000)
    assert model.asked == [1000, 1375]
    assert model.compiled == [1100, 1300]
    expected = 1300 if is_taken else 1100
    assert found.plan.predicted.peak_bytes == round(expected * 800 / 1100)


def test_a_least_plan_far_above_the_budget_is_not_compiled() -> None:
    model = Modelled(lambda predicted: predicted, least=2100)
    with pytest.raises(InfeasiblePlanError, match="nothing is predicted to fit"):
        model.within(1000)
    assert model.compiled == []


def test_a_model_that_is_too_low_does_not_break_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs that hold a tenth more than they do are refused."""
    case = f2(optax.adam(1e-2))
    options: dict[str, Any] = {"mesh": "x:8", "method": autopar.DataParallel()}
    compiled = autopar.parallelize(case.step, **options).lower(*case.args).compile()
    use_of = MemoryUse.of
    held = int(1.1 * use_of(compiled.compiled).device_bytes)
    said = compiled.plan.predicted.peak_bytes
    assert 0.75 * held < said < held

    def more(compiled: jax.stages.Compiled, host_bytes: int = 0) -> MemoryUse:
        return MemoryUse(int(1.1 * use_of(compiled, host_bytes).device_bytes), 0, 0, 0)

    monkeypatch.setattr(MemoryUse, "of", more)

    def within(budget: int) -> Plan:
        step = autopar.parallelize(case.step, memory_budget=budget, **options)
        return step.plan(*case.args)

    with pytest.raises(InfeasiblePlanError) as raised:
        within((held + said) // 2)
    least = raised.value.least_budget_bytes or 0
    assert (held + said) // 2 < least <= held
    assert f"memory_budget={least}," in str(raised.value)
    assert within(least).predicted.peak_bytes <= least


@pytest.mark.slow
def test_what_is_predicted_not_to_fit_is_compiled_before_it_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs that hold four fifths of what they do leave more room."""
    case = f2(optax.adam(1e-2))
    held = MemoryUse.of

    def less(compiled: jax.stages.Compiled, host_bytes: int = 0) -> MemoryUse:
        seen = held(compiled, host_bytes)
        return MemoryUse(int(0.8 * seen.device_bytes), 0, 0, 0)

    def within(budget: int) -> Plan:
        step = autopar.parallelize(case.step, mesh="x:8", memory_budget=budget)
        return step.plan(*case.args)

    def least(budget: int) -> int:
        with pytest.raises(InfeasiblePlanError) as raised:
            within(budget)
        return raised.value.least_budget_bytes or 0

    free = autopar.parallelize(case.step, mesh="x:8").plan(*case.args)
    as_it_is = least(int(0.72 * free.predicted.peak_bytes))
    monkeypatch.setattr(MemoryUse, "of", less)
    compiled = least(int(0.7 * as_it_is))
    assert 0.7 * as_it_is < compiled < as_it_is
    assert within(compiled).predicted.peak_bytes <= compiled


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


def _small(memory_bytes: int) -> autopar.Cluster:
    """Two GPUs that hold less."""
    cluster = autopar.Cluster.preset("1x2xA100")
    return replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))


@pytest.mark.parametrize(
    ("part", "method"), [(0.7, autopar.ShardParallel()), (0.01, autopar.Auto())]
)
def test_where_devices_hold_too_little_the_plan_of_least_memory_is_given_with_a_warning(
    part: float, method: autopar.ShardParallel | autopar.Auto
) -> None:
    workload = build("mlp", num_layers=1)
    args = workload.abstract()
    objective = autopar.ShardParallel(objective="memory")
    large = _small(10**12)
    step = autopar.parallelize(workload.step, cluster=large, method=objective)
    least = step.plan(*args).predicted.peak_bytes
    cluster = _small(int(part * least / 0.92))
    step = autopar.parallelize(workload.step, cluster=cluster, method=method)
    with pytest.warns(UserWarning, match="may run out of memory"):
        plan = step.plan(*args)
    predicted = plan.predicted
    assert 0 < predicted.budget_bytes < predicted.peak_bytes <= 1.05 * least
    step = autopar.parallelize(
        workload.step, cluster=cluster, method=method, memory_budget=int(part * least)
    )
    with pytest.raises(InfeasiblePlanError):
        step.plan(*args)


def test_a_cluster_that_is_not_here_is_compiled_for_and_the_plan_corrected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler says that what it is given first needs twice what is predicted."""
    workload = build("mlp", num_layers=1)
    args = workload.abstract()
    cluster = autopar.Cluster.preset("v5e:2x2")
    free = autopar.parallelize(workload.step, cluster=cluster).plan(*args)
    budget = int(1.5 * free.predicted.peak_bytes)
    predictions: list[int] = []

    def compiled_bytes(planned: Planned, _: float) -> int:
        predictions.append(planned.plan.predicted.peak_bytes)
        return 2 * predictions[-1]

    monkeypatch.setattr(Planned, "compiled_bytes", compiled_bytes)
    step = autopar.parallelize(workload.step, cluster=cluster, memory_budget=budget)
    given = workload.step, args, {}, step.options
    assert plan_step(*given).plan.predicted.memory_correction == 1.0
    assert not predictions
    planned = plan_step(*given, elsewhere_seconds=60.0).plan.predicted
    assert len(predictions) == 2
    assert planned.memory_correction == pytest.approx(2.0, rel=0.01)
    assert predictions[1] <= budget / 2 < predictions[0]
