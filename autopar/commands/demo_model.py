"""The demo's train step: a byte-level GPT in plain JAX with its own AdamW.

Nothing here knows of autopar: this is ordinary single-device code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Params = dict[str, Any]
Batch = dict[str, jax.Array]

_VOCAB_SIZE = 256  # bytes


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of its batches, and AdamW's constants."""

    num_layers: int = 2
    hidden: int = 64
    num_heads: int = 8
    seq_len: int = 64
    batch_size: int = 32
    learning_rate: float = 2e-3
    warmup_steps: int = 10
    weight_decay: float = 0.01
    epsilon: float = 1e-5  # so large that rounding is not amplified


class TrainState(NamedTuple):
    """What a step reads and returns again; the moments are trees like `params`."""

    params: Params
    mean: Params
    square: Params
    step: jax.Array


def init_state(config: Config, seed: int = 0) -> TrainState:
    """Parameters drawn at random, layers stacked along dim 0, and zero moments."""
    hidden, num_layers = config.hidden, config.num_layers
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape, jnp.float32)

    params = {
        "bytes": normal(_VOCAB_SIZE, hidden),
        "positions": normal(config.seq_len, hidden),
        "layers": {
            "attention_norm": jnp.ones((num_layers, hidden)),
            "query": normal(num_layers, hidden, hidden),
            "key": normal(num_layers, hidden, hidden),
            "value": normal(num_layers, hidden, hidden),
            "out": normal(num_layers, hidden, hidden),
            "mlp_norm": jnp.ones((num_layers, hidden)),
            "up": normal(num_layers, hidden, 4 * hidden),
            "down": normal(num_layers, 4 * hidden, hidden),
        },
        "final_norm": jnp.ones(hidden),
    }
    mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return TrainState(params, mean, square, jnp.zeros((), jnp.int32))


def make_train_step(
    config: Config,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """The function `train_step(state, batch) -> (state, metrics)`.

    A batch holds int32 `bytes` and `labels`, the bytes that follow them, both
    `[batch_size, seq_len]`.
    """

    def train_step(
        state: TrainState, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_of(params: Params) -> jax.Array:
            logits = forward(config, params, batch["bytes"])
            return cross_entropy(logits, batch["labels"])

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return adamw(config, state, gradients), {"loss": loss}

    return train_step


def forward(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Logits `[batch, seq, 256]` of the byte after each of `tokens` `[batch, seq]`."""
    x = params["bytes"][tokens] + params["positions"]

    def layer(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x = x + attention(config, layer, rms_norm(x, layer["attention_norm"]))
        up = rms_norm(x, layer["mlp_norm"]) @ layer["up"]
        return x + jax.nn.gelu(up) @ layer["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return rms_norm(x, params["final_norm"]) @ params["bytes"].T


def attention(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """Causal attention of `x` `[batch, seq, hidden]` to itself, in several heads."""
    batch_size, seq_len, hidden = x.shape
    head_dim = hidden // config.num_heads

    def heads(name: str) -> jax.Array:
        y = x @ layer[name]
        return y.reshape(batch_size, seq_len, config.num_heads, head_dim)

    queries, keys, values = heads("query"), heads("key"), heads("value")
    scores = jnp.einsum("bqhd,bkhd->bhqk", queries, keys) / head_dim**0.5
    causal = jnp.arange(seq_len)[:, None] >= jnp.arange(seq_len)
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, values)
    return mixed.reshape(batch_size, seq_len, hidden) @ layer["out"]


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x` divided by the root of its mean square along the last dim, then scaled."""
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + 1e-6) * scale


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean negative log-likelihood of `labels`, in nats a byte."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probs, labels[..., None], axis=-1))


def adamw(config: Config, state: TrainState, gradients: Params) -> TrainState:
    """One AdamW update (Loshchilov and Hutter 2019), after a linear warm-up."""
    step = state.step + 1
    warmup = jnp.minimum(1.0, step / config.warmup_steps)
    rate = config.learning_rate * warmup
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.mean, gradients)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, state.square, gradients)

    def update(param: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        m, s = m / (1 - 0.9**step), s / (1 - 0.95**step)
        return param - rate * (
            m / (jnp.sqrt(s) + config.epsilon) + config.weight_decay * param
        )

    params = jax.tree.map(update, state.params, mean, square)
    return TrainState(params, mean, square, step)
