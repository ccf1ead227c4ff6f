"""A residual network: NHWC convolutions, batch norm with running statistics."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.nn import initializers

from .layers import at_least_float32, dense, init_dense
from .losses import cross_entropy
from .synthetic import make_images
from .workload import Batch, Model, Params

_BOTTLENECK_EXPANSION = 4
_STATISTICS_MOMENTUM = 0.9


@dataclass(frozen=True)
class Config:
    """Sizes of the network.

    Args:
        stage_sizes: blocks in each stage; a stage halves the image (but for the
            first) and doubles the channels.
        channels: of the first stage.
        width_factor: widens the 3x3 convolution of bottleneck blocks.
        stem: 7x7 with stride 2 ("imagenet"), or 3x3 with stride 1 ("cifar").
        max_pool: halve the image after the stem.
    """

    stage_sizes: tuple[int, ...]
    channels: int
    image_size: int
    num_classes: int
    batch_size: int
    block: Literal["basic", "bottleneck"] = "basic"
    width_factor: int = 1
    stem: Literal["imagenet", "cifar"] = "imagenet"
    max_pool: bool = True

    @classmethod
    def tiny(cls) -> "Config":
        """Return sizes that train in seconds on a CPU."""
        return cls(
            stage_sizes=(1, 1),
            channels=8,
            image_size=16,
            num_classes=16,
            batch_size=16,
            stem="cifar",
            max_pool=False,
        )


def _wide(stage_sizes: tuple[int, ...], channels: int, width_factor: int) -> Config:
    return Config(
        stage_sizes,
        channels,
        image_size=224,
        num_classes=1024,
        batch_size=1536,
        block="bottleneck",
        width_factor=width_factor,
    )


_DEPTH_50, _DEPTH_101 = (3, 4, 6, 3), (3, 4, 23, 3)

# The wide networks are those of the Alpa benchmarks (benchmark/alpa/suite_wresnet.py).
SIZES = {
    "resnet": Config.tiny(),
    "resnet-18": Config((2, 2, 2, 2), 64, 224, 1000, batch_size=256),
    "resnet-50": Config(_DEPTH_50, 64, 224, 1000, batch_size=256, block="bottleneck"),
    "wide-resnet-250m": _wide(_DEPTH_50, channels=160, width_factor=2),
    "wide-resnet-500m": _wide(_DEPTH_50, channels=224, width_factor=2),
    "wide-resnet-1b": _wide(_DEPTH_50, channels=320, width_factor=2),
    "wide-resnet-2b": _wide(_DEPTH_50, channels=448, width_factor=2),
    "wide-resnet-4b": _wide(_DEPTH_50, channels=640, width_factor=2),
    "wide-resnet-6.8b": _wide(_DEPTH_50, channels=320, width_factor=16),
    "wide-resnet-13b": _wide(_DEPTH_101, channels=320, width_factor=16),
}
SIZES |= {
    name.replace("wide-resnet", "wrn"): config
    for name, config in SIZES.items()
    if name.startswith("wide-resnet")
}


def make_model(config: Config) -> Model:
    """Return the residual network of these sizes."""
    return Model(
        init=partial(init_model, config),
        loss=partial(image_loss, config),
        make_batch=partial(make_batch, config),
    )


def init_model(config: Config, key: jax.Array) -> tuple[Params, Params]:
    """Return the parameters and the running statistics of every batch norm."""
    stem_key, stages_key, head_key = jax.random.split(key, 3)
    expansion = _BOTTLENECK_EXPANSION if config.block == "bottleneck" else 1
    stem_window = 7 if config.stem == "imagenet" else 3
    in_channels = config.channels
    params: Params = {"stem": init_conv(stem_key, stem_window, 3, in_channels)}
    stages: list[list[Params]] = []
    stage_keys = jax.random.split(stages_key, len(config.stage_sizes))
    for index, num_blocks in enumerate(config.stage_sizes):
        channels = config.channels * 2**index
        blocks: list[Params] = []
        for block_key in jax.random.split(stage_keys[index], num_blocks):
            blocks.append(init_block(config, block_key, in_channels, channels))
            in_channels = channels * expansion
        stages.append(blocks)
    params["stages"] = stages
    params["head"] = init_dense(head_key, in_channels, config.num_classes)
    return params, init_statistics(params)


def init_block(
    config: Config, key: jax.Array, in_channels: int, channels: int
) -> Params:
    """Return the convolutions of one block, the shortcut's only where needed."""
    *conv_keys, shortcut_key = jax.random.split(key, 4)
    if config.block == "basic":
        windows, widths = (3, 3), (channels, channels)
    else:
        wide = channels * config.width_factor
        windows = (1, 3, 1)
        widths = (channels, wide, channels * _BOTTLENECK_EXPANSION)
    convs: list[Params] = []
    width = in_channels
    for conv_key, window, next_width in zip(conv_keys, windows, widths, strict=False):
        convs.append(init_conv(conv_key, window, width, next_width))
        width = next_width
    block: Params = {"convs": convs}
    if width != in_channels:
        block["shortcut"] = init_conv(shortcut_key, 1, in_channels, width)
    return block


