"""Synthetic data that a model can learn, so that falling losses mean something."""

import jax
import jax.numpy as jnp


def make_sequences(
    key: jax.Array, batch_size: int, seq_len: int, vocab_size: int
) -> jax.Array:
    """Return int32 `[batch_size, seq_len]` sequences that count up by 1, 2 or 3."""
    start_key, stride_key = jax.random.split(key)
    shape = (batch_size, 1)
    starts = jax.random.randint(start_key, shape, 0, vocab_size, jnp.int32)
    strides = jax.random.randint(stride_key, shape, 1, 4, jnp.int32)
    positions = jnp.arange(seq_len, dtype=jnp.int32)
    return (starts + strides * positions) % vocab_size


def make_images(
    key: jax.Array, batch_size: int, image_size: int, num_classes: int
) -> dict[str, jax.Array]:
    """Return float32 NHWC images with three channels, and int32 labels.

    The label shows in the brightness of the image, beneath unit noise.
    """
    label_key, noise_key = jax.random.split(key)
    labels = jax.random.randint(label_key, (batch_size,), 0, num_classes, jnp.int32)
    shape = (batch_size, image_size * image_size * 3)
    noise = jax.random.normal(noise_key, shape, jnp.float32)
    brightness = labels.astype(jnp.float32) / num_classes - 0.5
    images = noise + brightness[:, None]
    images = images.reshape(batch_size, image_size, image_size, 3)
    return {"images": images, "labels": labels}
