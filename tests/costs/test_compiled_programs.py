"""Rules of XLA by which a whole value is in memory or not."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from .test_memory_model import kernels_of, profile_of

X = jnp.ones((16, 64, 64))


def test_a_turned_copy_does_not_lie_where_it_is_read() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        rows = lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))
        return jnp.einsum("bmn,bnk->mk", rows, w)

    profile, compiled = profile_of(step, X, X)
    assert profile.peak_bytes == pytest.approx(compiled, rel=0.02)


def test_rows_and_columns_of_a_batch_of_matrices_are_read_as_they_lie() -> None:
    """The values are turned, as their heads do not come after the batch."""
    weights, values = jnp.ones((4, 8, 32, 32)), jnp.ones((4, 32, 8, 16))

    def attend(weights: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.einsum("bnqk,bknd->bqnd", jnp.exp(weights), values)

    kinds = kernels_of(attend, weights, values)
    assert kinds.count(None) == 1 and "exp" in kinds


def test_equal_means_with_and_without_dims_of_one_are_made_once() -> None:
    """And so is what they are taken from."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return (y - y.mean(0)) @ w + (y - y.mean(0, keepdims=True)) @ w.T

    kinds = kernels_of(step, jnp.ones((512, 64)), jnp.ones((64, 64)))
    assert kinds.count("reduce_sum") == kinds.count("sub") == 1
