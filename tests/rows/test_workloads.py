"""Workloads of the acceptance rows (1.14) that ALP-1 does not train already.

BERT, GPT, MoE and Wide-ResNet are `test_alp_1_one_decorator_gives_the_same_losses`;
GPT-3 175B on 1,024 devices, planned alone, is `tests/benchmarks/test_gpt3_plan.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from benchmarks.models import build
from benchmarks.models.workload import Batch


def zoo(name: str, **options: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A step of the zoo, and its arguments."""
    workload = build(name, optimizer="sgd", **options)
    return workload.step, workload.arguments()


def mnist_mlp() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Images of 28 x 28, one hidden layer, ten classes."""
    optimizer = optax.sgd(0.1)
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "hidden": 0.05 * jax.random.normal(keys[0], (784, 128)),
        "bias": jnp.zeros(128),
        "head": 0.05 * jax.random.normal(keys[1], (128, 10)),
    }
    batch = {
        "images": jax.random.uniform(keys[2], (64, 28, 28)),
        "labels": jax.random.randint(keys[3], (64,), 0, 10),
    }

    def loss_of(params: Any, batch: Batch) -> jax.Array:
        pixels = batch["images"].reshape(-1, 784)
        hidden = jax.nn.relu(pixels @ params["hidden"] + params["bias"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            hidden @ params["head"], batch["labels"]
        )
        return jnp.mean(losses)

    def step(state: Any, batch: Batch) -> tuple[Any, Any]:
        params, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), {"loss": loss}

    return step, ((params, optimizer.init(params)), batch)


WORKLOADS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "mnist-mlp": mnist_mlp,
    "sequence-to-sequence": lambda: zoo("t5"),
    "lm-transformer": lambda: zoo("llama", num_layers=1),
    "image-transformer": lambda: zoo("vit", num_layers=1),
    "image-to-image": lambda: zoo("unet", num_levels=1, image_size=8),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_train_as_on_one_device(name: str) -> None:
    own_step, arguments = WORKLOADS[name]()
    parallel_step = autopar.parallelize(own_step, mesh="x:8")
    compiled = parallel_step.lower(*arguments).compile()
    compiled.audit().raise_if_wrong()
    losses: list[list[float]] = []
    for step in (parallel_step, jax.jit(own_step)):
        state, batch = jax.tree.map(jnp.copy, arguments)
        losses.append([])
        for _ in range(5):
            state, metrics = step(state, batch)
            losses[-1].append(float(metrics["loss"]))
    got, want = losses
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert want[4] < want[0]
    assert compiled.plan.predicted.split_flops_fraction > 0.9
