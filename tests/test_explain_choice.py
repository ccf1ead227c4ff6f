"""Why one tensor or operator is as it is: the runner-up is that of trying them all."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.planner.reasons import Alternative, Reasons
from autopar.planner.strategies import tensor_specs
from autopar.plans.plan import ShardingPlan
from autopar.sharding.layouts import layout_text
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.spec import to_partition_spec
from autopar.steps.parallel_plan import Plan
from tests.rows.fixtures import Case, f1, f3, random
from tests.rows.named_plans import graph_of

MESH = "x:2;y:4"


def planned(case: Case, **options: Any) -> Plan:
    return autopar.parallelize(case.step, **options).plan(*case.args)


@cache
def planned_f1() -> Plan:
    return planned(f1(), mesh=MESH)


@cache
def planned_f3() -> Plan:
    return planned(f3(), mesh=MESH)


def index_of(plan: Plan, name: str) -> int:
    return [tensor.name for tensor in plan.sharding.tensors].index(name)


def reasons_of(plan: Plan, name: str) -> Reasons:
    assert plan.source is not None
    return plan.source.tensor_reasons(plan.sharding, index_of(plan, name), 0)


def seconds(alternative: Alternative) -> float:
    assert alternative.plan is not None
    return alternative.plan.predicted.step_seconds


def every_other_spec(case: Case, plan: Plan, path: str, **options: Any) -> list[float]:
    """Seconds of a step with an argument pinned to each spec but its own."""
    graph, mesh = graph_of(case), parse_mesh(MESH)
    (given,) = [each for each in graph.inputs if each.path == path]
    (own,) = [each.spec for each in plan.sharding.inputs if each.path == path]
    kind = graph.tensors[given.tensor].type
    found = []
    for spec in tensor_specs(kind, mesh, pending=False):
        if spec != own:
            pin = to_partition_spec(spec, kind.rank, mesh.axis_names)
            other = planned(case, mesh=MESH, pins={path: pin}, **options)
            found.append(other.predicted.step_seconds)
    return found


@pytest.mark.parametrize("path", ["params['w']", "x"])
def test_the_runner_up_is_the_best_of_all_other_specs(path: str) -> None:
    case = f1()
    plan = planned(case, mesh=MESH)
    reasons = reasons_of(plan, path)
    assert reasons.holders == ()
    (runner_up,) = reasons.alternatives
    assert seconds(runner_up) == pytest.approx(
        min(every_other_spec(case, plan, path)), rel=2e-4
    )
    assert seconds(runner_up) >= plan.predicted.step_seconds * (1 - 2e-4)


def test_a_pin_is_told_and_priced() -> None:
    case = f1()
    pins = {"params/w": P("y")}
    plan = planned(case, mesh=MESH, pins=pins)
    reasons = reasons_of(plan, "params['w']")
    assert reasons.holders == ("the pin 'params/w': P('y',)",)
    runner_up, without = reasons.alternatives
    assert runner_up.plan is None and "no other choice" in runner_up.refusal
    assert without.title == "without the pin 'params/w'"
    assert seconds(without) == planned(case, mesh=MESH).predicted.step_seconds
    assert seconds(without) < plan.predicted.step_seconds


def test_a_pin_inside_the_step_is_told_by_its_line_and_priced() -> None:
    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return autopar.pin(a @ b, P()) @ b

    case = Case(step, (random(0, 256, 256), random(1, 256, 256)))
    plan = planned(case, mesh="x:8")
    reasons = reasons_of(plan, "autopar_pin.0")
    (holder,) = reasons.holders
    assert holder.startswith("autopar.pin at ") and "test_explain_choice.py" in holder
    without = reasons.alternatives[-1]
    assert without.choice != "[-, -]"
    assert seconds(without) < plan.predicted.step_seconds


def test_a_method_is_told() -> None:
    plan = planned(f1(), mesh=MESH, method=autopar.DataParallel())
    reasons = reasons_of(plan, "params['w']")
    assert any("DataParallel" in holder for holder in reasons.holders)


def test_the_place_of_an_argument_that_is_only_read_holds_it() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.device_put(random(0, 64, 64), NamedSharding(mesh, P(None, "x")))
    case = Case(lambda w, x: jnp.sum(x @ w), (w, random(1, 64, 64)))
    reasons = reasons_of(planned(case), "w")
    assert reasons.holders == (
        "the place where the argument lies when the step is called",
    )


def test_readers_and_their_specs_are_those_of_the_plan() -> None:
    plan = planned_f3()
    name = "jvp(bqnd,ndh->bqh)/dot_general.0"
    reasons = reasons_of(plan, name)
    assert [reader for reader, _ in reasons.readers] == ["jvp()/add.1"]
    (tensor,) = [t for t in plan.sharding.tensors if t.name == name]
    (op,) = [o for o in plan.sharding.operators if o.name == "jvp()/add.1"]
    copies = {copy.target for copy in tensor.conversions}
    assert copies & set(op.operand_specs)


def test_another_strategy_of_an_operator_costs_more() -> None:
    plan = planned_f3()
    names = [op.name for op in plan.sharding.operators]
    index = names.index("jvp(bqnd,ndh->bqh)/dot_general.0")
    assert plan.source is not None
    reasons = plan.source.operator_reasons(plan.sharding, index, 0)
    runner_up = reasons.alternatives[0]
    assert isinstance(runner_up.plan, ShardingPlan)
    own, other = plan.sharding.operators[index], runner_up.plan.operators[index]
    assert other.factors != own.factors
    assert seconds(runner_up) > plan.predicted.step_seconds


def test_it_prints_what_made_it_so_and_the_price_by_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = planned_f1()
    plan.explain(tensor="params/w")
    printed = capsys.readouterr().out
    (row,) = [line for line in printed.splitlines() if "the runner-up  " in line]
    (alternative,) = reasons_of(plan, "params['w']").alternatives
    assert alternative.choice in row and "params['w'], float32[128, 512]" in printed
    assert "held by" in printed and "nothing: the cheapest plan has it so" in printed
    for column in ("step", "compute", "collectives", "peak memory"):
        assert column in printed
    plan.explain(op="jvp()/dot_general.0")
    printed = capsys.readouterr().out
    assert "jvp()/dot_general.0, dot_general" in printed and "the runner-up" in printed


@pytest.mark.parametrize(
    ("asked", "near"),
    [({"tensor": "params/ww"}, "params['w']"), ({"op": "dot_gen.0"}, "dot_general.0")],
)
def test_an_unknown_name_is_refused_with_those_like_it(
    asked: dict[str, Any], near: str
) -> None:
    with pytest.raises(ValueError, match="names in the plan of 'step'") as caught:
        planned_f1().explain(**asked)
    assert near in str(caught.value).partition("like it are")[2]


def test_a_file_says_what_it_knows_and_the_step_adds_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = f1()
    plan = planned(case, mesh=MESH)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    loaded.explain(tensor="params/w")
    printed = capsys.readouterr().out
    own = next(e.spec for e in plan.sharding.inputs if e.path == "params['w']")
    spec = to_partition_spec(own, 2, ("x", "y"))
    assert f"is made as  {layout_text(spec, 2)}" in printed
    assert "--target MODULE:NAME" in printed and "runner-up is" not in printed
    again = planned(case, plan=loaded)
    assert again == loaded
    (mine,) = reasons_of(again, "params['w']").alternatives
    (other,) = reasons_of(plan, "params['w']").alternatives
    assert seconds(mine) == seconds(other)
