"""Small models with AdamW and clipping, and what their training is compared with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autopar
from benchmarks.models import gpt, mlp, unet
from benchmarks.models.training import make_workload
from benchmarks.models.workload import Model

RTOL = 2e-4
Training = tuple[Callable[..., Any], Any, Any]


def optimizer() -> optax.GradientTransformation:
    """An eps above rounding noise, which Adam would blow up to full steps."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3, eps=1e-4))


def training_of(name: str, model: Model) -> Training:
    """The step, its state and a batch."""
    workload = make_workload(name, model, optimizer())
    return workload.step, workload.init(jax.random.key(0)), workload.make_batch(0)


def decoder(num_layers: int = 4, batch_size: int = 8, **options: Any) -> Training:
    """GPT, whose loss is the mean over the tokens that a mask marks."""
    sizes = 32, 8, num_layers, 32, 4, batch_size
    config = gpt.Config(*sizes, masked_loss=True, **options)
    return training_of("gpt", gpt.make_model(config))


def perceptron(config: mlp.Config | None = None) -> Training:
    return training_of("mlp", mlp.make_model(config or mlp.Config.tiny()))


def image_segmentation(batch_size: int) -> Training:
    """A U-Net of two levels: skip connections from the first stages to the last."""
    config = unet.Config(8, 4, 2, 3, batch_size)
    return training_of("unet", unet.make_model(config))


def encoder_decoder(num_layers: int = 2, batch_size: int = 8) -> Training:
    """Two towers of scanned layers; each layer of the second attends to the first."""
    keys = jax.random.split(jax.random.key(0), 8)
    encoder = jax.random.normal(keys[0], (num_layers, 16, 16)) * 0.3
    decoder = jax.random.normal(keys[1], (num_layers, 2, 16, 16)) * 0.3
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

    mask = jax.random.normal(keys[4], (batch_size, 4)) > -0.2
    batch = {
        "source": jax.random.normal(keys[2], (batch_size, 6, 16)),
        "target": jax.random.normal(keys[3], (batch_size, 4, 16)),
        "mask": mask.astype(jnp.float32),
    }
    return step, (params, transformation.init(params)), batch


def assert_trains_as_one_device(
    training: Training, num_steps: int, **options: Any
) -> None:
    """Results of every step, and the whole state in the end, are those of `jax.jit`.

    `options` are those of `autopar.parallelize`.
    """
    step, state, batch = training
    expected, reference = state, jax.jit(step)
    parallel = autopar.parallelize(step, donate_argnums=(), **options)
    for _ in range(num_steps):
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
