"""Pipelines of steps that skip an update, or read the batch as a whole before it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import autopar
from autopar.methods.methods import PipelineParallel

WIDTH, BATCH = 16, 16
METHOD = PipelineParallel(num_stages=2, num_microbatches=4)


def parameters() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        name: 0.3 * jax.random.normal(key, (WIDTH, WIDTH))
        for name, key in zip("abc", keys, strict=True)
    }


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (BATCH, WIDTH))


def loss(params: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
    return jnp.mean((hidden @ params["c"] - x) ** 2)


def assert_equal_to_jit(step: Any, state: Any, *batches: jax.Array) -> Any:
    """The last state, behind a step for each batch, which is that of one device."""
    pipelined = autopar.parallelize(step, method=METHOD, donate_argnums=())
    got, want = state, state
    for x in batches:
        got, value = pipelined(got, x)
        want, expected = jax.jit(step)(want, x)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    for actual, leaf in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(autopar.fetch(actual), leaf, rtol=2e-4, atol=1e-6)
    pipelined.lower(state, batches[0]).compile().audit().raise_if_wrong()
    return want


def test_an_update_that_is_skipped_where_gradients_are_not_finite():
    transform = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=4)

    def step(state: Any, x: jax.Array) -> Any:
        params, optimizer = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, optimizer = transform.update(grads, optimizer, params)
        return (optax.apply_updates(params, updates), optimizer), value

    params, bad = parameters(), batch().at[3].set(jnp.nan)
    state = (params, transform.init(params))
    _, optimizer = assert_equal_to_jit(step, state, batch(), bad, batch())
    assert optimizer.total_notfinite == 1


def test_a_loss_scale_that_follows_the_gradients():
    """Backward alone reads the scale, and one conditional updates all state."""
    transform = optax.sgd(0.1, momentum=0.9)

    def step(state: Any, x: jax.Array) -> Any:
        params, optimizer, scale = state
        scaled, grads = jax.value_and_grad(lambda p: loss(p, x) * scale)(params)
        grads = jax.tree.map(lambda leaf: leaf / scale, grads)
        is_finite = jnp.all(
            jnp.array([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads)])
        )

        def updated() -> Any:
            updates, after = transform.update(grads, optimizer, params)
            return optax.apply_updates(params, updates), after

        params, optimizer = lax.cond(is_finite, updated, lambda: (params, optimizer))
        scale = jnp.where(is_finite, 2 * scale, scale / 2)
        return (params, optimizer, scale), scaled / scale

    params = parameters()
    state = (params, transform.init(params), jnp.float32(8))
    bad = batch().at[0, 0].mul(jnp.inf)
    *_, scale = assert_equal_to_jit(step, state, batch(), batch(), bad)
    assert scale == 8 * 2 * 2 / 2


def test_a_batch_wide_count_read_with_constants():
    """The scatter of the loss's gradient is made before the loop, at constants."""

    def step(params: Any, x: jax.Array) -> Any:
        def masked(params: Any) -> jax.Array:
            is_real = x[:, 0] > 0
            logits = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["c"]
            labels = jnp.zeros((BATCH, 1), int)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels, 1)[:, 0]
            return -(chosen * is_real).sum() / is_real.sum()

        value, grads = jax.value_and_grad(masked)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    assert_equal_to_jit(step, parameters(), batch(), batch())
