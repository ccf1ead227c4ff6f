"""A GPT decoder: pre-norm blocks, causal attention, next-token cross-entropy."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from .layers import (
    at_least_float32,
    cast,
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


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder and the ways to write it.

    Args:
        scan_layers: one `lax.scan` over stacked layers, or a Python loop.
        remat: recompute each layer in the backward pass (`jax.checkpoint`).
        tied: project to logits with the token embedding.
        fused_qkv: one matrix for queries, keys and values, or three.
        fused_form: the fused kernel as `[hidden, 3 * hidden]`, cut by `jnp.split`
            ("split"), or as `[hidden, 3, hidden]`, indexed ("stacked").
        dropout: rate after the embedding, on attention weights and on each branch.
        loss: cross-entropy by `log_softmax` and `take_along_axis`, or optax's own.
        masked_loss: mean over the tokens marked in `batch["mask"]`, or over all.
        compute_dtype: what parameters are cast to for the forward and backward pass.
        mlp_ratio: width of the MLP over `hidden`.
        wide_scores: attention weights in float32 at least, or in the compute dtype.
    """

    vocab_size: int
    seq_len: int
    num_layers: int
    hidden: int
    num_heads: int
    batch_size: int
    scan_layers: bool = False
    remat: bool = False
    tied: bool = False
    fused_qkv: bool = False
    fused_form: Literal["split", "stacked"] = "split"
    dropout: float = 0.0
    loss: Literal["log_softmax", "optax"] = "log_softmax"
    masked_loss: bool = False
    compute_dtype: str | None = None
    mlp_ratio: int = 4
    wide_scores: bool = True

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


def _sized(num_layers: int, hidden: int, num_heads: int) -> Config:
    return replace(
        Config.tiny(),
        vocab_size=51200,
        seq_len=1024,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=num_heads,
        batch_size=1024,
    )


# The sizes of the Alpa benchmarks (benchmark/alpa/suite_manual_gpt.py).
SIZES = {
    "gpt": Config.tiny(),
    "gpt-125m": _sized(num_layers=12, hidden=768, num_heads=12),
    "gpt-350m": _sized(num_layers=24, hidden=1024, num_heads=16),
    "gpt-760m": _sized(num_layers=24, hidden=1536, num_heads=16),
    "gpt-1.3b": _sized(num_layers=24, hidden=2048, num_heads=32),
    "gpt-2.6b": _sized(num_layers=32, hidden=2560, num_heads=32),
    "gpt-6.7b": _sized(num_layers=32, hidden=4096, num_heads=32),
    "gpt-15b": _sized(num_layers=48, hidden=5120, num_heads=40),
    "gpt-39b": _sized(num_layers=48, hidden=8192, num_heads=64),
    "gpt-76b": _sized(num_layers=60, hidden=10240, num_heads=80),
    # The size of GPT-3 (https://arxiv.org/abs/2005.14165, table 2.1).
    "gpt-175b": replace(
        _sized(num_layers=96, hidden=12288, num_heads=96), seq_len=2048
    ),
}


def make_model(config: Config) -> Model:
    """Return the decoder of these sizes."""
    return Model(
        init=lambda key: (init_params(config, key), {}),
        loss=lambda params, _, batch, rng: (lm_loss(config, params, batch, rng), {}),
        make_batch=partial(make_batch, config),
        needs_rng=config.dropout > 0.0,
    )


def init_params(config: Config, key: jax.Array) -> Params:
    """Return the parameters; `layers` is a list, or stacked with `scan_layers`."""
    token_key, position_key, layers_key, head_key = jax.random.split(key, 4)
    layer_keys = jax.random.split(layers_key, config.num_layers)
    params: Params = {
        "tokens": init_embedding(token_key, config.vocab_size, config.hidden),
        "positions": init_embedding(position_key, config.seq_len, config.hidden),
        "final_norm": init_layer_norm(config.hidden),
    }
    if config.scan_layers:
        params["layers"] = jax.vmap(partial(init_layer, config))(layer_keys)
    else:
        params["layers"] = [init_layer(config, layer_key) for layer_key in layer_keys]
    if not config.tied:
        params["head"] = init_dense(
            head_key, config.hidden, config.vocab_size, bias=False
        )
    return params


def init_layer(config: Config, key: jax.Array) -> Params:
    """Return the parameters of one decoder block."""
    attention_key, up_key, down_key = jax.random.split(key, 3)
    hidden, width = config.hidden, config.mlp_ratio * config.hidden
    return {
        "attention_norm": init_layer_norm(hidden),
        "attention": init_attention(config, attention_key),
        "mlp_norm": init_layer_norm(hidden),
        "mlp_up": init_dense(up_key, hidden, width),
        "mlp_down": init_dense(down_key, width, hidden),
    }


def init_attention(config: Config, key: jax.Array) -> Params:
    """Return the four projections of attention, three of them fused on request."""
    query_key, key_key, value_key, out_key = jax.random.split(key, 4)
    hidden = config.hidden
    out = init_dense(out_key, hidden, hidden)
    if not config.fused_qkv:
        return {
            "query": init_dense(query_key, hidden, hidden),
            "key": init_dense(key_key, hidden, hidden),
            "value": init_dense(value_key, hidden, hidden),
            "out": out,
        }
    qkv = init_dense(query_key, hidden, 3 * hidden)
    if config.fused_form == "stacked":
        qkv = {
            "kernel": qkv["kernel"].reshape(hidden, 3, hidden),
            "bias": qkv["bias"].reshape(3, hidden),
        }
    return {"qkv": qkv, "out": out}


