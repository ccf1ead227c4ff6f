"""Random bits: every shard makes its own, the same bits that one device would make.

With partitionable threefry a bit pattern depends on the key and on its position in the
whole tensor only, so that a shard counts from its own positions. Other generators make
all bits everywhere and keep a part. No key is ever split, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from ..graph.op_graph import Operator
from ..sharding.spec import REPLICATED, is_pending
from .base import Factor, Shard, bind_params, register, stay_whole
from .elementwise import dim_factors
from .high_product import unsigned_high

# Keys are a few bytes: every device holds all of them.
register(
    "random_seed",
    "random_wrap",
    "random_unwrap",
    "random_split",
    "random_fold_in",
    "random_clone",
)(stay_whole)
# Bits that depend on all of the positions before them: every device makes all, and
# cutting a part out of what is whole costs nothing.
register("rng_bit_generator", "random_gamma")(stay_whole)


@register("threefry2x32")
def threefry2x32(op: Operator) -> list[Factor]:
    """Elementwise over broadcast operands: two words of key, two words of count."""
    return dim_factors(op)


def bind_random_bits(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """This device's part of the bits, equal to that part of the whole."""
    (keys,) = operands
    spec = shard.result_specs[0]
    assert not is_pending(spec), spec
    if all(state == REPLICATED for state in spec):
        return bind_params(op, operands)
    local = shard.result_shape(op)
    starts = [shard.offset(spec, dim, size) for dim, size in enumerate(local)]
    if counts_positions(keys):
        return [_threefry_bits(op, keys, starts, local)]
    (bits,) = bind_params(op, operands)
    return [_part(bits, starts, local)]


@register("random_bits", bind=bind_random_bits)
def random_bits(op: Operator) -> list[Factor]:
    return [
        Factor(f"d{dim}", (REPLICATED,), (dim,), size, is_positional=True)
        for dim, size in enumerate(op.result_types[0].shape)
    ]


def counts_positions(keys: jax.Array) -> bool:
    """Whether bits depend on their key and row-major position alone."""
    is_threefry = jax.random.key_impl(keys) == "threefry2x32"
    return is_threefry and jax.config.values["jax_threefry_partitionable"]


def _threefry_bits(
    op: Operator, keys: jax.Array, starts: Sequence[jax.Array], local: tuple[int, ...]
) -> jax.Array:
    """Bits of the part `local` at `starts`, as jax makes them for the whole."""
    rank = keys.ndim
    words = _part(jax.random.key_data(keys), starts[:rank], local[:rank])
    first, second = (lax.index_in_dim(words, i, rank, keepdims=False) for i in (0, 1))
    high, low = count_positions(op.params["shape"], local[rank:], starts[rank:])
    if rank:
        first, second = (
            lax.broadcast_in_dim(word, local, range(rank)) for word in (first, second)
        )
        high, low = (
            lax.broadcast_in_dim(word, local, range(rank, len(local)))
            for word in (high, low)
        )
    high, low = threefry2x32_p.bind(first, second, high, low)
    dtype = op.result_types[0].dtype
    if op.params["bit_width"] == 64:
        high, low = (lax.convert_element_type(word, dtype) for word in (high, low))
        return lax.shift_left(high, lax.full_like(high, 32)) | low
    return lax.convert_element_type(high ^ low, dtype)


def _part(
    whole: jax.Array, starts: Sequence[jax.Array], sizes: Sequence[int]
) -> jax.Array:
    """The part of `sizes` at `starts` of the leading dims, with all of the others."""
    rest = whole.shape[len(sizes) :]
    zeros = [jnp.int32(0)] * len(rest)  # a Python zero is an int64 where x64 is on
    return lax.dynamic_slice(whole, (*starts, *zeros), (*sizes, *rest))


def count_positions(
    shape: Sequence[int], local: Sequence[int], starts: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Row-major positions, in a tensor of `shape`, of its part `local` at `starts`.

    Returns:
      The high and the low 32 bits of each position, two uint32 arrays of shape `local`.
    """
    high = low = jnp.zeros(local, jnp.uint32)
    num_positions = 1
    for dim, size in enumerate(shape):
        start = lax.convert_element_type(starts[dim], jnp.uint32)
        place = lax.broadcasted_iota(jnp.uint32, local, dim) + start
        num_positions *= size
        if num_positions <= 2**32:
            low = low * np.uint32(size) + place
        else:
            carried, product = (
                unsigned_high(low, np.uint32(size)),
                low * np.uint32(size),
            )
            low = product + place
            carried += lax.convert_element_type(low < product, jnp.uint32)
            high = high * np.uint32(size) + carried
    return high, low
