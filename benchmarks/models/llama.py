"""A Llama decoder: rotary positions, grouped queries, gated MLP, RMS norm.

Llama 2 and 3 (https://arxiv.org/abs/2307.09288, https://arxiv.org/abs/2407.21783).
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .layers import (
    at_least_float32,
    cast,
    dense,
    init_dense,
    init_embedding,
)
from .losses import cross_entropy
from .synthetic import make_sequences
from .workload import Batch, Model, Params


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder.

    Args:
        num_kv_heads: heads of keys and values, each shared by a group of query heads.
        width: of the gated MLP.
        rope_base: of the rotary frequencies.
        scan_layers: one `lax.scan` over stacked layers, or a Python loop.
        remat: recompute each layer in the backward pass (`jax.checkpoint`).
        compute_dtype: what parameters are cast to for the forward and backward pass.
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    width: int
    batch_size: int
    rope_base: float = 500_000.0
    scan_layers: bool = False
    remat: bool = False
    compute_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads or self.hidden // self.num_heads % 2:
            raise ValueError(
                f"`num_heads` must cut `hidden` {self.hidden} into heads of even size, "
                f"but got {self.num_heads}; change one of them."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_kv_heads` must divide `num_heads` {self.num_heads}, "
                f"but got {self.num_kv_heads}; change one of them."
            )

    @classmethod
    def tiny(cls) -> "Config":
        """Return sizes that train in seconds on a CPU."""
        return cls(
            vocab_size=128,
            seq_len=32,
            num_layers=2,
            hidden=64,
            num_heads=8,
            num_kv_heads=4,
            width=192,
            batch_size=16,
        )

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden // self.num_heads


# Llama 3 (Llama team, table 3), with its context of 8,192 tokens, in batches of 4M.
SIZES = {
    "llama": Config.tiny(),
    "llama-8b": Config(
        vocab_size=128256,
        seq_len=8192,
        num_layers=32,
        hidden=4096,
        num_heads=32,
        num_kv_heads=8,
        width=14336,
        batch_size=512,
    ),
    "llama-70b": Config(
        vocab_size=128256,
        seq_len=8192,
        num_layers=80,
        hidden=8192,
        num_heads=64,
        num_kv_heads=8,
        width=28672,
        batch_size=512,
    ),
}


def make_model(config: Config) -> Model:
    """Return the decoder of these sizes."""
    return Model(
        init=lambda key: (init_params(config, key), {}),
        loss=lambda params, _, batch, __: (lm_loss(config, params, batch), {}),
        make_batch=partial(make_batch, config),
    )


def init_params(config: Config, key: jax.Array) -> Params:
    """Return the parameters; `layers` is a list, or stacked with `scan_layers`."""
    token_key, layers_key, head_key = jax.random.split(key, 3)
    layer_keys = jax.random.split(layers_key, config.num_layers)
    if config.scan_layers:
        layers = jax.vmap(partial(init_layer, config))(layer_keys)
    else:
        layers = [init_layer(config, layer_key) for layer_key in layer_keys]
    return {
        "tokens": init_embedding(token_key, config.vocab_size, config.hidden),
        "layers": layers,
        "final_norm": init_rms_norm(config.hidden),
        "head": init_dense(head_key, config.hidden, config.vocab_size, bias=False),
    }


def init_layer(config: Config, key: jax.Array) -> Params:
    """Return the parameters of one decoder block; nothing has a bias."""
    keys = jax.random.split(key, 7)
    hidden, width = config.hidden, config.width
    kv_features = config.num_kv_heads * config.head_dim
    return {
        "attention_norm": init_rms_norm(hidden),
        "query": init_dense(keys[0], hidden, hidden, bias=False),
        "key": init_dense(keys[1], hidden, kv_features, bias=False),
        "value": init_dense(keys[2], hidden, kv_features, bias=False),
        "out": init_dense(keys[3], hidden, hidden, bias=False),
        "mlp_norm": init_rms_norm(hidden),
        "gate": init_dense(keys[4], hidden, width, bias=False),
        "up": init_dense(keys[5], hidden, width, bias=False),
        "down": init_dense(keys[6], width, hidden, bias=False),
    }


def init_rms_norm(features: int) -> Params:
    """Return the scale of an RMS norm."""
    return {"scale": jnp.ones(features, jnp.float32)}


def rms_norm(params: Params, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Divide the last dim of `x` by its root mean square, then scale it."""
    wide = at_least_float32(x)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + epsilon)).astype(x.dtype) * params["scale"]


def rotate(x: jax.Array, base: float) -> jax.Array:
    """Turn pairs of features of `x` `[batch, seq, heads, features]` by position.

    Feature i is paired with feature i + features / 2 (https://arxiv.org/abs/2104.09864,
    in the order of GPT-NeoX).
    """
    seq_len, features = x.shape[1], x.shape[-1]
    wide = at_least_float32(x)
    frequencies = base ** (-jnp.arange(0, features, 2, dtype=wide.dtype) / features)
    angles = jnp.arange(seq_len, dtype=wide.dtype)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = jnp.split(wide, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def forward(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Return the logits `[batch, seq, vocab]` of the token after each of `tokens`."""
    params = cast(params, config.compute_dtype)
    x = params["tokens"]["embedding"][tokens]
    block = partial(apply_layer, config)
    if config.remat:
        block = jax.checkpoint(block)
    if config.scan_layers:
        x, _ = jax.lax.scan(
            lambda x, layer: (block(x, layer), None), x, params["layers"]
        )
    else:
        for layer in params["layers"]:
            x = block(x, layer)
    return dense(params["head"], rms_norm(params["final_norm"], x))


def apply_layer(config: Config, x: jax.Array, layer: Params) -> jax.Array:
    """Return `x` after one block: attention, then a gated MLP, both residual."""
    x = x + attention(config, layer, rms_norm(layer["attention_norm"], x))
    normed = rms_norm(layer["mlp_norm"], x)
    gated = jax.nn.silu(dense(layer["gate"], normed)) * dense(layer["up"], normed)
    return x + dense(layer["down"], gated)


def attention(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """Return causal grouped-query attention of `x` `[batch, seq, hidden]` to itself."""
    batch_size, seq_len, hidden = x.shape
    groups, head_dim = config.num_kv_heads, config.head_dim

    def heads(name: str, number: int) -> jax.Array:
        return dense(params[name], x).reshape(batch_size, seq_len, number, head_dim)

    queries = rotate(heads("query", config.num_heads), config.rope_base)
    keys = rotate(heads("key", groups), config.rope_base)
    values = heads("value", groups)
    queries = queries.reshape(batch_size, seq_len, groups, -1, head_dim)
    scores = jnp.einsum("bqgrd,bkgd->bgrqk", queries, keys) / head_dim**0.5
    scores = at_least_float32(scores)
    rows = jax.lax.broadcasted_iota(jnp.int32, (seq_len, seq_len), 0)
    columns = jax.lax.broadcasted_iota(jnp.int32, (seq_len, seq_len), 1)
    scores = jnp.where(rows >= columns, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bgrqk,bkgd->bqgrd", weights, values)
    return dense(params["out"], mixed.reshape(batch_size, seq_len, hidden))


def lm_loss(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Return the mean cross-entropy of the next token."""
    logits = forward(config, params, batch["tokens"])
    return jnp.mean(cross_entropy(logits, batch["labels"]))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """Return tokens, and the tokens after them."""
    shape = config.batch_size, config.seq_len + 1
    sequences = make_sequences(key, *shape, config.vocab_size)
    return {"tokens": sequences[:, :-1], "labels": sequences[:, 1:]}
