"""Examples that index their own rows: as values, split and in microbatches."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import autopar
from autopar.frontend.batching_dims import with_batching_dims
from autopar.frontend.tracing import trace
from tests import random_arrays
from tests.like_jit import assert_same
from tests.random_arrays import normal


def integers(seed: int, *shape: int, below: int) -> jax.Array:
    return random_arrays.integers(seed, *shape, low=-below, high=below)


def taken(x: jax.Array, y: jax.Array) -> jax.Array:
    return x[jnp.arange(8), y] ** 2


def taken_by_constants(x: jax.Array, y: jax.Array) -> jax.Array:
    return x[np.arange(8)[:, None], np.arange(4), y]


def taken_from_columns(x: jax.Array, y: jax.Array) -> jax.Array:
    return x[y, jnp.arange(8)] ** 2


def taken_on_a_grid(x: jax.Array, y: jax.Array) -> jax.Array:
    rows, columns = jnp.meshgrid(jnp.arange(8), jnp.arange(4), indexing="ij")
    return x[rows, columns, y] ** 2


def filled(x: jax.Array, y: jax.Array) -> jax.Array:
    rows = jnp.arange(8)[:, None]
    return x.at[rows, y].get(mode="fill", fill_value=3.0) ** 2


def replaced(x: jax.Array, y: jax.Array) -> jax.Array:
    return x.at[jnp.arange(8)[:, None], y].set(7.0, mode="drop") ** 2


def scaled_and_added(x: jax.Array, y: jax.Array) -> jax.Array:
    rows = jnp.arange(8)[:, None]
    return x.at[rows, y].multiply(2.0).at[rows, y].add(x[:, :2]) ** 2


def in_a_scan(x: jax.Array, ys: jax.Array) -> jax.Array:
    def body(total: Any, y: Any) -> Any:
        return total + jnp.sin(total + 1.0) * x[jnp.arange(8), y], None

    return lax.scan(body, jnp.zeros(8), ys)[0]


@jax.jit
def jitted(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sin(x)[jnp.arange(8), y]


def gradient(function: Any) -> Any:
    return jax.value_and_grad(lambda x, y: jnp.sum(jnp.cos(function(x, y))))


CASES: dict[str, tuple[Any, tuple[jax.Array, jax.Array]]] = {
    "taken": (taken, (normal(0, 8, 5), integers(1, 8, below=5))),
    "by constants": (
        taken_by_constants,
        (normal(0, 8, 4, 5), integers(1, 8, 4, below=5)),
    ),
    "from columns": (taken_from_columns, (normal(0, 5, 8), integers(1, 8, below=5))),
    "on a grid": (taken_on_a_grid, (normal(0, 8, 4, 5), integers(1, 8, 4, below=5))),
    "filled": (filled, (normal(0, 8, 5), integers(1, 8, 2, below=9))),
    "replaced": (replaced, (normal(0, 8, 5), integers(1, 8, 2, below=9))),
    "scaled": (scaled_and_added, (normal(0, 8, 5), integers(1, 8, 2, below=5))),
    "in a scan": (in_a_scan, (normal(0, 8, 5), integers(1, 3, 8, below=5))),
    "in a call": (jitted, (normal(0, 8, 5), integers(1, 8, below=5))),
}


def batching_dims(jaxpr: Any) -> list[tuple[int, ...]]:
    """Of all gathers and scatters, in loops and calls as well."""
    found = []
    for eqn in jaxpr.eqns:
        if "dimension_numbers" in eqn.params and "scatter" in eqn.primitive.name:
            found.append(eqn.params["dimension_numbers"].operand_batching_dims)
        elif eqn.primitive.name == "gather":
            found.append(eqn.params["dimension_numbers"].operand_batching_dims)
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", None)
            found += [] if inner is None else batching_dims(inner)
    return found


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_stay(name: str) -> None:
    function, args = CASES[name]
    closed = jax.make_jaxpr(gradient(function))(*args)
    rewritten = with_batching_dims(closed)
    indexing = batching_dims(rewritten.jaxpr)
    assert len(indexing) >= 2 and all(indexing)
    for ours, theirs in zip(
        *(jax.jit(jaxpr_as_fun(each))(*args) for each in (rewritten, closed)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def of_fewer_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    return x[jnp.arange(4), y[:4]]  # the rows of other examples


def shifted(x: jax.Array, y: jax.Array) -> jax.Array:
    return x[jnp.arange(8) - 1, y]


def counting_twice(x: jax.Array, y: jax.Array) -> jax.Array:
    square = x[:, :1] + jnp.zeros((8, 8))
    return square[jnp.arange(8), jnp.arange(8)] + y  # a diagonal: one dim is left


@pytest.mark.parametrize("function", [of_fewer_rows, shifted])
def test_other_rows_are_left_alone(function: Any) -> None:
    args = CASES["taken"][1]
    closed = jax.make_jaxpr(function)(*args)
    assert not any(batching_dims(with_batching_dims(closed).jaxpr))


def test_a_diagonal_has_one_batching_dim() -> None:
    args = CASES["taken"][1]
    closed = jax.make_jaxpr(counting_twice)(*args)
    rewritten = with_batching_dims(closed)
    assert batching_dims(rewritten.jaxpr) == [(0,)]
    np.testing.assert_array_equal(
        jaxpr_as_fun(rewritten)(*args)[0], jaxpr_as_fun(closed)(*args)[0]
    )


def train_step(w: jax.Array, x: jax.Array, action: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        values = jnp.tanh(x @ w["in"]) @ w["out"]
        rows = jnp.arange(x.shape[0])
        best = jnp.zeros_like(values).at[rows, values.argmax(-1)].set(1.0)
        return jnp.mean((values[rows, action] - 1.0) ** 2) + jnp.mean(values * best)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


ARGS = (
    {"in": normal(0, 8, 16), "out": normal(1, 16, 6)},
    normal(2, 32, 8),
    jax.random.randint(jax.random.key(3), (32,), 0, 6),
)


@pytest.mark.parametrize(
    "options",
    [
        {"method": autopar.DataParallel()},
        {"num_microbatches": 4},
        {"method": autopar.PipelineParallel(num_stages=2, num_microbatches=4)},
    ],
    ids=["split", "microbatches", "pipeline"],
)
def test_a_step_runs_as_on_one_device(options: Any) -> None:
    step = autopar.parallelize(train_step, donate_argnums=(), **options)
    assert_same(step(*ARGS), jax.jit(train_step)(*ARGS))


def test_split_examples_send_gradients_and_the_loss_alone() -> None:
    plan = autopar.parallelize(train_step, method=autopar.DataParallel()).plan(*ARGS)
    (params, _, _), bytes_sent = ARGS, plan.predicted.collective_bytes
    assert bytes_sent <= 2 * 4 * (sum(p.size for p in params.values()) + 2)


def test_what_is_traced_is_rewritten() -> None:
    traced = trace(train_step, ARGS, {})
    assert all(batching_dims(traced.jaxpr.jaxpr))
