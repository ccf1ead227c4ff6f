"""A T5 encoder-decoder: relative position biases, cross attention, RMS norm.

T5 1.0 (https://arxiv.org/abs/1910.10683, section 2.1): no biases, scores that are not
scaled, one table of position biases for all layers of a stack, tied embeddings.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .layers import at_least_float32, dense, init_dense, init_embedding
from .llama import init_rms_norm, rms_norm
from .losses import cross_entropy, weighted_mean
from .synthetic import make_sequences
from .workload import Batch, Model, Params


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder and the decoder, which are alike.

    Args:
        num_layers: of the encoder, and again of the decoder.
        head_dim: of attention, whose width `num_heads * head_dim` may differ from
            `hidden`.
        width: of the MLP.
        num_buckets: distances that have a bias of their own; half of them for each
            direction where attention looks both ways.
        max_distance: from which on distances share the last bucket.
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    hidden: int
    num_heads: int
    head_dim: int
    width: int
    batch_size: int
    num_buckets: int = 32
    max_distance: int = 128

    @classmethod
    def tiny(cls) -> "Config":
        """Return sizes that train in seconds on a CPU."""
        return cls(
            vocab_size=128,
            seq_len=32,
            num_layers=1,
            hidden=64,
            num_heads=8,
            head_dim=8,
            width=128,
            batch_size=16,
            num_buckets=8,
            max_distance=32,
        )


def _sized(
    num_layers: int, hidden: int, num_heads: int, head_dim: int, width: int
) -> Config:
    return Config(
        *(32128, 512, num_layers, hidden, num_heads, head_dim, width), batch_size=128
    )


# Section 3.7; the vocabulary is padded to a multiple of 128.
SIZES = {
    "t5": Config.tiny(),
    "t5-small": _sized(6, 512, 8, 64, 2048),
    "t5-base": _sized(12, 768, 12, 64, 3072),
    "t5-large": _sized(24, 1024, 16, 64, 4096),
    "t5-3b": _sized(24, 1024, 32, 128, 16384),
    "t5-11b": _sized(24, 1024, 128, 128, 65536),
}


def make_model(config: Config) -> Model:
    """Return the encoder-decoder of these sizes."""
    return Model(
        init=lambda key: (init_params(config, key), {}),
        loss=lambda params, _, batch, __: (seq_loss(config, params, batch), {}),
        make_batch=partial(make_batch, config),
    )


def init_params(config: Config, key: jax.Array) -> Params:
    """Return the embedding and the two stacks."""
    token_key, encoder_key, decoder_key = jax.random.split(key, 3)
    return {
        "tokens": init_embedding(token_key, config.vocab_size, config.hidden),
        "encoder": init_stack(config, encoder_key, is_decoder=False),
        "decoder": init_stack(config, decoder_key, is_decoder=True),
    }


def init_stack(config: Config, key: jax.Array, *, is_decoder: bool) -> Params:
    """Return the layers, the final norm and the table of position biases."""
    bias_key, layers_key = jax.random.split(key)
    keys = jax.random.split(layers_key, config.num_layers)
    return {
        "positions": init_embedding(bias_key, config.num_buckets, config.num_heads),
        "layers": [init_layer(config, each, is_decoder=is_decoder) for each in keys],
        "final_norm": init_rms_norm(config.hidden),
    }


def init_layer(config: Config, key: jax.Array, *, is_decoder: bool) -> Params:
    """Return the parameters of one block, with cross attention in the decoder."""
    self_key, cross_key, up_key, down_key = jax.random.split(key, 4)
    layer = {
        "attention_norm": init_rms_norm(config.hidden),
        "attention": init_attention(config, self_key),
        "mlp_norm": init_rms_norm(config.hidden),
        "mlp_up": init_dense(up_key, config.hidden, config.width, bias=False),
        "mlp_down": init_dense(down_key, config.width, config.hidden, bias=False),
    }
    if is_decoder:
        layer["cross_norm"] = init_rms_norm(config.hidden)
        layer["cross"] = init_attention(config, cross_key)
    return layer


def init_attention(config: Config, key: jax.Array) -> Params:
    """Return the four projections of attention."""
    hidden, width = config.hidden, config.num_heads * config.head_dim
    sizes = {name: (hidden, width) for name in ("query", "key", "value")}
    sizes["out"] = (width, hidden)
    keys = jax.random.split(key, len(sizes))
    return {
        name: init_dense(each, *size, bias=False)
        for each, (name, size) in zip(keys, sizes.items(), strict=True)
    }


def forward(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Return the logits `[batch, seq, vocab]` of each token of the target."""
    table = params["tokens"]["embedding"]
    source = encode(config, params["encoder"], table[batch["inputs"]])
    decoded = decode(config, params["decoder"], table[batch["targets"]], source)
    return decoded * config.hidden**-0.5 @ table.T


