"""Flax linen: a TrainState with dropout and batch statistics.

JAX_NUM_CPU_DEVICES=8 python examples/flax_linen.py
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import autopar


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(16, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.avg_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


@autopar.parallelize
def train_step(
    state: TrainState, batch: dict[str, jax.Array]
) -> tuple[TrainState, dict[str, jax.Array]]:
    dropout_key = jax.random.fold_in(state.key, state.step)

    def loss_fn(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
        logits, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats},
            batch["image"],
            train=True,
            rngs={"dropout": dropout_key},
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (logits, updates)

    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, (logits, updates)), grads = grad_fn(state.params)
    state = state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"])
    accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
    return state, {"loss": loss, "accuracy": accuracy}


def make_batch(key: jax.Array) -> dict[str, jax.Array]:
    label = jax.random.randint(key, (32,), 0, 10)
    image = jax.random.normal(key, (32, 8, 8, 3)) + label[:, None, None, None] / 5
    return {"image": image, "label": label}


def create_train_state(key: jax.Array) -> TrainState:
    model = ConvNet()
    variables = model.init(key, jnp.zeros((1, 8, 8, 3)), train=False)
    return TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        key=key,
        tx=optax.adamw(1e-2, eps=1e-3),
    )


def main() -> tuple[TrainState, jax.Array]:
    state = create_train_state(jax.random.key(0))
    metrics = {}
    for i in range(4):
        state, metrics = train_step(state, make_batch(jax.random.key(i)))
    loss = metrics["loss"]
    print(f"step {int(state.step)} on {jax.device_count()} devices: loss {loss:.4f}")
    return state, loss


if __name__ == "__main__":
    main()
