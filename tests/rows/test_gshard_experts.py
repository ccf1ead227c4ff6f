"""Rows of GShard: top-2 and top-1 gates with a capacity, and experts on devices."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from tests.rows.fixtures import Params
from tests.rows.moe_models import Experts, looped
from tests.rows.running import run_as_planned, traffic

F4 = Experts(groups=8, tokens=16, width=32, experts=8, capacity=4, hidden=64)
SPLIT = {r"\['x'\]|\['y'\]": P("expert"), "up|down": P("expert")}


def devices(**sizes: int) -> Mesh:
    number = int(np.prod(list(sizes.values())))
    return Mesh(
        np.array(jax.devices()[:number]).reshape(tuple(sizes.values())), tuple(sizes)
    )


def forward(layer: Experts, number: int = 8) -> Any:
    def apply(params: Params, x: jax.Array) -> Any:
        weights = layer.combine_weights(jax.nn.softmax(x @ params["gate"]))
        return *layer.apply(params, x), weights

    pins = {"^x$": P("expert"), "up|down": P("expert")}
    return autopar.parallelize(apply, mesh=devices(expert=number), pins=pins)


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("capacity", [2, 4, 16])
def test_gsh_2_gates_drop_and_weigh_as_a_loop_over_tokens(
    top: int, capacity: int
) -> None:
    layer = replace(F4, top=top, capacity=capacity)
    params, x = layer.params(), layer.batch()["x"]
    y, balance, weights = forward(layer)(params, x)
    expected, expected_balance, kept = looped(layer, params, np.asarray(x))
    np.testing.assert_array_equal(np.asarray(weights) > 0, kept > 0)
    np.testing.assert_allclose(weights, kept, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(balance, expected_balance, rtol=1e-5)
    is_dropped = (kept > 0).sum((2, 3)) < top
    assert is_dropped.any() == (capacity < 16)


def test_gsh_2_of_tokens_that_all_want_one_expert_its_capacity_is_kept() -> None:
    params, x = F4.params(), jnp.abs(F4.batch()["x"])
    params["gate"] = jnp.zeros_like(params["gate"]).at[:, 5].set(1.0)
    _, _, weights = forward(F4)(params, x)
    assert ((np.asarray(weights) > 0).sum((1, 3))[:, 5] == F4.capacity).all()


def test_gsh_3_training_takes_four_exchanges_and_one_reduction() -> None:
    """E G C M 4 / 8 bytes each; the gate's gradient, and the balance loss."""
    case = F4.training()
    step = autopar.parallelize(case.step, mesh=devices(expert=8), pins=SPLIT)
    found = traffic(run_as_planned(step, *case.args).plan)
    assert F4.experts * F4.groups * F4.capacity * F4.width * 4 // 8 == 4_096
    assert found[("all_to_all", "expert")] == [4_096] * 4
    gate, *scalars = found.pop(("all_reduce", "expert"))
    assert gate == F4.width * F4.experts * 4 == 1_024
    assert all(size == 4 for size in scalars)
    assert set(found) == {("all_to_all", "expert")}


def test_gsh_4_what_a_device_holds_and_sends_stays_as_experts_grow() -> None:
    """As many experts as devices, at one group of tokens a device."""
    held, sent = [], []
    for number in (2, 4, 8):
        sizes = {"groups": number, "experts": number, "capacity": 32 // number}
        layer = replace(F4, **sizes)
        step = forward(layer, number)
        plan = step.plan(layer.params(), layer.batch()["x"])
        inputs = {each.path: each.bytes for each in plan.sharding.inputs}
        held.append([inputs["params['up']"], inputs["params['down']"]])
        sent.append(traffic(plan)["all_to_all", "expert"])
    assert held == [[32 * 64 * 4] * 2] * 3
    assert sent == [[4_096] * 2] * 3


def test_gsh_6_experts_are_repeated_over_the_outer_axis() -> None:
    """Exchanges stay among the four devices that hold the experts; gradients of
    experts are added by the two that hold the same."""
    layer = replace(F4, experts=4, capacity=8)
    case = layer.training()
    pins = {
        r"\['x'\]|\['y'\]": P(("outer", "expert")),
        "up|down": P("expert"),
    }
    step = autopar.parallelize(case.step, mesh=devices(outer=2, expert=4), pins=pins)
    found = traffic(run_as_planned(step, *case.args).plan)
    assert found[("all_to_all", "expert")] == [4_096] * 4
    assert sum(found[("all_reduce", "outer")]) == 2 * 8_192 == 16_384
    small = sum(found.pop(("all_reduce", "outer,expert")))
    assert small <= 32 * 4 * 4 + 8
    assert set(found) == {("all_to_all", "expert"), ("all_reduce", "outer")}
