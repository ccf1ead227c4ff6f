"""A U-Net: convolutions down to a bottleneck and up again, with skip connections."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.nn import initializers

from .losses import cross_entropy
from .workload import Batch, Model, Params


@dataclass(frozen=True)
class Config:
    """Sizes of the network.

    Args:
        image_size: side of the square or the cube; `2**num_levels` divides it.
        channels: of the first level; each level halves the image and doubles them.
        num_dims: 2 for images, 3 for volumes.
        num_groups: of the group norms.
    """

    image_size: int
    channels: int
    num_levels: int
    num_classes: int
    batch_size: int
    num_dims: int = 2
    num_groups: int = 4

    def __post_init__(self) -> None:
        if self.image_size % 2**self.num_levels:
            raise ValueError(
                f"`image_size` must be a multiple of 2**num_levels = "
                f"{2**self.num_levels}, but got {self.image_size}; change one of them."
            )

    @classmethod
    def tiny(cls) -> "Config":
        """Return sizes that train in seconds on a CPU."""
        return cls(
            image_size=16, channels=8, num_levels=2, num_classes=4, batch_size=16
        )

    @property
    def dims(self) -> str:
        """The letters of the spatial dims."""
        return "DHW"[-self.num_dims :]


SIZES = {
    "unet": Config.tiny(),
    "unet-2d": Config(512, 64, 4, num_classes=16, batch_size=32),
    "unet-3d": Config(128, 32, 4, num_classes=4, batch_size=8, num_dims=3),
}


def make_model(config: Config) -> Model:
    """Return the U-Net of these sizes."""
    return Model(
        init=lambda key: (init_params(config, key), {}),
        loss=lambda params, _, batch, __: (pixel_loss(config, params, batch), {}),
        make_batch=partial(make_batch, config),
    )


def init_params(config: Config, key: jax.Array) -> Params:
    """Return the parameters of the levels down, the bottleneck and the levels up."""
    keys = iter(jax.random.split(key, 4 * config.num_levels + 4))
    width = 1
    params: Params = {"down": [], "up": []}
    for level in range(config.num_levels):
        channels = config.channels * 2**level
        params["down"].append(
            init_block(config, next(keys), next(keys), width, channels)
        )
        width = channels
    bottom = 2 * width
    params["bottom"] = init_block(config, next(keys), next(keys), width, bottom)
    width = bottom
    for level in reversed(range(config.num_levels)):
        channels = config.channels * 2**level
        params["up"].append(
            init_block(config, next(keys), next(keys), width + channels, channels)
        )
        width = channels
    params["head"] = init_conv(config, next(keys), 1, width, config.num_classes)
    return params


def init_block(
    config: Config, first: jax.Array, second: jax.Array, width: int, channels: int
) -> list[Params]:
    """Return two convolutions of window 3."""
    return [
        init_conv(config, first, 3, width, channels),
        init_conv(config, second, 3, channels, channels),
    ]


def init_conv(
    config: Config, key: jax.Array, window: int, in_channels: int, channels: int
) -> Params:
    """Return a kernel `[window..., in, out]`, and the group norm that follows it."""
    volume = window**config.num_dims
    kernel = initializers.he_normal()(key, (volume * in_channels, channels))
    windows = (window,) * config.num_dims
    return {
        "kernel": kernel.reshape(*windows, in_channels, channels),
        "scale": jnp.ones(channels, jnp.float32),
        "bias": jnp.zeros(channels, jnp.float32),
    }


def forward(config: Config, params: Params, images: jax.Array) -> jax.Array:
    """Return the logits `[batch, space..., classes]` of every pixel."""
    x, skips = images.astype(params["head"]["kernel"].dtype), []
    for block in params["down"]:
        x = apply_block(config, block, x)
        skips.append(x)
        x = max_pool(config, x)
    x = apply_block(config, params["bottom"], x)
    for block in params["up"]:
        x = jnp.concatenate([upsample(config, x), skips.pop()], axis=-1)
        x = apply_block(config, block, x)
    head = params["head"]
    return convolve(config, x, head["kernel"]) + head["bias"]


def apply_block(config: Config, block: list[Params], x: jax.Array) -> jax.Array:
    """Return `x` after each convolution, its group norm and a relu."""
    for conv in block:
        x = group_norm(config, conv, convolve(config, x, conv["kernel"]))
        x = jax.nn.relu(x)
    return x


def convolve(config: Config, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return the convolution that keeps the size of the image."""
    layout = f"N{config.dims}C", f"{config.dims}IO", f"N{config.dims}C"
    return jax.lax.conv_general_dilated(
        x, kernel, (1,) * config.num_dims, "SAME", dimension_numbers=layout
    )


def group_norm(config: Config, params: Params, x: jax.Array) -> jax.Array:
    """Normalise each image over space and the channels of a group."""
    groups = x.reshape(
        x.shape[0], -1, config.num_groups, x.shape[-1] // config.num_groups
    )
    mean = jnp.mean(groups, axis=(1, 3), keepdims=True)
    variance = jnp.var(groups, axis=(1, 3), keepdims=True)
    normalised = (groups - mean) * jax.lax.rsqrt(variance + 1e-5)
    return normalised.reshape(x.shape) * params["scale"] + params["bias"]


def max_pool(config: Config, x: jax.Array) -> jax.Array:
    """Return the maxima of every square of side 2."""
    window = (1, *(2,) * config.num_dims, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def upsample(config: Config, x: jax.Array) -> jax.Array:
    """Return `x` with every pixel repeated to a square of side 2."""
    for dim in range(1, config.num_dims + 1):
        x = jnp.repeat(x, 2, axis=dim)
    return x


def pixel_loss(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Return the mean cross-entropy of the class of every pixel."""
    logits = forward(config, params, batch["images"])
    return jnp.mean(cross_entropy(logits, batch["labels"]))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """Return noisy images with one channel, and the class of every pixel beneath."""
    label_key, noise_key = jax.random.split(key)
    size = config.image_size**config.num_dims
    shape = (config.batch_size, *(config.image_size,) * config.num_dims)
    flat = (config.batch_size, size)
    labels = jax.random.randint(label_key, flat, 0, config.num_classes, jnp.int32)
    noise = 0.5 * jax.random.normal(noise_key, flat, jnp.float32)
    images = labels.astype(jnp.float32) / config.num_classes + noise
    return {"images": images.reshape(*shape, 1), "labels": labels.reshape(shape)}
