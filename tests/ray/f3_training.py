"""F3, the transformer layer of the acceptance rows, as a train step with a loss."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.rows.fixtures import f3, f3_forward, sgd

NUM_STEPS = 4


def step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    layer = f3_forward().step

    def loss(params: Any) -> jax.Array:
        return jnp.mean((layer(params, x) - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return sgd(params, grads), value


def arguments() -> tuple[Any, np.ndarray, np.ndarray]:
    """Parameters, and a batch as every process reads it."""
    params, x, y = f3().args
    return params, np.asarray(x), np.asarray(y)


def losses(parallel_step: Any) -> list[float]:
    """The loss of each of some steps."""
    params, x, y = arguments()
    found = []
    for _ in range(NUM_STEPS):
        params, loss = parallel_step(params, x, y)
        found.append(float(loss))
    return found
