"""Products of parts that go around a ring of devices: collective matmul.

Where an operand would be gathered for a product, each device multiplies the part that
it has, while it sends that part on and receives the next. Where a product would be
reduced and scattered, a sum goes around instead, and each device adds its product of
one part to it. n devices take n products and n - 1 permutes between them, which move
the bytes of the gather (or of the reduce_scatter) in its place.

Source: Wang et al., "Overlap Communication with Dependent Computation via
Decomposition in Large Deep Learning Models" (ASPLOS 2023), section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph.op_graph import Operator
from ..sharding.spec import REPLICATED, SUM, State, dims_of
from .base import Factor, Rotation, Shard, bind_params
from .halos import RING, Exchange, ring_steps, shard_shape


def rotating_factors(products: Sequence[Factor]) -> list[Factor]:
    """The factors of a product of two operands in which one goes around, or its sum.

    `products` are those that split it. In `ring:n1:m0` the work is split as in n1, and
    the left operand arrives in parts of the dim that m0 splits. In `ring:k0:m0` it is
    split as in k0, and the result leaves in parts of the dim that m0 splits.
    """
    found = []
    for kept, cut in permutations(products, 2):
        name, size = f"{RING}{kept.name}:{cut.name}", gcd(kept.size, cut.size)
        if kept.results == (SUM,) and cut.results[0] >= 0:
            rotation = Rotation(None, cut.results[0], cut.operands, REPLICATED)
            found.append(
                Factor(name, kept.operands, cut.results, size, rotation=rotation)
            )
        elif REPLICATED in kept.operands:
            whole = kept.operands.index(REPLICATED)
            dim = cut.operands[whole]
            if dim == REPLICATED:
                continue
            operands, dims = list(kept.operands), list(cut.operands)
            operands[whole], dims[whole] = dim, REPLICATED
            rotation = Rotation(whole, dim, tuple(dims), cut.results[0])
            found.append(
                Factor(name, tuple(operands), kept.results, size, rotation=rotation)
            )
    return found


def is_legal_ring(
    rows: np.ndarray,
    factors: Sequence[Factor],
    operand_specs: np.ndarray,
    result_specs: np.ndarray,
    sizes: np.ndarray,
) -> np.ndarray:
    """Which strategies have no ring, or one that they can have: bool [n].

    One axis of several devices, and no other that splits the dim whose parts go around.
    """
    legal = np.ones(len(rows), bool)
    rotates = np.array([factor.rotation is not None for factor in factors])[rows]
    legal &= rotates.sum(axis=1) <= 1
    legal &= ~(rotates & (sizes == 1)).any(axis=1)
    for index, factor in enumerate(factors):
        rotation = factor.rotation
        if rotation is not None:
            specs = result_specs[:, 0]
            if rotation.operand is not None:
                specs = operand_specs[:, rotation.operand]
            is_shared = (dims_of(specs) == rotation.dim).sum(axis=1) > 1
            legal &= ~(is_shared & (rows == index).any(axis=1))
    return legal


@dataclass(frozen=True)
class Ring:
    """The ring of one strategy: what goes around, and along which mesh axis."""

    axis: int
    rotation: Rotation
    count: int

    @property
    def shift(self) -> int:
        """How far each device sends: parts come from behind, sums go ahead."""
        return 1 if self.rotation.operand is None else -1


def ring_of(factors: Sequence[Factor], sizes: Sequence[int]) -> Ring | None:
    """The ring of a strategy, with one factor a mesh axis of these sizes."""
    for axis, factor in enumerate(factors):
        if factor.rotation is not None:
            return Ring(axis, factor.rotation, sizes[axis])
    return None


def rotations(
    op: Operator, factors: Sequence[Factor], sizes: Sequence[int]
) -> tuple[Exchange, ...]:
    """What a product sends while it is computed: the same, once a step but the last."""
    ring = ring_of(factors, sizes)
    if ring is None:
        return ()
    position = ring.rotation.operand
    operands, result = _local_shapes(op, factors, sizes)
    kind = op.result_types[0] if position is None else op.operand_types[position]
    shape = result if position is None else operands[position]
    num_bytes = prod(shape) * kind.dtype.itemsize
    each = Exchange((ring.axis,), ring.shift, kind.dtype.name, num_bytes, is_ring=True)
    return (each,) * (ring.count - 1)


def step_shapes(
    op: Operator, factors: Sequence[Factor], sizes: Sequence[int], ring: Ring
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """The shapes of one of the ring's products: of its operands and its result."""
    operands, result = _local_shapes(op, factors, sizes)
    dims = ring.rotation.operand_dims
    cut = [_cut_shape(s, d, ring.count) for s, d in zip(operands, dims, strict=True)]
    return cut, _cut_shape(result, ring.rotation.result_dim, ring.count)