def forward(
    config: Config, params: Params, tokens: jax.Array, rng: jax.Array | None = None
) -> jax.Array:
    """Return the logits `[batch, seq, vocab]` of the token after each of `tokens`."""
    params = cast(params, config.compute_dtype)
    embedding_key, layer_keys = None, None
    if rng is not None:
        embedding_key, layers_key = jax.random.split(rng)
        layer_keys = jax.random.split(layers_key, config.num_layers)

    positions = jnp.arange(tokens.shape[1])
    x = params["tokens"]["embedding"][tokens]
    x = x + params["positions"]["embedding"][positions]
    x = dropout(embedding_key, x, config.dropout)

    block = partial(apply_layer, config)
    if config.remat:
        block = jax.checkpoint(block)
    if config.scan_layers:
        layers = (params["layers"], layer_keys)
        x, _ = jax.lax.scan(lambda x, layer: (block(x, *layer), None), x, layers)
    else:
        for index, layer in enumerate(params["layers"]):
            x = block(x, layer, None if layer_keys is None else layer_keys[index])

    x = layer_norm(params["final_norm"], x)
    if config.tied:
        return x @ params["tokens"]["embedding"].T
    return dense(params["head"], x)


def apply_layer(
    config: Config, x: jax.Array, layer: Params, key: jax.Array | None
) -> jax.Array:
    """Return `x` after one block: attention, then a gelu MLP, both residual."""
    weights_key, attention_key, mlp_key = (
        (None, None, None) if key is None else jax.random.split(key, 3)
    )
    normed = layer_norm(layer["attention_norm"], x)
    attended = attention(config, layer["attention"], normed, weights_key)
    x = x + dropout(attention_key, attended, config.dropout)

    normed = layer_norm(layer["mlp_norm"], x)
    up = jax.nn.gelu(dense(layer["mlp_up"], normed))
    return x + dropout(mlp_key, dense(layer["mlp_down"], up), config.dropout)


def attention(
    config: Config, params: Params, x: jax.Array, key: jax.Array | None
) -> jax.Array:
    """Return causal multi-head attention of `x` `[batch, seq, hidden]` to itself."""
    batch_size, seq_len, hidden = x.shape
    head_dim = hidden // config.num_heads

    def split_heads(y: jax.Array) -> jax.Array:
        y = y.reshape(batch_size, seq_len, config.num_heads, head_dim)
        return y.transpose(0, 2, 1, 3)

    queries, keys, values = map(split_heads, project_qkv(config, params, x))
    scores = queries @ keys.swapaxes(-1, -2) / head_dim**0.5
    if config.wide_scores:
        scores = at_least_float32(scores)
    rows = jax.lax.broadcasted_iota(jnp.int32, (seq_len, seq_len), 0)
    columns = jax.lax.broadcasted_iota(jnp.int32, (seq_len, seq_len), 1)
    scores = jnp.where(rows >= columns, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores).astype(x.dtype)
    weights = dropout(key, weights, config.dropout)

    mixed = (weights @ values).transpose(0, 2, 1, 3)
    return dense(params["out"], mixed.reshape(batch_size, seq_len, hidden))


def project_qkv(
    config: Config, params: Params, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return queries, keys and values, each `[batch, seq, hidden]`."""
    if not config.fused_qkv:
        return (
            dense(params["query"], x),
            dense(params["key"], x),
            dense(params["value"], x),
        )
    if config.fused_form == "split":
        queries, keys, values = jnp.split(dense(params["qkv"], x), 3, axis=-1)
        return queries, keys, values
    qkv = jnp.einsum("bsh,hcd->bscd", x, params["qkv"]["kernel"])
    qkv = qkv + params["qkv"]["bias"]
    return qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]


def lm_loss(
    config: Config, params: Params, batch: Batch, rng: jax.Array | None = None
) -> jax.Array:
    """Return the mean cross-entropy of the next token."""
    logits = forward(config, params, batch["tokens"], rng)
    if config.loss == "optax":
        losses = optax.softmax_cross_entropy_with_integer_labels(
            at_least_float32(logits), batch["labels"]
        )
    else:
        losses = cross_entropy(logits, batch["labels"])
    if config.masked_loss:
        return weighted_mean(losses, batch["mask"])
    return jnp.mean(losses)


def make_batch(config: Config, key: jax.Array) -> Batch:
    """Return tokens, the tokens after them and, for a masked loss, their mask."""
    token_key, length_key = jax.random.split(key)
    batch_size, seq_len = config.batch_size, config.seq_len
    sequences = make_sequences(token_key, batch_size, seq_len + 1, config.vocab_size)
    batch = {"tokens": sequences[:, :-1], "labels": sequences[:, 1:]}
    if config.masked_loss:
        shape = (batch_size, 1)
        lengths = jax.random.randint(length_key, shape, 1, seq_len + 1, jnp.int32)
        batch["mask"] = (jnp.arange(seq_len) < lengths).astype(jnp.float32)
    return batch
