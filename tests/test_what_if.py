"""What-if pins: the plan that planning with these pins makes, and nothing traced."""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.plans.plan_file import from_json, to_json
from autopar.sharding.spec import to_partition_spec
from autopar.steps.parallel_plan import Plan
from tests.marks import slow
from tests.rows.fixtures import Case, f1, f3, random, tanh_chain
from tests.rows.running import homes
from tests.test_pin_costs import random_pins

MESH = "x:2;y:4"


def planned(case: Case, **options: Any) -> Plan:
    return autopar.parallelize(case.step, **options).plan(*case.args)


@cache
def free_plan(make: Callable[[], Case]) -> Plan:
    return planned(make(), mesh=MESH)


@pytest.mark.parametrize(
    ("make", "seed"),
    [(f1, 0), (f1, 1), (f1, 2), slow(f3, 0)],
)
def test_it_is_the_plan_that_planning_with_the_pins_makes(make: Any, seed: int) -> None:
    case = make()
    pins = random_pins(case, seed, 2)
    asked = free_plan(make).what_if(pins, gap=1e-4)
    fresh = planned(case, mesh=MESH, pins=pins)
    assert asked.predicted.step_seconds == fresh.predicted.step_seconds
    assert homes(asked) == homes(fresh)
    assert asked.diff(fresh).has_same_decisions


def test_nothing_is_traced_again_and_no_array_is_kept() -> None:
    number = 0

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        nonlocal number
        number += 1
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    w, x = jnp.ones((64, 64)), jnp.ones((32, 64))
    plan = autopar.parallelize(step, mesh="x:8").plan(w, x)
    traced = number
    for layout in ("[x, -]", "[-, x]", "[-, -]"):
        plan = plan.what_if({"w": layout})
        plan.explain(tensor="x")
    assert number == traced
    w.delete()
    assert plan.what_if({"x": P("x")}).predicted.step_seconds > 0


def test_pins_add_up_and_the_latest_wins() -> None:
    case = f1()
    first = free_plan(f1).what_if({"params/w": P("x")})
    both = first.what_if([("params/v", "[-, y]")])
    assert homes(both)["params['w']"] == (0, -1)
    assert homes(both)["params['v']"] == (-1, 1)
    other = both.what_if({"params/w": P("y")})
    assert homes(other)["params['w']"] == (-1, 0)
    assert homes(other)["params['v']"] == (-1, 1)
    assert planned(case, mesh=MESH, pins={"x": P("x")}).what_if({"x": P("y")}) == (
        planned(case, mesh=MESH, pins={"x": P("y")})
    )


def test_the_mesh_that_was_found_stays() -> None:
    case = f1(batch=4096)
    plan = planned(case)
    assert plan.what_if({"y": P()}).sharding.mesh == plan.sharding.mesh


def test_a_part_of_the_devices_stays() -> None:
    case = f1()
    part = jax.sharding.Mesh(jax.devices()[:4], ("x",))
    plan = planned(case, mesh=part)
    asked = plan.what_if({"params/w": P("x")})
    assert asked.sharding.mesh == plan.sharding.mesh
    loaded = Plan(plan.sharding)
    assert planned(case, plan=loaded).what_if({"params/w": P("x")}) == asked


def test_what_a_plan_is_like_stays() -> None:
    case = f1()
    old = planned(case, mesh=MESH, pins={"params/w": P("y"), "params/v": P()})
    new = planned(f1(batch=128), like=old)
    asked = new.what_if({"x": P("x")})
    assert homes(asked) | {"x": homes(new)["x"]} == homes(new)
    assert homes(asked)["x"] == (0, -1)


def test_the_method_and_the_budget_stay() -> None:
    case = f1()
    plan = planned(case, mesh="x:8", method=autopar.Zero(3))
    asked = plan.what_if({"x": P("x")})
    assert asked.sharding.state_bytes() == plan.sharding.state_bytes()
    free = planned(case, mesh="x:8")
    small = planned(case, mesh="x:8", memory_budget=free.predicted.peak_bytes * 2)
    kept = small.what_if({"x": P("x")}).predicted
    assert kept.budget_bytes == small.predicted.budget_bytes >= kept.peak_bytes


