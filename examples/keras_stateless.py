"""Keras 3 on JAX: `stateless_call` and `stateless_apply` in a loop of one's own.

JAX_NUM_CPU_DEVICES=8 python examples/keras_stateless.py
"""

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras

import autopar

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(1e-2, epsilon=1e-3)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
accuracy = keras.metrics.SparseCategoricalAccuracy()


def compute_loss_and_updates(
    trainable: Any, non_trainable: Any, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, Any]]:
    logits, non_trainable = model.stateless_call(
        trainable, non_trainable, x, training=True
    )
    return loss_of(y, logits), (logits, non_trainable)


@autopar.parallelize
def train_step(state: Any, data: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
    trainable, non_trainable, optimizer_state, metrics = state
    x, y = data
    grad_fn = jax.value_and_grad(compute_loss_and_updates, has_aux=True)
    (loss, (logits, non_trainable)), grads = grad_fn(trainable, non_trainable, x, y)
    trainable, optimizer_state = optimizer.stateless_apply(
        optimizer_state, grads, trainable
    )
    metrics = accuracy.stateless_update_state(metrics, y, logits)
    return (trainable, non_trainable, optimizer_state, metrics), loss


def main() -> tuple[Any, jax.Array]:
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
        accuracy.variables,
    )
    state = [[v.value for v in group] for group in variables]
    y = jax.random.randint(jax.random.key(0), (32,), 0, 10)
    x = jax.random.normal(jax.random.key(1), (32, 8, 8, 1)) + y[:, None, None, None] / 5
    for _ in range(3):
        state, loss = train_step(state, (x, y))
    print(f"step 3 on {jax.device_count()} devices: loss {loss:.4f}")
    for group, values in zip(variables, state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)
    return state, loss


if __name__ == "__main__":
    main()
