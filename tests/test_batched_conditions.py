"""Loops that end example by example, as `vmap` of `while_loop` makes them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar
from tests.marks import slow


def halved(row: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Halves a row until it is small: more often for a larger one."""
    return lax.while_loop(
        lambda carry: jnp.abs(carry[0] * scale).sum() > 1.0,
        lambda carry: (carry[0] * 0.7, carry[1] + 1),
        (row, jnp.int32(0)),
    )


ROWS = jax.random.normal(jax.random.key(0), (16, 32)) * jnp.arange(1.0, 17.0)[:, None]
SCALE = jnp.linspace(0.5, 1.5, 32)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": "x:2;y:4"},
        slow({"mesh": "x:8", "pins": {"rows": "[x, -]"}}),
        {"mesh": "x:8", "pins": {"rows": "[-, x]"}},
    ],
    ids=str,
)
def test_each_example_is_done_at_its_own_time(options: Any) -> None:
    def step(rows: jax.Array, scale: jax.Array) -> Any:
        return jax.vmap(halved, (0, None))(rows, scale)

    parallel = autopar.parallelize(step, donate_argnums=(), **options)
    rows, counts = parallel(ROWS, SCALE)
    expected = jax.jit(step)(ROWS, SCALE)
    assert len(set(np.asarray(counts).tolist())) > 4
    np.testing.assert_array_equal(counts, expected[1])
    np.testing.assert_allclose(rows, expected[0], rtol=1e-6)
    parallel.lower(ROWS, SCALE).compile().audit().raise_if_wrong()


def test_inside_of_a_scan_and_of_a_loop() -> None:
    def step(rows: jax.Array, scale: jax.Array) -> Any:
        def one(total: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
            made, counts = jax.vmap(halved, (0, None))(factor * rows, scale)
            return total + made.sum(), counts

        return lax.scan(one, jnp.float32(0), jnp.array([1.0, 2.0, 3.0]))

    parallel = autopar.parallelize(step, mesh="x:8", donate_argnums=())
    total, counts = parallel(ROWS, SCALE)
    expected = jax.jit(step)(ROWS, SCALE)
    np.testing.assert_array_equal(counts, expected[1])
    np.testing.assert_allclose(total, expected[0], rtol=1e-5)


def trained(weights: Any, rows: jax.Array, *, ends_together: bool = False) -> Any:
    """A step through a loop that ends for each example at its own time, or for all."""

    def loss_of(weights: Any) -> jax.Array:
        hidden = rows @ weights["in"]
        if ends_together:
            made = lax.while_loop(
                lambda x: jnp.any(jnp.abs(x).sum(1) > 1.0), lambda x: x * 0.7, hidden
            )
        else:
            made, _ = jax.vmap(halved, (0, None))(hidden, SCALE)
        return jnp.mean((hidden * lax.stop_gradient(made)) @ weights["out"])

    loss, grads = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


WEIGHTS = {"in": jnp.eye(32) + 0.1, "out": jnp.ones((32, 4))}


@pytest.mark.parametrize(
    "options",
    [
        {"num_microbatches": 2, "mesh": "x:8"},
        {"method": autopar.PipelineParallel(num_stages=2, num_microbatches=4)},
    ],
    ids=["microbatches", "stages"],
)
def test_microbatches_end_at_their_own_time(options: Any) -> None:
    found = autopar.parallelize(trained, donate_argnums=(), **options)(WEIGHTS, ROWS)
    expected = jax.jit(trained)(WEIGHTS, ROWS)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_loop_that_ends_for_all_examples_at_once_is_not_cut() -> None:
    def step(weights: Any, rows: jax.Array) -> Any:
        return trained(weights, rows, ends_together=True)

    with pytest.raises(autopar.BatchCoupledError, match="while"):
        autopar.parallelize(step, num_microbatches=2, mesh="x:8")(WEIGHTS, ROWS)
