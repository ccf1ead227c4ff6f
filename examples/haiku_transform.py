"""Haiku: a function transformed with state, and batch norm in it.

JAX_NUM_CPU_DEVICES=8 python examples/haiku_transform.py
"""

from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import autopar


class TrainingState(NamedTuple):
    params: hk.MutableParams
    state: hk.MutableState
    opt_state: Any
    key: jax.Array


@hk.transform_with_state
def network(x: jax.Array, is_training: bool) -> jax.Array:
    x = hk.Linear(64, with_bias=False)(x)
    x = hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training)
    x = hk.dropout(hk.next_rng_key(), 0.1, jax.nn.relu(x))
    return hk.Linear(10)(x)


optimizer = optax.sgd(0.1, momentum=0.9)


@autopar.parallelize
def update(
    training: TrainingState, x: jax.Array, label: jax.Array
) -> tuple[TrainingState, jax.Array]:
    key, next_key = jax.random.split(training.key)

    def loss_fn(params: hk.MutableParams) -> tuple[jax.Array, hk.MutableState]:
        logits, state = network.apply(params, training.state, key, x, True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        return losses.mean(), state

    (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(training.params)
    updates, opt_state = optimizer.update(grads, training.opt_state)
    params = optax.apply_updates(training.params, updates)
    return TrainingState(params, state, opt_state, next_key), loss


def main() -> tuple[TrainingState, jax.Array]:
    label = jax.random.randint(jax.random.key(1), (32,), 0, 10)
    x = jax.random.normal(jax.random.key(2), (32, 16)) + label[:, None]
    params, state = network.init(jax.random.key(0), x, True)
    training = TrainingState(
        params, state, optimizer.init(params), jax.random.PRNGKey(3)
    )
    loss = jnp.inf
    for _ in range(4):
        training, loss = update(training, x, label)
    print(f"step 4 on {jax.device_count()} devices: loss {loss:.4f}")
    return training, loss


if __name__ == "__main__":
    main()
