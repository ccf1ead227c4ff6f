"""A BERT encoder: post-norm blocks, padding mask, masked language modelling loss."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .layers import (
    at_least_float32,
    dense,
    dropout,
    init_dense,
    init_embedding,
    init_layer_norm,
    layer_norm,
)
from .losses import cross_entropy, weighted_mean
from .synthetic import make_sequences
from .workload import Batch, Model, Params

_MASK_TOKEN = 0
_MASKED_FRACTION = 0.15


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder."""

    vocab_size: int
    seq_len: int
    num_layers: int
    hidden: int
    num_heads: int
    batch_size: int
    num_types: int = 2
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide `hidden` {self.hidden}, "
                f"but got {self.num_heads}; change one of them."
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
            batch_size=16,
        )


# The published vocabulary of 30522 words, padded to a multiple of 64.
SIZES = {
    "bert": Config.tiny(),
    "bert-base": Config(30528, 512, 12, 768, 12, batch_size=256),
    "bert-large": Config(30528, 512, 24, 1024, 16, batch_size=256),
}


def make_model(config: Config) -> Model:
    """Return the encoder of these sizes."""
    return Model(
        init=lambda key: (init_params(config, key), {}),
        loss=lambda params, _, batch, rng: (mlm_loss(config, params, batch, rng), {}),
        make_batch=partial(make_batch, config),
        needs_rng=config.dropout > 0.0,
    )


def init_params(config: Config, key: jax.Array) -> Params:
    """Return the parameters of embeddings, layers and the output head."""
    token_key, position_key, type_key, layers_key, head_key = jax.random.split(key, 5)
    hidden = config.hidden
    return {
        "embeddings": {
            "tokens": init_embedding(token_key, config.vocab_size, hidden),
            "positions": init_embedding(position_key, config.seq_len, hidden),
            "types": init_embedding(type_key, config.num_types, hidden),
            "norm": init_layer_norm(hidden),
        },
        "layers": [
            init_layer(config, layer_key)
            for layer_key in jax.random.split(layers_key, config.num_layers)
        ],
        "head": {
            "transform": init_dense(head_key, hidden, hidden),
            "norm": init_layer_norm(hidden),
            "bias": jnp.zeros(config.vocab_size, jnp.float32),
        },
    }


def init_layer(config: Config, key: jax.Array) -> Params:
    """Return the parameters of one block; attention kernels keep a dim for heads."""
    query_key, key_key, value_key, out_key, up_key, down_key = jax.random.split(key, 6)
    hidden, num_heads = config.hidden, config.num_heads
    head_dim = hidden // num_heads

    def init_projection(projection_key: jax.Array) -> Params:
        flat = init_dense(projection_key, hidden, hidden)
        return {
            "kernel": flat["kernel"].reshape(hidden, num_heads, head_dim),
            "bias": flat["bias"].reshape(num_heads, head_dim),
        }

    out = init_dense(out_key, hidden, hidden)
    return {
        "query": init_projection(query_key),
        "key": init_projection(key_key),
        "value": init_projection(value_key),
        "out": {
            "kernel": out["kernel"].reshape(num_heads, head_dim, hidden),
            "bias": out["bias"],
        },
        "attention_norm": init_layer_norm(hidden),
        "mlp_up": init_dense(up_key, hidden, 4 * hidden),
        "mlp_down": init_dense(down_key, 4 * hidden, hidden),
        "mlp_norm": init_layer_norm(hidden),
    }


def forward(
    config: Config, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Return the logits `[batch, seq, vocab]` of the token at each position."""
    keys = [None] * (config.num_layers + 1)
    if rng is not None:
        keys = list(jax.random.split(rng, config.num_layers + 1))

    embeddings = params["embeddings"]
    token_table = embeddings["tokens"]["embedding"]
    x = jnp.take(token_table, batch["tokens"], axis=0)
    x = x + embeddings["positions"]["embedding"]
    x = x + jnp.take(embeddings["types"]["embedding"], batch["types"], axis=0)
    x = dropout(keys[0], layer_norm(embeddings["norm"], x), config.dropout)

    # One additive mask for all layers: nothing attends to padding.
    padding = jnp.where(batch["padding_mask"], 0.0, -1e9)[:, None, None, :]
    for layer, layer_key in zip(params["layers"], keys[1:], strict=True):
        x = apply_layer(config, layer, x, padding, layer_key)

    head = params["head"]
    x = layer_norm(head["norm"], jax.nn.gelu(dense(head["transform"], x)))
    return jnp.einsum("bsh,vh->bsv", x, token_table) + head["bias"]


def apply_layer(
    config: Config,
    layer: Params,
    x: jax.Array,
    padding: jax.Array,
    key: jax.Array | None,
) -> jax.Array:
    """Return `x` after attention and an exact-gelu MLP, each normed after its sum."""
    attention_key, mlp_key = (None, None) if key is None else jax.random.split(key)
    attended = attention(layer, x, padding)
    attended = dropout(attention_key, attended, config.dropout)
    x = layer_norm(layer["attention_norm"], x + attended)

    up = jax.nn.gelu(dense(layer["mlp_up"], x), approximate=False)
    down = dropout(mlp_key, dense(layer["mlp_down"], up), config.dropout)
    return layer_norm(layer["mlp_norm"], x + down)


def attention(layer: Params, x: jax.Array, padding: jax.Array) -> jax.Array:
    """Return multi-head attention of `x` to all that `padding` leaves visible."""

    def project(name: str) -> jax.Array:
        projected = jnp.einsum("bsh,hnd->bsnd", x, layer[name]["kernel"])
        return projected + layer[name]["bias"]

    queries, keys, values = project("query"), project("key"), project("value")
    scores = jnp.einsum("bqnd,bknd->bnqk", queries, keys)
    scores = at_least_float32(scores) * queries.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores + padding, axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bnqk,bknd->bqnd", weights, values)
    out = layer["out"]
    return jnp.einsum("bqnd,ndh->bqh", mixed, out["kernel"]) + out["bias"]


def mlm_loss(
    config: Config, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Return the mean cross-entropy of the hidden tokens."""
    logits = forward(config, params, batch, rng)
    return weighted_mean(cross_entropy(logits, batch["labels"]), batch["weights"])


def make_batch(config: Config, key: jax.Array) -> Batch:
    """Return padded sentence pairs with some tokens hidden, and the hidden tokens."""
    token_key, length_key, mask_key = jax.random.split(key, 3)
    batch_size, seq_len = config.batch_size, config.seq_len
    labels = make_sequences(token_key, batch_size, seq_len, config.vocab_size)
    shape = (batch_size, 1)
    minimum = seq_len // 2
    lengths = jax.random.randint(length_key, shape, minimum, seq_len + 1, jnp.int32)
    positions = jnp.arange(seq_len, dtype=jnp.int32)
    is_token = positions < lengths
    hidden = jax.random.bernoulli(mask_key, _MASKED_FRACTION, labels.shape) & is_token
    return {
        "tokens": jnp.where(hidden, _MASK_TOKEN, labels),
        "types": (positions >= lengths // 2).astype(jnp.int32),
        "padding_mask": is_token,
        "labels": labels,
        "weights": hidden.astype(jnp.float32),
    }
