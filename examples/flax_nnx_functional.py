"""Flax NNX in its functional form: split before the step, merged inside it.

JAX_NUM_CPU_DEVICES=8 python examples/flax_nnx_functional.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import autopar


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 64, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.head = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.norm(self.linear(x))))


@autopar.parallelize
def train_step(
    graphdef: nnx.GraphDef, state: nnx.State, x: jax.Array, y: jax.Array
) -> tuple[nnx.State, jax.Array]:
    model, optimizer = nnx.merge(graphdef, state)
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


def main() -> tuple[nnx.State, jax.Array]:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)
    graphdef, state = nnx.split((model, optimizer))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    y, loss = x.mean(axis=1, keepdims=True), jnp.inf
    for _ in range(4):
        state, loss = train_step(graphdef, state, x, y)
    nnx.update((model, optimizer), state)
    step = int(optimizer.step[...])
    print(f"step {step} on {jax.device_count()} devices: loss {loss:.4f}")
    return state, loss


if __name__ == "__main__":
    main()
