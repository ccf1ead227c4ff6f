"""A vision transformer: patches, a class token, pre-norm encoder blocks."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax.nn import initializers

from .layers import (
    dense,
    init_dense,
    init_layer_norm,
    layer_norm,
)
from .losses import cross_entropy
from .synthetic import make_images
from .workload import Batch, Model, Params


@dataclass(frozen=True)
class Config:
    """Sizes of the encoder.

    Args:
        patches: cut and embed patches by a strided convolution, or by a reshape and
            a matrix product.
    """

    image_size: int
    patch_size: int
    num_layers: int
    hidden: int
    num_heads: int
    num_classes: int
    batch_size: int
    patches: Literal["conv", "reshape"] = "conv"

    def __post_init__(self) -> None:
        if self.hidden % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide `hidden` {self.hidden}, "
                f"but got {self.num_heads}; change one of them."
            )
        if self.image_size % self.patch_size:
            raise ValueError(
                f"`patch_size` must divide `image_size` {self.image_size}, "
                f"but got {self.patch_size}; change one of them."
            )

    @classmethod
    def tiny(cls) -> "Config":
        """Return sizes that train in seconds on a CPU."""
        return cls(
            image_size=16,
            patch_size=4,
            num_layers=2,
            hidden=64,
            num_heads=8,
            num_classes=16,
            batch_size=16,
        )


SIZES = {
    "vit": Config.tiny(),
    "vit-base": Config(224, 16, 12, 768, 12, num_classes=1000, batch_size=256),
    "vit-large": Config(224, 16, 24, 1024, 16, num_classes=1000, batch_size=256),
    "vit-huge": Config(224, 14, 32, 1280, 16, num_classes=1000, batch_size=256),
}


def make_model(config: Config) -> Model:
    """Return the vision transformer of these sizes."""
    return Model(
        init=lambda key: (init_params(config, key), {}),
        loss=lambda params, _, batch, __: (image_loss(config, params, batch), {}),
        make_batch=partial(make_batch, config),
    )


def init_params(config: Config, key: jax.Array) -> Params:
    """Return the parameters of patches, positions, blocks and the classifier."""
    patch_key, position_key, layers_key, head_key = jax.random.split(key, 4)
    patch_size, hidden = config.patch_size, config.hidden
    patches = init_dense(
        patch_key,
        patch_size * patch_size * 3,
        hidden,
        kernel_init=initializers.lecun_normal(),
    )
    if config.patches == "conv":
        kernel = patches["kernel"].reshape(patch_size, patch_size, 3, hidden)
        patches = {**patches, "kernel": kernel}
    num_positions = (config.image_size // patch_size) ** 2 + 1
    position_init = initializers.normal(0.02)
    return {
        "patches": patches,
        "class_token": jnp.zeros((1, 1, hidden), jnp.float32),
        "positions": position_init(
            position_key, (1, num_positions, hidden), jnp.float32
        ),
        "layers": [
            init_layer(hidden, layer_key)
            for layer_key in jax.random.split(layers_key, config.num_layers)
        ],
        "final_norm": init_layer_norm(hidden),
        "head": init_dense(head_key, hidden, config.num_classes),
    }


def init_layer(hidden: int, key: jax.Array) -> Params:
    """Return the parameters of one encoder block."""
    query_key, key_key, value_key, out_key, up_key, down_key = jax.random.split(key, 6)
    return {
        "attention_norm": init_layer_norm(hidden),
        "query": init_dense(query_key, hidden, hidden),
        "key": init_dense(key_key, hidden, hidden),
        "value": init_dense(value_key, hidden, hidden),
        "out": init_dense(out_key, hidden, hidden),
        "mlp_norm": init_layer_norm(hidden),
        "mlp_up": init_dense(up_key, hidden, 4 * hidden),
        "mlp_down": init_dense(down_key, 4 * hidden, hidden),
    }


def forward(config: Config, params: Params, images: jax.Array) -> jax.Array:
    """Return the logits `[batch, classes]` of NHWC `images`."""
    x = embed_patches(config, params["patches"], images)
    class_token = jnp.broadcast_to(params["class_token"], (x.shape[0], 1, x.shape[2]))
    x = jnp.concatenate([class_token, x], axis=1) + params["positions"]
    for layer in params["layers"]:
        x = apply_layer(config, layer, x)
    x = layer_norm(params["final_norm"], x[:, 0])
    return dense(params["head"], x)


def embed_patches(config: Config, params: Params, images: jax.Array) -> jax.Array:
    """Return the patches of each image as vectors, `[batch, patches, hidden]`."""
    batch_size, size = images.shape[0], config.patch_size
    side = config.image_size // size
    kernel = params["kernel"]
    images = images.astype(kernel.dtype)
    if config.patches == "conv":
        x = jax.lax.conv_general_dilated(
            images,
            kernel,
            window_strides=(size, size),
            padding="VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return x.reshape(batch_size, side * side, config.hidden) + params["bias"]
    x = images.reshape(batch_size, side, size, side, size, 3)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return dense(params, x.reshape(batch_size, side * side, size * size * 3))


def apply_layer(config: Config, layer: Params, x: jax.Array) -> jax.Array:
    """Return `x` after one block: attention, then a gelu MLP, both residual."""
    normed = layer_norm(layer["attention_norm"], x)
    heads = (*x.shape[:2], config.num_heads, config.hidden // config.num_heads)
    mixed = jax.nn.dot_product_attention(
        dense(layer["query"], normed).reshape(heads),
        dense(layer["key"], normed).reshape(heads),
        dense(layer["value"], normed).reshape(heads),
    )
    x = x + dense(layer["out"], mixed.reshape(x.shape))

    normed = layer_norm(layer["mlp_norm"], x)
    return x + dense(layer["mlp_down"], jax.nn.gelu(dense(layer["mlp_up"], normed)))


def image_loss(config: Config, params: Params, batch: Batch) -> jax.Array:
    """Return the mean cross-entropy of the class."""
    logits = forward(config, params, batch["images"])
    return jnp.mean(cross_entropy(logits, batch["labels"]))


def make_batch(config: Config, key: jax.Array) -> Batch:
    """Return NHWC images and their classes."""
    return make_images(key, config.batch_size, config.image_size, config.num_classes)
