"""Rows PLC: operators placed on devices, run there, and sent along cut edges only."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.clusters.cluster import Cluster

NUM_BRANCHES = 4


def branches(params: Any, x: jax.Array) -> jax.Array:
    """Four products beside each other, and their sum."""
    return sum((jnp.tanh(x @ kernel) for kernel in params), jnp.zeros(()))


def arguments(size: int = 256) -> tuple[list[jax.Array], jax.Array]:
    numbers = np.random.default_rng(0)
    kernels = [numbers.normal(size=(size, size)) for _ in range(NUM_BRANCHES)]
    x = numbers.normal(size=(size, size))
    return [jnp.asarray(k, jnp.float32) for k in kernels], jnp.asarray(x, jnp.float32)


def train(state: Any, x: jax.Array) -> Any:
    """Two towers with momentum; what one makes the other reads at the end."""

    def loss(params: Any) -> jax.Array:
        left = jnp.tanh(x @ params["left"])
        right = jnp.tanh(x @ params["right"])
        return jnp.mean(jnp.square(left * right))

    params, moments = state
    value, grads = jax.value_and_grad(loss)(params)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moments)
    return (params, moments), value


def state() -> Any:
    numbers = np.random.default_rng(1)
    params = {
        name: jnp.asarray(numbers.normal(size=(64, 64)) / 8, jnp.float32)
        for name in ("left", "right")
    }
    return params, jax.tree.map(jnp.zeros_like, params)


def device_of(array: jax.Array) -> int:
    (device,) = array.devices()
    return device.id


@pytest.mark.parametrize("algorithm", ["list", "search", "small_communication"])
def test_plc_4_a_placed_step_has_the_values_of_one_device(algorithm: str) -> None:
    x = jnp.asarray(np.random.default_rng(2).normal(size=(32, 64)), jnp.float32)
    method = autopar.PlaceOperators(algorithm, devices={r"\['left'\]": 0, "right": 1})
    step: Any = autopar.parallelize(train, method=method)
    expected: Any = (state(), None)
    got: Any = expected
    for _ in range(3):
        expected = jax.jit(train)(expected[0], x)
        got = step(got[0], x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    (params, moments), _ = got
    assert [device_of(params[name]) for name in ("left", "right")] == [0, 1]
    assert [device_of(moments[name]) for name in ("left", "right")] == [0, 1]


def test_plc_4_values_are_sent_along_cut_edges_only() -> None:
    pins = {rf"\[{i}\]": i for i in range(NUM_BRANCHES)}
    method = autopar.PlaceOperators("list", devices={**pins, "dot_general": 0})
    del pins["dot_general"] if "dot_general" in pins else pins  # type: ignore[misc]


def test_plc_3_a_weight_and_its_moments_stay_together() -> None:
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    method = autopar.PlaceOperators("search", seed=1)
    step: Any = autopar.parallelize(train, method=method)
    plan = step.plan(state(), x)
    homes = {
        i.path: program.stage
        for program in plan.stages.programs
        for i in program.sharding.inputs
        if i.path.startswith("state")
    }
    for name in ("left", "right"):
        assert homes[f"state[0]['{name}']"] == homes[f"state[1]['{name}']"]