def init_conv(key: jax.Array, window: int, in_channels: int, channels: int) -> Params:
    """Return a square HWIO kernel and the batch norm that follows it."""
    # Drawn as a matrix: XLA compiles four-dimensional random bits four times slower.
    shape = (window * window * in_channels, channels)
    kernel = initializers.he_normal()(key, shape, jnp.float32)
    return {
        "kernel": kernel.reshape(window, window, in_channels, channels),
        "scale": jnp.ones(channels, jnp.float32),
        "bias": jnp.zeros(channels, jnp.float32),
    }


def init_statistics(params: Params) -> Params:
    """Return the statistics of every convolution's batch norm: mean 0, variance 1."""

    def is_conv(node: Any) -> bool:
        return isinstance(node, dict) and "scale" in node

    def init(conv: Params) -> Params:
        return {
            "mean": jnp.zeros_like(conv["bias"]),
            "variance": jnp.ones_like(conv["scale"]),
        }

    convs = {"stem": params["stem"], "stages": params["stages"]}
    return jax.tree.map(init, convs, is_leaf=is_conv)


def forward(
    config: Config, params: Params, statistics: Params, images: jax.Array
) -> tuple[jax.Array, Params]:
    """Return the logits `[batch, classes]` of NHWC `images`, and new statistics."""
    stem_stride = 2 if config.stem == "imagenet" else 1
    images = images.astype(params["stem"]["kernel"].dtype)
    x, stem = conv_norm(params["stem"], statistics["stem"], images, stem_stride)
    x = jax.nn.relu(x)
    if config.max_pool:
        x = max_pool(x)

    stages: list[list[Params]] = []
    for stage, stage_statistics in zip(
        params["stages"], statistics["stages"], strict=True
    ):
        blocks: list[Params] = []
        for block, block_statistics in zip(stage, stage_statistics, strict=True):
            stride = 2 if stages and not blocks else 1
            x, new_statistics = apply_block(block, block_statistics, x, stride)
            blocks.append(new_statistics)
        stages.append(blocks)

    pooled = jnp.mean(x, axis=(1, 2))
    return dense(params["head"], pooled), {"stem": stem, "stages": stages}


def apply_block(
    params: Params, statistics: Params, x: jax.Array, stride: int
) -> tuple[jax.Array, Params]:
    """Return `x` after one residual block, and the block's new statistics."""
    # The 3x3 convolution strides: the first of a basic block, the middle of three.
    strides = (stride, 1) if len(params["convs"]) == 2 else (1, stride, 1)
    branch, new_convs = x, []
    for index, conv_stride in enumerate(strides):
        conv, conv_statistics = params["convs"][index], statistics["convs"][index]
        branch, new_conv = conv_norm(conv, conv_statistics, branch, conv_stride)
        new_convs.append(new_conv)
        if index < len(strides) - 1:
            branch = jax.nn.relu(branch)
    new_statistics: Params = {"convs": new_convs}
    if "shortcut" in params:
        shortcut = params["shortcut"]
        x, new_shortcut = conv_norm(shortcut, statistics["shortcut"], x, stride)
        new_statistics["shortcut"] = new_shortcut
    return jax.nn.relu(x + branch), new_statistics


def conv_norm(
    params: Params, statistics: Params, x: jax.Array, stride: int
) -> tuple[jax.Array, Params]:
    """Return `x` after a strided convolution and batch norm, and new statistics."""
    x = jax.lax.conv_general_dilated(
        x,
        params["kernel"],
        window_strides=(stride, stride),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return batch_norm(params, statistics, x)


def batch_norm(
    params: Params, statistics: Params, x: jax.Array, epsilon: float = 1e-5
) -> tuple[jax.Array, Params]:
    """Return `x` normalised by the statistics of this batch, and the running ones."""
    wide = at_least_float32(x)
    mean = jnp.mean(wide, axis=(0, 1, 2))
    variance = jnp.var(wide, axis=(0, 1, 2))
    normalised = (wide - mean) * jax.lax.rsqrt(variance + epsilon)
    x = normalised.astype(x.dtype) * params["scale"] + params["bias"]

    def moving_average(running: jax.Array, current: jax.Array) -> jax.Array:
        return _STATISTICS_MOMENTUM * running + (1.0 - _STATISTICS_MOMENTUM) * current

    current = {"mean": mean, "variance": variance}
    return x, jax.tree.map(moving_average, statistics, current)


def max_pool(x: jax.Array) -> jax.Array:
    """Return the maximum of each 3x3 window of `x`, at every second pixel."""
    return jax.lax.reduce_window(
        x,
        -jnp.inf,
        jax.lax.max,
        window_dimensions=(1, 3, 3, 1),
        window_strides=(1, 2, 2, 1),
        padding="SAME",
    )


def image_loss(
    config: Config,
    params: Params,
    statistics: Params,
    batch: Batch,
    _: jax.Array | None,
) -> tuple[jax.Array, Params]:
    """Return the mean cross-entropy of the class, and the new statistics."""
    logits, statistics = forward(config, params, statistics, batch["images"])
    return jnp.mean(cross_entropy(logits, batch["labels"])), statistics


def make_batch(config: Config, key: jax.Array) -> Batch:
    """Return NHWC images and their classes."""
    return make_images(key, config.batch_size, config.image_size, config.num_classes)
