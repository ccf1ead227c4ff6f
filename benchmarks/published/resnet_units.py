"""A Wide-ResNet as units: the stem, every residual block, the head; all in 32 bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import resnet
from benchmarks.models.layers import dense, init_dense
from benchmarks.models.losses import cross_entropy
from benchmarks.published.unit_model import Group, Unit, UnitModel

_EXPANSION = 4  # of a bottleneck block's result over its channels


def resnet_units(config: resnet.Config) -> UnitModel:
    """Blocks of a stage that are alike are one group.

    As the authors ran it: SGD with momentum and recomputation of each block; only some
    stages are told to split the batch, the others split what the solver likes
    (alpa-projects/alpa: benchmark/alpa/benchmark_3d_one_case_wresnet.py,
    suite_wresnet.py).
    """
    groups = [Group((_stem(config),))]
    width = config.channels
    for stage, number in enumerate(config.stage_sizes):
        channels, stride = config.channels * 2**stage, 2 if stage else 1
        groups.append(Group((_block(config, width, channels, stride),), 1, remat=True))
        width = channels * (_EXPANSION if config.block == "bottleneck" else 1)
        if number > 1:
            block = _block(config, width, channels, 1)
            groups.append(Group((block,), number - 1, remat=True))
    groups.append(Group((_head(config, width),)))
    size = config.image_size
    example = {
        "images": jax.ShapeDtypeStruct((size, size, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((), jnp.int32),
    }
    return UnitModel(
        *("wide-resnet", tuple(groups), example),
        dtype="float32",
        units_a_layer=1,
        num_moments=1,
        splits_freely=True,
    )


def _statistics(params: Any) -> Any:
    """What a block's running statistics start from; batches are normed by their own."""
    return resnet.init_statistics({"stem": (), "stages": params})["stages"]


def _stem(config: resnet.Config) -> Unit:
    window, stride = (7, 2) if config.stem == "imagenet" else (3, 1)

    def apply(params: Any, values: Any, batch: Any) -> Any:
        statistics = _statistics(params)
        x, _ = resnet.conv_norm(params, statistics, batch["images"], stride)
        x = jax.nn.relu(x)
        return resnet.max_pool(x) if config.max_pool else x

    init = partial(
        resnet.init_conv, window=window, in_channels=3, channels=config.channels
    )
    return Unit("stem", init, apply)


def _block(config: resnet.Config, width: int, channels: int, stride: int) -> Unit:
    def init(key: jax.Array) -> Any:
        return resnet.init_block(config, key, width, channels)

    def apply(params: Any, x: Any, batch: Any) -> Any:
        return resnet.apply_block(params, _statistics(params), x, stride)[0]

    return Unit("block", init, apply)


def _head(config: resnet.Config, width: int) -> Unit:
    def init(key: jax.Array) -> Any:
        return init_dense(key, width, config.num_classes)

    def apply(params: Any, x: Any, batch: Any) -> Any:
        logits = dense(params, jnp.mean(x, axis=(1, 2)))
        return jnp.mean(cross_entropy(logits, batch["labels"]))

    return Unit("head", init, apply)