def encode(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """Return `x` `[batch, seq, hidden]` after the encoder."""
    bias = position_bias(config, params["positions"], x.shape[1], is_causal=False)
    for layer in params["layers"]:
        normed = rms_norm(layer["attention_norm"], x)
        x = x + attention(config, layer["attention"], normed, normed, bias)
        x = x + mlp(layer, x)
    return rms_norm(params["final_norm"], x)


def decode(
    config: Config, params: Params, x: jax.Array, source: jax.Array
) -> jax.Array:
    """Return `x` after the decoder, which also attends to the encoded `source`."""
    bias = position_bias(config, params["positions"], x.shape[1], is_causal=True)
    for layer in params["layers"]:
        normed = rms_norm(layer["attention_norm"], x)
        x = x + attention(config, layer["attention"], normed, normed, bias)
        normed = rms_norm(layer["cross_norm"], x)
        x = x + attention(config, layer["cross"], normed, source, None)
        x = x + mlp(layer, x)
    return rms_norm(params["final_norm"], x)


def mlp(layer: Params, x: jax.Array) -> jax.Array:
    """Return what a block's relu MLP adds to `x`."""
    up = jax.nn.relu(dense(layer["mlp_up"], rms_norm(layer["mlp_norm"], x)))
    return dense(layer["mlp_down"], up)


def attention(
    config: Config,
    params: Params,
    x: jax.Array,
    source: jax.Array,
    bias: jax.Array | None,
) -> jax.Array:
    """Return attention of `x` to `source`, scores biased by `[heads, seq, seq]`."""

    def heads(name: str, y: jax.Array) -> jax.Array:
        shape = (*y.shape[:2], config.num_heads, config.head_dim)
        return dense(params[name], y).reshape(shape)

    queries, keys, values = (
        heads("query", x),
        heads("key", source),
        heads("value", source),
    )
    scores = at_least_float32(jnp.einsum("bqnd,bknd->bnqk", queries, keys))
    if bias is not None:
        scores = scores + bias
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bnqk,bknd->bqnd", weights, values)
    return dense(params["out"], mixed.reshape(*x.shape[:2], -1))


def position_bias(
    config: Config, params: Params, seq_len: int, *, is_causal: bool
) -> jax.Array:
    """Return a bias `[heads, query, key]` by distance; causal ones hide what is ahead.

    Small distances have a bucket each, larger ones share buckets by their logarithm.
    """
    positions = jnp.arange(seq_len, dtype=jnp.int32)
    ahead = positions[None, :] - positions[:, None]
    number, distance = config.num_buckets, -ahead
    bucket = jnp.zeros_like(ahead)
    if not is_causal:
        number //= 2
        bucket = jnp.where(ahead > 0, number, 0)
        distance = abs(ahead)
    distance = jnp.maximum(distance, 0)
    exact = number // 2
    span = math.log(config.max_distance / exact)
    logs = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / span
    shared = exact + (logs * (number - exact)).astype(jnp.int32)
    shared = jnp.minimum(shared, number - 1)
    bucket = bucket + jnp.where(distance < exact, distance, shared)
    bias = at_least_float32(params["embedding"])[bucket].transpose(2, 0, 1)
    return jnp.where(ahead > 0, jnp.finfo(bias.dtype).min, bias) if is_causal else bias


def seq_loss(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Return the mean cross-entropy of the target's tokens that are not padding."""
    losses = cross_entropy(forward(config, params, batch), batch["labels"])
    return weighted_mean(losses, batch["weights"])


def make_batch(config: Config, key: jax.Array) -> Batch:
    """Return source sequences, and the same sequences as targets one token late."""
    token_key, length_key = jax.random.split(key)
    batch_size, seq_len = config.batch_size, config.seq_len
    inputs = make_sequences(token_key, batch_size, seq_len, config.vocab_size)
    shape = (batch_size, 1)
    lengths = jax.random.randint(length_key, shape, 1, seq_len + 1, jnp.int32)
    return {
        "inputs": inputs,
        "targets": jnp.pad(inputs[:, :-1], ((0, 0), (1, 0))),
        "labels": inputs,
        "weights": (jnp.arange(seq_len) < lengths).astype(jnp.float32),
    }