def ring_bytes(op: Operator, factors: Sequence[Factor], sizes: Sequence[int]) -> int:
    """Bytes beside operands and result: what comes, what goes, and one product."""
    ring = ring_of(factors, sizes)
    if ring is None:
        return 0
    (sent,) = {each.bytes for each in rotations(op, factors, sizes)}
    _, product = step_shapes(op, factors, sizes, ring)
    return 2 * sent + prod(product) * op.result_types[0].dtype.itemsize


def bind_product(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """The product of shards, in steps if an operand or the result goes around."""
    ring = ring_of(shard.factors, shard.mesh.axis_sizes)
    if ring is None:
        return bind_params(op, operands)
    turn = _in_parts if ring.rotation.operand is not None else _sum_in_parts
    return [turn(op, list(operands), ring, shard)]


def _in_parts(
    op: Operator, operands: list[jax.Array], ring: Ring, shard: Shard
) -> jax.Array:
    """Multiplies each part of an operand when it is there.

    The barrier sends no part on before the product of the one before it: so permutes
    and products alternate, and two parts are held, however fast the link.
    """
    position, dim = ring.rotation.operand, ring.rotation.result_dim
    assert position is not None
    index, result = shard.block_index((ring.axis,)), None
    part = operands[position]
    for step in range(ring.count):
        is_last = step == ring.count - 1
        coming = part if is_last else _sent_on(part, ring, shard)
        number = (index + step) % ring.count
        given = _cut(operands, number, ring)
        given[position] = part
        (product,) = bind_params(op, given)
        if not is_last:
            coming, product = lax.optimization_barrier((coming, product))
        if dim < 0:
            result = product if result is None else result + product
        else:
            if result is None:
                result = jnp.zeros(shard.result_shape(op), product.dtype)
            start = number * product.shape[dim]
            result = lax.dynamic_update_slice_in_dim(result, product, start, dim)
        part = coming
    assert result is not None
    return result


def _sum_in_parts(
    op: Operator, operands: list[jax.Array], ring: Ring, shard: Shard
) -> jax.Array:
    """Adds the product of each part to the sum of it that goes around.

    The sum of part i ends at device i. The barrier begins no product before the last
    one is added, so that one is held and not all.
    """
    index = shard.block_index((ring.axis,))
    total: jax.Array | None = None
    for step in reversed(range(ring.count)):
        coming = None if total is None else _sent_on(total, ring, shard)
        number = (index + step) % ring.count
        (product,) = bind_params(op, _cut(operands, number, ring))
        total = product if coming is None else coming + product
        if step:
            *operands, total = lax.optimization_barrier((*operands, total))
    assert total is not None
    return total


def _sent_on(x: jax.Array, ring: Ring, shard: Shard) -> jax.Array:
    steps = ring_steps(ring.count, ring.shift)
    return lax.ppermute(x, shard.mesh.axis_names[ring.axis], steps)


def _cut(operands: Sequence[jax.Array], number: jax.Array, ring: Ring) -> list[Any]:
    """Part `number` of what holds all parts; the rest as it is."""
    given = list(operands)
    for position, dim in enumerate(ring.rotation.operand_dims):
        if dim >= 0:
            size = given[position].shape[dim] // ring.count
            start = number * size
            given[position] = lax.dynamic_slice_in_dim(
                given[position], start, size, dim
            )
    return given


def _local_shapes(
    op: Operator, factors: Sequence[Factor], sizes: Sequence[int]
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    numbers = range(len(op.operand_types))
    operands = [shard_shape(op, factors, sizes, number) for number in numbers]
    return operands, shard_shape(op, factors, sizes, 0, is_result=True)


def _cut_shape(shape: tuple[int, ...], dim: State, count: int) -> tuple[int, ...]:
    return tuple(n // count if i == dim else n for i, n in enumerate(shape))
