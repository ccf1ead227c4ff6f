"""The demo's train step: a byte-level GPT in plain JAX with its own Adam.

Nothing here knows of autopar: this is ordinary single-device code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import dot_product_attention, gelu, log_softmax, standardize

Params = dict[str, Any]
Batch = dict[str, jax.Array]

_VOCAB_SIZE = 256  # bytes


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of its batches, and Adam's constants."""

    num_layers: int = 2
    hidden: int = 64
    num_heads: int = 8
    seq_len: int = 64
    batch_size: int = 32
    learning_rate: float = 2e-3
    epsilon: float = 1e-5  # so large that rounding is not amplified


class TrainState(NamedTuple):
    """What a step reads and returns again; the moments are trees like `params`."""

    params: Params
    mean: Params
    square: Params
    step: jax.Array


def init_state(config: Config, seed: int = 0) -> TrainState:
    """Parameters drawn at random, layers stacked along dim 0, and zero moments."""
    hidden, layers = config.hidden, (config.num_layers, config.hidden)
    shapes = {
        "bytes": (_VOCAB_SIZE, hidden),
        "positions": (config.seq_len, hidden),
        "layers": {
            **{each: (*layers, hidden) for each in ("query", "key", "value", "out")},
            "up": (*layers, 4 * hidden),
            "down": (config.num_layers, 4 * hidden, hidden),
        },
    }
    flat, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(flat))
    drawn = [0.02 * jax.random.normal(*pair) for pair in zip(keys, flat, strict=True)]
    params = jax.tree.unflatten(tree, drawn)
    mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return TrainState(params, mean, square, jnp.zeros((), jnp.int32))


def make_train_step(
    config: Config,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The function `train_step(state, batch) -> (state, metrics)`.

    A batch holds int32 `bytes` and `labels`, the bytes that follow them, both
    `[batch_size, seq_len]`.
    """

    def loss_of(params: Params, batch: Batch) -> jax.Array:
        """Mean negative log-likelihood of the labels, in nats a byte."""
        log_probs = log_softmax(forward(config, params, batch["bytes"]))
        labels = batch["labels"][..., None]
        return -jnp.mean(jnp.take_along_axis(log_probs, labels, axis=-1))

    def train_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, gradients = jax.value_and_grad(loss_of)(state.params, batch)
        return adam(config, state, gradients), {"loss": loss}

    return train_step


def forward(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits `[batch, seq, 256]` of the byte after each of `tokens` `[batch, seq]`."""
    x = params["bytes"][tokens] + params["positions"]

    def layer(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        y, heads = standardize(x), (*x.shape[:2], config.num_heads, -1)
        names = ("query", "key", "value")
        operands = ((y @ layer[name]).reshape(heads) for name in names)
        mixed = dot_product_attention(*operands, is_causal=True)
        x = x + mixed.reshape(x.shape) @ layer["out"]
        return x + gelu(standardize(x) @ layer["up"]) @ layer["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return standardize(x) @ params["bytes"].T


def adam(config: Config, state: TrainState, gradients: Params) -> TrainState:
    """One Adam update (Kingma and Ba 2015)."""
    step = state.step + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradients)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, state.square, gradients)

    def update(param: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        m, s = m / (1 - 0.9**step), s / (1 - 0.95**step)
        return param - config.learning_rate * m / (jnp.sqrt(s) + config.epsilon)

    params = jax.tree.map(update, state.params, mean, square)
    return TrainState(params, mean, square, step)
