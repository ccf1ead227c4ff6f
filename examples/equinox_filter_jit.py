"""Equinox: a step that is filter_jit-ted already.

JAX_NUM_CPU_DEVICES=8 python examples/equinox_filter_jit.py
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import autopar


@eqx.filter_value_and_grad
def grad_fn(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@autopar.parallelize
@eqx.filter_jit
def make_step(
    model: eqx.nn.MLP,
    opt_state: Any,
    optimizer: optax.GradientTransformation,
    x: jax.Array,
    y: jax.Array,
) -> tuple[eqx.nn.MLP, Any, jax.Array]:
    loss, grads = grad_fn(model, x, y)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def main() -> tuple[Any, jax.Array]:
    model = eqx.nn.MLP(16, 1, 64, 2, key=jax.random.key(0))
    optimizer = optax.adam(1e-2, eps=1e-3)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    y, loss = x.mean(axis=1, keepdims=True), jnp.inf
    for _ in range(4):
        model, opt_state, loss = make_step(model, opt_state, optimizer, x, y)
    print(f"step 4 on {jax.device_count()} devices: loss {loss:.4f}")
    return (eqx.filter(model, eqx.is_array), opt_state), loss


if __name__ == "__main__":
    main()
