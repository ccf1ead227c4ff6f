"""Equinox: a model that holds functions, dropout and the state of a batch norm.

JAX_NUM_CPU_DEVICES=8 python examples/equinox_stateful.py
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import autopar


class Model(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array) -> None:
        key1, key2 = jax.random.split(key)
        self.linear = eqx.nn.Linear(16, 64, use_bias=False, key=key1)
        self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="batch")
        self.mlp = eqx.nn.MLP(64, 1, 32, 1, key=key2)
        self.dropout = eqx.nn.Dropout(0.1)
        self.activation = jax.nn.gelu

    def __call__(
        self, x: jax.Array, state: eqx.nn.State, key: jax.Array
    ) -> tuple[jax.Array, eqx.nn.State]:
        x, state = self.norm(self.linear(x), state)
        return self.mlp(self.dropout(self.activation(x), key=key)), state


def loss_fn(
    model: Model, state: eqx.nn.State, x: jax.Array, y: jax.Array, key: jax.Array
) -> tuple[jax.Array, eqx.nn.State]:
    keys = jax.random.split(key, len(x))
    batched = jax.vmap(
        model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None)
    )
    prediction, state = batched(x, state, keys)
    return jnp.mean((prediction - y) ** 2), state


optimizer = optax.adam(1e-2, eps=1e-3)


@autopar.parallelize
def make_step(
    model: Model,
    state: eqx.nn.State,
    opt_state: Any,
    x: jax.Array,
    y: jax.Array,
    key: jax.Array,
) -> tuple[Model, eqx.nn.State, Any, jax.Array]:
    grad_fn = eqx.filter_value_and_grad(loss_fn, has_aux=True)
    (loss, state), grads = grad_fn(model, state, x, y, key)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), state, opt_state, loss


def main() -> tuple[Any, jax.Array]:
    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    y, loss = x.mean(axis=1, keepdims=True), jnp.inf
    for i in range(4):
        key = jax.random.key(i)
        model, state, opt_state, loss = make_step(model, state, opt_state, x, y, key)
    print(f"step 4 on {jax.device_count()} devices: loss {loss:.4f}")
    return (eqx.filter(model, eqx.is_array), state, opt_state), loss


if __name__ == "__main__":
    main()
