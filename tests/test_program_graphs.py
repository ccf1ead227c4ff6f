"""Graphs of stage programs are traced from the operators of the step."""

import jax
import jax.numpy as jnp

import autopar


def test_barriers_of_calls_and_literals_are_traced():
    """Nothing is lost on the way."""

    def step(w: jax.Array, count: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        def loss(w: jax.Array) -> jax.Array:
            hidden = jax.checkpoint(lambda w: jnp.tanh(x @ w[0]))(w)
            return jnp.mean((hidden @ w[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, jnp.int32(7), value

    w, x = jnp.ones((2, 8, 8)), jnp.ones((16, 8))
    run = autopar.parallelize(step, method=autopar.PipelineParallel(2, 2))
    found = run(w, jnp.int32(0), x)
    for own, other in zip(found, jax.jit(step)(w, jnp.int32(0), x), strict=True):
        assert jnp.allclose(own, other, rtol=1e-5)
