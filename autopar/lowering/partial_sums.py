"""Tensors that owe a sum between programs: their parts, side by side.

An array that holds such a tensor has one more dim in front, which the axes that owe the
sum split: every device has a part of its own, and the sum of all is the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from ..sharding.spec import Spec, is_pending, pending_axes, to_partition_spec


def held_spec(spec: Spec, rank: int, names: Sequence[str]) -> PartitionSpec:
    """Of the array that holds a tensor of so many dims."""
    whole = to_partition_spec(spec, rank, names)
    if not is_pending(spec):
        return whole
    return PartitionSpec(tuple(names[axis] for axis in pending_axes(spec)), *whole)


def held_shape(
    shape: Sequence[int], spec: Spec, sizes: Sequence[int]
) -> tuple[int, ...]:
    """The shape of the array that holds a tensor of this shape; `sizes` of axes."""
    if not is_pending(spec):
        return tuple(shape)
    return (prod(sizes[axis] for axis in pending_axes(spec)), *shape)


def part_of(shard: Any, spec: Spec) -> Any:
    """What a device holds of the tensor, from what it holds of the array."""
    return shard[0] if is_pending(spec) else shard


def as_held(part: Any, spec: Spec) -> Any:
    """The inverse of `part_of`."""
    return part[None] if is_pending(spec) else part
