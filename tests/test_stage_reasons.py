"""Why a stage of a pipeline chose as it did: the runner-up, its price, that it runs."""

from dataclasses import replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.clusters.cluster import Cluster
from autopar.costs import memory
from autopar.planner.reasons import Alternative, Reasons
from autopar.plans.staged_plan import StagedPlan
from autopar.sharding.spec import to_partition_spec
from autopar.steps.parallel_plan import Plan
from tests.rows.fixtures import Case, random
from tests.rows.running import run_pipeline_as_planned

LAST = "state[0][1]"
METHOD = autopar.PipelineParallel(num_stages=2, num_microbatches=8)


def planned(case: Case, **options: Any) -> Plan:
    options = {"mesh": "x:4", "method": METHOD} | options
    return autopar.parallelize(case.step, **options).plan(*case.args)


def momentum() -> Case:
    """Two layers, whose sums of gradients only the update reads."""

    def step(state: Any, x: jax.Array) -> Any:
        layers, sums = state

        def loss(layers: list[jax.Array]) -> jax.Array:
            hidden = x
            for layer in layers:
                hidden = jnp.tanh(hidden @ layer)
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(layers)
        sums = [0.9 * s + g for s, g in zip(sums, grads, strict=True)]
        layers = [w - 0.1 * s for w, s in zip(layers, sums, strict=True)]
        return (layers, sums), value

    layers = [random(i, 64, 64, scale=0.125) for i in range(2)]
    zeros = [jnp.zeros((64, 64))] * 2
    return Case(step, ((layers, zeros), random(9, 32, 64)))


@lru_cache
def plan_of_momentum() -> Plan:
    return planned(momentum())


def program_of(plan: Plan, stage: int, kind: str) -> int:
    programs = [(each.stage, each.kind) for each in plan.stages.programs]
    return programs.index((stage, kind))


def tensor_reasons(plan: Plan, stage: int, kind: str, name: str) -> Reasons:
    assert plan.source is not None
    program = program_of(plan, stage, kind)
    tensors = plan.stages.programs[program].sharding.tensors
    index = [tensor.name for tensor in tensors].index(name)
    return plan.source.tensor_reasons(plan.stages, index, program)


def staged(alternative: Alternative) -> StagedPlan:
    assert isinstance(alternative.plan, StagedPlan)
    return alternative.plan


def spec_of(plan: StagedPlan, stage: int, kind: str, name: str) -> Any:
    program = plan.programs[program_of(Plan(plan), stage, kind)].sharding
    return next(each.spec for each in program.tensors if each.name == name)


def assert_other_stages_stay(one: StagedPlan, other: StagedPlan, stage: int) -> None:
    for before, after in zip(one.programs, other.programs, strict=True):
        assert before.stage == stage or before == after


def test_the_runner_up_of_a_leaf_is_the_best_of_all_other_specs() -> None:
    plan, name = plan_of_momentum(), LAST
    (runner_up,) = tensor_reasons(plan, 1, "forward", name).alternatives
    own = spec_of(plan.stages, 1, "forward", name)
    others = [(-1,), (0,), (1,)]
    others.remove(own)
    pins = [{name: to_partition_spec(spec, 2, ("x",))} for spec in others]
    found = [plan.what_if(pin).stages for pin in pins]
    best = min(found, key=lambda each: each.predicted.step_seconds)
    assert staged(runner_up).predicted.step_seconds == pytest.approx(
        best.predicted.step_seconds, rel=1e-6
    )
    for kind in ("forward", "backward", "apply"):
        assert spec_of(staged(runner_up), 1, kind, name) == (
            spec_of(best, 1, kind, name)
        )
    assert_other_stages_stay(plan.stages, staged(runner_up), 1)


def test_an_operator_of_a_program_is_split_otherwise_and_the_plan_runs() -> None:
    case, plan, stage, kind = momentum(), plan_of_momentum(), 1, "backward"
    program = program_of(plan, stage, kind)
    operators = plan.stages.programs[program].sharding.operators
    index = next(i for i, op in enumerate(operators) if op.kind == "dot_general")
    assert plan.source is not None
    reasons = plan.source.operator_reasons(plan.stages, index, program)
    (runner_up,) = reasons.alternatives
    found = staged(runner_up)
    factors = found.programs[program].sharding.operators[index].factors
    assert factors != operators[index].factors
    assert runner_up.choice == f"x {factors[0]}"
    assert found.predicted.step_seconds >= plan.predicted.step_seconds * (1 - 2e-4)
    assert_other_stages_stay(plan.stages, found, stage)
    run_pipeline_as_planned(
        autopar.parallelize(case.step, plan=Plan(found), donate_argnums=()), *case.args
    )


