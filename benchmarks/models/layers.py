"""Layers that several models share: dense, layer norm, embedding, dropout."""

import jax
import jax.numpy as jnp
from jax.nn import initializers

from .workload import Params


def init_dense(
    key: jax.Array,
    in_features: int,
    out_features: int,
    *,
    kernel_init: initializers.Initializer | None = None,
    bias: bool = True,
) -> Params:
    """Return a kernel `[in_features, out_features]` and, with `bias`, a zero bias."""
    init = initializers.normal(0.02) if kernel_init is None else kernel_init
    params: Params = {"kernel": init(key, (in_features, out_features), jnp.float32)}
    if bias:
        params["bias"] = jnp.zeros(out_features, jnp.float32)
    return params


def dense(params: Params, x: jax.Array) -> jax.Array:
    """Multiply the last dim of `x` by the kernel and add the bias, if any."""
    y = x @ params["kernel"]
    return y + params["bias"] if "bias" in params else y


def init_layer_norm(features: int) -> Params:
    """Return the scale and bias of a layer norm that starts as the identity."""
    return {
        "scale": jnp.ones(features, jnp.float32),
        "bias": jnp.zeros(features, jnp.float32),
    }


def layer_norm(params: Params, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Normalise the last dim of `x` to zero mean and unit variance, then scale it."""
    wide = at_least_float32(x)
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(wide - mean), axis=-1, keepdims=True)
    normalised = (wide - mean) * jax.lax.rsqrt(variance + epsilon)
    return normalised.astype(x.dtype) * params["scale"] + params["bias"]


def init_embedding(key: jax.Array, num_entries: int, features: int) -> Params:
    """Return a table of `num_entries` random vectors."""
    table = initializers.normal(0.02)(key, (num_entries, features), jnp.float32)
    return {"embedding": table}


def dropout(key: jax.Array | None, x: jax.Array, rate: float) -> jax.Array:
    """Zero entries of `x` with probability `rate`; do nothing without a key."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0).astype(x.dtype)


def at_least_float32(x: jax.Array) -> jax.Array:
    """Widen 16-bit floats, for sums that need the precision; keep the others."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cast(params: Params, dtype: str | None) -> Params:
    """Return `params` in `dtype`, to compute in it; None keeps them as they are."""
    if dtype is None:
        return params
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
