"""Collectives of a program meet on channels of their own on CPUs."""

import re

import jax
import jax.numpy as jnp

import autopar


def test_each_collective_has_a_channel_of_its_own() -> None:
    """JAX gives all one, so XLA's devices on CPUs could meet in different ones."""

    def step(w: jax.Array, v: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array, v: jax.Array) -> jax.Array:
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, w)
            return jnp.sum(y @ v)

        gradients = jax.grad(loss, (0, 1))(w, v)
        return w - 0.1 * gradients[0], v - 0.1 * gradients[1]

    w, v, x = jnp.ones((4, 64, 64)), jnp.ones((64, 64)), jnp.ones((64, 64))
    planned = autopar.parallelize(step, mesh="x:8", method=autopar.Zero(3))
    lowered = planned.lower(w, v, x)
    compiled = lowered.compile()
    compiled.audit()
    channels = re.findall(r"channel_id=(\d+)", compiled.compiled.as_text())
    assert len(channels) > 2 and len(set(channels)) == len(channels)
    assert min(map(int, channels)) >= 1 << 16  # those below are the callbacks'
