"""Loops that end example by example, as `vmap` of `while_loop` makes them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopar


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
        {"mesh": "x:8"},
        {"mesh": "x:2;y:4"},
        {"mesh": "x:8", "pins": {"rows": "[x, -]"}},
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
