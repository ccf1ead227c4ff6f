"""Apply one resharding step to a local shard, inside a manual shard_map."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..costs.resharding import wire_dtype
from ..sharding.mesh import MeshShape
from ..sharding.placement import Step
from ..sharding.spec import MAX, MIN, SUM

_REDUCERS: dict[int, Callable[..., Any]] = {
    SUM: lax.psum,
    MAX: lax.pmax,
    MIN: lax.pmin,
}


def apply_step(x: jax.Array, step: Step, mesh: MeshShape) -> jax.Array:
    """The shard after `step`; one collective of the step's kind, or none."""
    names = tuple(mesh.axis_names[axis] for axis in step.axes)
    groups = None
    if step.groups:  # they number all devices
        names, groups = mesh.axis_names, step.groups
    if x.size == 0 and step.is_collective:  # StableHLO has none that move nothing
        return lax.reshape(x, _shape_after(x.shape, step, mesh))
    match step.kind:
        case "all_reduce":
            return _all_reduce(x, step, names)
        case "reduce_scatter":
            return lax.psum_scatter(
                _unknown(x), names, scatter_dimension=step.dim, tiled=True
            )
        case "all_gather":
            return lax.all_gather(
                x, names, axis_index_groups=groups, axis=step.dim, tiled=True
            )
        case "all_to_all":
            # XLA's CPU compiler sends the parts of a concatenation as they are, and
            # refuses them if their layouts differ.
            x = lax.optimization_barrier(x)
            return lax.all_to_all(
                x,
                names,
                split_axis=step.target_dim,
                concat_axis=step.dim,
                axis_index_groups=groups,
                tiled=True,
            )
        case "collective_permute":
            return lax.ppermute(x, names, step.groups)
        case "slice":
            (axis,) = step.axes
            index, parts = lax.axis_index(names[0]), mesh.axis_sizes[axis]
            if step.part is not None:
                stride, parts = step.part
                index = index // stride % parts
            size = x.shape[step.dim] // parts
            return lax.dynamic_slice_in_dim(x, index * size, size, axis=step.dim)
        case "mask":
            keep = lax.axis_index(names[0]) == 0
            return jnp.where(keep, x, jnp.zeros_like(x))
    raise AssertionError(f"unknown resharding step {step.kind}")


def _all_reduce(x: jax.Array, step: Step, names: tuple[str, ...]) -> jax.Array:
    reduce, sent_as = _REDUCERS[step.reduction], wire_dtype(step, x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating) or sent_as == x.dtype:
        return reduce(_unknown(x.astype(sent_as)), names).astype(x.dtype)
    wide = x.astype(jnp.float64 if sent_as == np.int64 else jnp.float32)
    limits = jnp.iinfo(sent_as)
    last = limits.max if step.reduction == MAX else limits.min
    codes = jnp.where(
        jnp.isnan(x), sent_as.type(last), _swap_order(_bits(wide, sent_as))
    )
    closed = _swap_order(reduce(codes, names))
    return _bits(closed, wide.dtype).astype(x.dtype)


def _unknown(x: jax.Array) -> jax.Array:
    """`x`, which XLA cannot see to be constant if it is complex.

    Its simplifier ends the process at a sum over devices of a complex number repeated.
    """
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return lax.optimization_barrier(x)


def _bits(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)


def _swap_order(bits: jax.Array) -> jax.Array:
    """From the bits of floats to integers in their order, and back.

    Bits of negative floats grow with the magnitude, so all but the sign is flipped. The
    greatest and the least integer come back as the bits of a NaN.
    """
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _shape_after(
    shape: tuple[int, ...], step: Step, mesh: MeshShape
) -> tuple[int, ...]:
    """The shape of a shard after a collective."""
    count = prod(mesh.axis_sizes[axis] for axis in step.axes)
    if step.groups:
        count = len(step.groups[0])
    changed = list(shape)
    match step.kind:
        case "all_gather":
            changed[step.dim] *= count
        case "reduce_scatter":
            changed[step.dim] //= count
        case "all_to_all":
            changed[step.dim] *= count
            changed[step.target_dim] //= count
    return tuple(changed)
