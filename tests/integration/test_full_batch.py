"""Microbatches and stages leave the state that the full batch leaves on one device."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from benchmarks.models import gpt, mlp
from benchmarks.models.training import make_workload

RTOL = 2e-4
NUM_STEPS = 3
Training = tuple[Callable[..., Any], Any, Any]


def optimizer() -> optax.GradientTransformation:
    """An eps above rounding noise, which Adam would blow up to full steps."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-4))


def decoder(**options: Any) -> Training:
    config = gpt.Config(32, 8, 4, 32, 4, batch_size=8, masked_loss=True, **options)
    workload = make_workload("gpt", gpt.make_model(config), optimizer())
    return workload.step, workload.init(jax.random.key(0)), workload.make_batch(0)


def perceptron() -> Training:
    model = mlp.make_model(mlp.Config.tiny())
    workload = make_workload("mlp", model, optimizer())
    return workload.step, workload.init(jax.random.key(0)), workload.make_batch(0)


def encoder_decoder() -> Training:
    """Two towers of scanned layers; each layer of the second attends to the first."""
    keys = jax.random.split(jax.random.key(0), 8)
    encoder = jax.random.normal(keys[0], (2, 16, 16)) * 0.3
    decoder = jax.random.normal(keys[1], (2, 2, 16, 16)) * 0.3
    params = {"encoder": encoder, "decoder": decoder, "head": encoder[0]}
    transformation = optimizer()

    def loss_of(params: Any, batch: Any) -> jax.Array:
        def encode(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ kernel), None

        memory, _ = jax.lax.scan(encode, batch["source"], params["encoder"])

        def decode(x: jax.Array, kernels: jax.Array) -> tuple[jax.Array, None]:
            scores = jnp.einsum("bth,bsh->bts", x @ kernels[0], memory)
            return x + jax.nn.softmax(scores) @ memory @ kernels[1], None

        x, _ = jax.lax.scan(decode, batch["target"], params["decoder"])
        losses = jnp.square(x @ params["head"] - 1).mean(-1)
        return (losses * batch["mask"]).sum() / batch["mask"].sum()

    def step(state: Any, batch: Any) -> Any:
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = transformation.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    batch = {
        "source": jax.random.normal(keys[2], (8, 6, 16)),
        "target": jax.random.normal(keys[3], (8, 4, 16)),
        "mask": (jax.random.normal(keys[4], (8, 4)) > -0.2).astype(jnp.float32),
    }
    return step, (params, transformation.init(params)), batch


MODELS: dict[str, Callable[[], Training]] = {
    "gpt": decoder,
    "gpt_tied": lambda: decoder(tied=True),
    "gpt_scanned": lambda: decoder(scan_layers=True),
    "gpt_scanned_tied": lambda: decoder(scan_layers=True, tied=True),
    "mlp": perceptron,
    "encoder_decoder": encoder_decoder,
}
METHODS: dict[str, Any] = {
    "1_microbatch": autopar.ShardParallel(),
    "2_microbatches": autopar.ShardParallel(num_microbatches=2),
    "4_microbatches": autopar.ShardParallel(num_microbatches=4),
    "2_stages": autopar.PipelineParallel(num_stages=2, num_microbatches=4),
    "4_stages": autopar.PipelineParallel(num_stages=4, num_microbatches=4),
}
QUICK = [
    ("mlp", "2_microbatches"),
    ("mlp", "2_stages"),
    ("encoder_decoder", "4_microbatches"),
    ("encoder_decoder", "2_stages"),
    ("gpt_scanned_tied", "4_microbatches"),
    ("gpt", "4_stages"),
]


@pytest.mark.parametrize(
    ("model", "method"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(MODELS, METHODS)
    ],
)
def test_the_whole_state_is_that_of_the_full_batch(model: str, method: str) -> None:
    step, state, batch = MODELS[model]()
    expected, reference = state, jax.jit(step)
    parallel = autopar.parallelize(step, method=METHODS[method], donate_argnums=())
    for _ in range(NUM_STEPS):
        expected, wanted = reference(expected, batch)
        state, results = parallel(state, batch)
        for got, value in zip(
            jax.tree.leaves(results), jax.tree.leaves(wanted), strict=True
        ):
            np.testing.assert_allclose(got, value, rtol=RTOL)
    for (path, value), leaf in zip(
        jax.tree_util.tree_leaves_with_path(expected),
        jax.tree.leaves(state),
        strict=True,
    ):
        scale = float(np.abs(value).max(initial=0.0))
        np.testing.assert_allclose(
            leaf,
            value,
            rtol=RTOL,
            atol=2e-5 * scale + 1e-8,
            err_msg=jax.tree_util.keystr(path),
        )