def test_what_one_program_hands_to_another_is_held_by_it() -> None:
    plan = plan_of_momentum()
    handed = plan.stages.programs[program_of(plan, 0, "backward")].sharding.inputs
    name = next(each.path for each in handed if each.path.startswith("jvp()/tanh"))
    reasons = tensor_reasons(plan, 0, "backward", name)
    assert reasons.holders == ("stage 0 forward, which makes it so",)
    assert [reader for reader, _ in reasons.readers]
    (runner_up,) = reasons.alternatives
    own = spec_of(plan.stages, 0, "backward", name)
    assert spec_of(staged(runner_up), 0, "backward", name) != own


def test_what_the_update_alone_reads_changes_the_update_alone() -> None:
    plan, name = plan_of_momentum(), "state[1][1]"
    (runner_up,) = tensor_reasons(plan, 1, "apply", name).alternatives
    found = staged(runner_up)
    own = spec_of(plan.stages, 1, "apply", name)
    assert spec_of(found, 1, "apply", name) != own
    for before, after in zip(plan.stages.programs, found.programs, strict=True):
        assert before == after or (before.stage, before.kind) == (1, "apply")


def test_a_pin_is_told_and_priced() -> None:
    pins = {LAST: P("x")}
    plan = planned(momentum(), pins=pins)
    reasons = tensor_reasons(plan, 1, "backward", LAST)
    assert reasons.holders == ("the pin 'state[0][1]': P('x',)",)
    runner_up, without = reasons.alternatives
    assert runner_up.plan is None and "no other choice" in runner_up.refusal
    assert without.title == "without the pin 'state[0][1]'"
    free = plan_of_momentum().predicted
    assert staged(without).predicted == replace(free, optimality_gap=inf)


def test_a_runner_up_fits_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would not, its stage's state lies in more parts, which takes longer."""
    monkeypatch.setattr(memory, "WORKSPACE_BYTES", 0)  # more than all else of a toy
    local = Cluster.local()  # no program is compiled for another kind
    absent = replace(local, device=replace(local.device, kind="another"))
    plan = planned(momentum(), cluster=absent)
    budget = max(plan.stages.peak_bytes)
    within = planned(momentum(), cluster=absent, memory_budget=budget)
    free, fitting = (
        staged(tensor_reasons(each, 0, "forward", "x").alternatives[0])
        for each in (plan, within)
    )
    assert max(free.peak_bytes) > budget >= max(fitting.peak_bytes)
    assert fitting.predicted.step_seconds > free.predicted.step_seconds
    budget = min(plan.stages.peak_bytes)
    least = planned(momentum(), cluster=absent, memory_budget=budget)
    (runner_up,) = tensor_reasons(least, 0, "apply", "state[1][0]").alternatives
    assert runner_up.plan is None
    assert runner_up.refusal.startswith("none fits the memory")


def test_it_prints_the_price_and_asks_for_the_step_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of_momentum()
    plan.explain(tensor=LAST)
    printed = capsys.readouterr().out
    assert "stage 1 forward" in printed and "stage 1 apply" in printed
    assert "stage 0" not in printed and printed.count("the runner-up  ") == 3
    assert "other stages stay" in " ".join(printed.split())
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    loaded.explain(tensor=LAST)
    printed = capsys.readouterr().out
    assert "--target MODULE:NAME" in printed and "runner-up  " not in printed
    again = planned(momentum(), mesh=None, method=None, plan=loaded)
    ours = tensor_reasons(plan, 1, "forward", LAST)
    assert tensor_reasons(again, 1, "forward", LAST) == ours


def test_placed_operators_have_no_runner_up(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(x @ w) @ w

    method = autopar.PlaceOperators("list")
    w = jnp.ones((64, 64))
    plan = autopar.parallelize(step, method=method).plan(w, w)
    plan.explain(tensor="w")
    assert "placed one by one" in capsys.readouterr().out