def test_what_it_gives_runs() -> None:
    case = f1()
    asked = free_plan(f1).what_if({"params/w": "[y, x]"})
    step = autopar.parallelize(case.step, plan=asked, donate_argnums=())
    jax.tree.map(
        lambda a, b: jnp.allclose(a, b, rtol=1e-5, atol=1e-6) or pytest.fail("differ"),
        step(*case.args),
        jax.jit(case.step)(*case.args),
    )


@pytest.mark.parametrize("make", [f1, slow(f3)])
def test_what_the_plan_has_already_costs_nothing_and_is_not_solved(make: Any) -> None:
    """Which a search that stops at a gap of 1% could not say."""
    plan = free_plan(make)
    state = next(each for each in plan.sharding.inputs if each.role == "state")
    spec = to_partition_spec(state.spec, len(state.shape), ("x", "y"))
    asked = plan.what_if({state.path: spec})
    assert asked.sharding is plan.sharding
    assert homes(asked.what_if({"x": P()}))[state.path] == state.spec


@pytest.mark.parametrize("make", [f1, slow(f3)])
def test_it_stops_at_the_gap_that_it_is_given(make: Any) -> None:
    plan, pins = free_plan(make), random_pins(make(), 1, 4)
    exact = plan.what_if(pins, gap=1e-4).predicted
    quick = plan.what_if(pins).predicted
    assert exact.optimality_gap <= 1e-4 and quick.optimality_gap <= 0.01
    assert exact.step_seconds <= quick.step_seconds * (1 + 1e-9)
    assert quick.step_seconds <= exact.step_seconds * 1.011
    with pytest.raises(ValueError, match="`gap` must be a part of a step"):
        plan.what_if(pins, gap=-1.0)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"params/u": P("x")}, r"did you mean params\['"),
        ({"params/w": P("z")}, "may only name axes of the mesh"),
        ({"params/w": P("x", "x")}, "one dim only, but 'x' appears twice"),
        ({"params/w": "[x, x]"}, "one dim only, but 'x' is twice"),
        ({"params/w": P(None, None, "x")}, "at most one entry for each dim"),
        ([("x", P()), ("x", P("x"))], "given once, but got 'x' twice"),
    ],
)
def test_a_pin_that_cannot_be_is_refused(pins: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        free_plan(f1).what_if(pins)


def test_a_plan_without_its_step_says_how_to_get_one() -> None:
    plan = free_plan(f1)
    pickled = pickle.loads(pickle.dumps(plan))
    loaded = Plan(from_json(to_json(plan.sharding), "plan.json"))
    for other in (pickled, copy.deepcopy(plan), loaded):
        assert other == plan
        with pytest.raises(ValueError, match=r"parallelize\(step, plan=plan\)"):
            other.what_if({"x": P()})
    again = planned(f1(), plan=loaded).what_if({"params/w": P()})
    assert again == plan.what_if({"params/w": P()})


def test_a_pipeline_is_asked_too_and_keeps_its_stages() -> None:
    kernels = [random(i, 64, 64, scale=0.125) for i in range(2)]
    case = Case(tanh_chain, (kernels, random(9, 32, 64)))
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    plan = planned(case, mesh="x:4", method=method)
    leaf = plan.stages.programs[0].sharding.inputs[0].path
    pins = {leaf: "[-, x]"}
    asked = plan.what_if(pins)
    assert asked == planned(case, mesh="x:4", method=method, pins=pins)
    assert asked.stages.meshes == plan.stages.meshes
    (cost,) = asked.pin_costs().costs
    assert cost.pin == leaf
    assert cost.seconds_without == plan.predicted.step_seconds
    assert cost.step_seconds == asked.predicted.step_seconds > cost.seconds_without
    with pytest.raises(ValueError, match="is in none of the"):
        plan.what_if({"nowhere": P()})
    loaded = Plan(plan.stages)
    with pytest.raises(ValueError, match=r"parallelize\(step, plan=plan\)"):
        loaded.what_if(pins)
    assert planned(case, plan=loaded).what_if(pins) == asked
