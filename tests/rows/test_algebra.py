"""Algebra that saves bytes: sums added before they are reduced, gathers moved late."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from tests.rows.fixtures import Case, Params, norm, random, sgd
from tests.rows.running import homes, run_as_planned, traffic

NUM_DEVICES, ROWS, WIDTH, INNER = 4, 128, 64, 256


def four_devices() -> Mesh:
    return Mesh(np.array(jax.devices()[:NUM_DEVICES]), ("x",))


def test_sums_of_sibling_products_are_reduced_once() -> None:
    """Three projections of one tensor, split by columns: their three input gradients
    are partial sums, which are added before they are reduced."""

    def step(params: Params, x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            q, k, v = (x @ params[name] for name in "qkv")
            return jnp.sum(jnp.tanh(q) * jnp.tanh(2.0 * k) * jnp.tanh(v.T).T)

        return jnp.tanh(jax.grad(loss)(x))

    params = {name: random(i, WIDTH, INNER) for i, name in enumerate("qkv")}
    case = Case(step, (params, random(3, ROWS, WIDTH)))
    pins = {f"params\\['{name}'\\]": P(None, "x") for name in "qkv"} | {"x": P()}
    parallel = autopar.parallelize(case.step, mesh=four_devices(), pins=pins)
    plan = run_as_planned(parallel, *case.args).plan
    part = ROWS * WIDTH * 4 // NUM_DEVICES
    assert traffic(plan) == {("reduce_scatter", "x"): [part]}


def test_what_sibling_products_read_whole_is_gathered_once() -> None:
    """Rows are split, columns of three kernels too: one gather serves all three."""

    def step(params: Params, x: jax.Array) -> list[jax.Array]:
        return [autopar.pin(x @ params[name], P(None, "x")) for name in "qkv"]

    params = {name: random(i, WIDTH, INNER) for i, name in enumerate("qkv")}
    case = Case(step, (params, random(3, ROWS, WIDTH)))
    pins = {f"params\\['{name}'\\]": P(None, "x") for name in "qkv"} | {"x": P("x")}
    parallel = autopar.parallelize(case.step, mesh=four_devices(), pins=pins)
    plan = run_as_planned(parallel, *case.args).plan
    assert traffic(plan) == {("all_gather", "x"): [ROWS * WIDTH * 4]}


def adam_step(batch: int) -> Case:
    optimizer = optax.adam(1e-2, eps=1e-2)

    def step(state: Any, x: jax.Array, y: jax.Array) -> Any:
        params, moments = state

        def loss(params: Params) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)

        updates, moments = optimizer.update(jax.grad(loss)(params), moments)
        return optax.apply_updates(params, updates), moments

    params = {
        "up": random(0, WIDTH, INNER, scale=0.1),
        "down": random(1, INNER, WIDTH, scale=0.1),
    }
    x, y = random(2, batch, WIDTH), random(3, batch, WIDTH)
    return Case(step, ((params, optimizer.init(params)), x, y))


def test_the_gather_of_a_gradient_moves_behind_the_update() -> None:
    """Whole parameters, a split batch, moments left free: each all_reduce becomes a
    reduce_scatter, the update works on shards, and what is gathered is its result."""
    case = adam_step(8192)
    pins = {"x": P("x"), "y": P("x"), r"state\[0\].*": P()}
    parallel = autopar.parallelize(case.step, mesh=four_devices(), pins=pins)
    plan = run_as_planned(parallel, *case.args).plan
    kernel = WIDTH * INNER * 4
    assert traffic(plan) == {
        ("reduce_scatter", "x"): [kernel // NUM_DEVICES] * 2,
        ("all_gather", "x"): [kernel] * 2,
    }
    moments = [spec for path, spec in homes(plan).items() if ".mu" in path]
    assert len(moments) == 2 and all(spec != (-1,) for spec in moments)


@pytest.mark.parametrize("rate", [0.0, 0.1], ids=["plain", "dropout"])
def test_gathers_move_past_residuals_norms_and_dropout(rate: float) -> None:
    """Sequence parallelism, found by the solver: each all_reduce of a row-split product
    is a reduce_scatter, and a gather stands before the next column-split one."""

    def step(params: Params, x: jax.Array, y: jax.Array, key: jax.Array) -> Any:
        def loss(params: Params) -> jax.Array:
            h = x
            for i in range(2):
                inner = jax.nn.relu(norm(params[f"norm{i}"], h) @ params[f"up{i}"])
                out = inner @ params[f"down{i}"]
                if rate:
                    mask = jax.random.fold_in(key, i)
                    keep = jax.random.bernoulli(mask, 1 - rate, out.shape)
                    out = jnp.where(keep, out / (1 - rate), 0.0)
                h = h + out
            return jnp.mean((h - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads), value

    hidden, seq = 128, 128
    params: Params = {}
    for i in range(2):
        params[f"norm{i}"] = jnp.ones(hidden)
        params[f"up{i}"] = random(2 * i, hidden, 4 * hidden, scale=0.05)
        params[f"down{i}"] = random(2 * i + 1, 4 * hidden, hidden, scale=0.05)
    args = params, random(4, 1, seq, hidden), random(5, 1, seq, hidden)
    case = Case(step, (*args, jax.random.key(0)))
    parallel = autopar.parallelize(case.step, mesh=four_devices())
    plan = run_as_planned(parallel, *case.args).plan
    whole = seq * hidden * 4
    assert traffic(plan) == {
        # Two forward and two backward, less the gradient of x, which nobody asks for.
        ("reduce_scatter", "x"): [whole // NUM_DEVICES] * 3,
        ("all_gather", "x"): [whole] * 3,
        ("all_reduce", "x"): [512, 512, 4],  # scales of the norms; the loss
    }
