"""Flax NNX: a step that changes its model, optimizer and metrics in place.

JAX_NUM_CPU_DEVICES=8 python examples/flax_nnx.py
"""

import jax
import optax
from flax import nnx

import autopar


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(16, 64, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.linear(x)))
        return self.head(self.dropout(x))


def loss_fn(model: Model, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


@autopar.parallelize
def train_step(
    model: Model,
    optimizer: nnx.Optimizer,
    metrics: nnx.MultiMetric,
    batch: dict[str, jax.Array],
) -> None:
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def make_batch(key: jax.Array) -> dict[str, jax.Array]:
    label = jax.random.randint(key, (32,), 0, 10)
    return {"x": jax.random.normal(key, (32, 16)) + label[:, None], "label": label}


def main() -> tuple[nnx.State, jax.Array]:
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
    )
    for i in range(4):
        train_step(model, optimizer, metrics, make_batch(jax.random.key(i)))
    loss, step = metrics.compute()["loss"], int(optimizer.step[...])
    print(f"step {step} on {jax.device_count()} devices: loss {loss:.4f}")
    return nnx.state((model, optimizer, metrics)), loss


if __name__ == "__main__":
    main()
