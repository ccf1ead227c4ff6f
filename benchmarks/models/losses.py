"""Cross-entropy with integer labels, and weighted means."""

import jax
import jax.numpy as jnp

from .layers import at_least_float32


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the negative log-likelihood of each label.

    Args:
        logits: unnormalised scores, `[..., num_classes]`.
        labels: integers in `[0, num_classes)`, `[...]`.
    """
    log_probs = jax.nn.log_softmax(at_least_float32(logits))
    picked = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)
    return -picked[..., 0]


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the mean of `values` under `weights`, zero if all weights are zero."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1.0)
