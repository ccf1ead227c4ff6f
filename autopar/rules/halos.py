"""Windows that overlap where a dim is cut: what neighbours send each other.

A window operator reads, for the element o of its result, the positions o * stride - low
+ [0, span] of an operand whose elements lie `dilation` apart. Where a shard of the
operand covers as many positions as its shard of the result moves on, all shards need
the same elements beside their own: `before` from one neighbour, `after` from the other.
Each is one collective_permute; dims are exchanged one after the other, so that the
later ones carry the corners. Beyond the borders of the whole lies the padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph.op_graph import Operator, OpGraph
from ..sharding.collective import Groups
from ..sharding.mesh import MeshShape
from ..sharding.spec import local_shape
from .base import Factor, Halo, Shard, factors_of

WINDOW, TAPS, RING = _PREFIXES = ("window", "taps", "ring:")
# How factors are called with which shards exchange something.


@dataclass(frozen=True)
class Exchange:
    """Elements sent along `axes` from each shard to the one `shift` behind it.

    `bytes` are those that one device receives, `dtype` numpy's name of their type. The
    last shard sends to the first where they are a ring.
    """

    axes: tuple[int, ...]
    shift: int
    dtype: str
    bytes: int
    is_ring: bool = False

    def pairs(self, mesh: MeshShape) -> Groups:
        """Which device sends to which."""
        sizes = mesh.axis_sizes
        rest = [axis for axis in range(len(sizes)) if axis not in self.axes]
        count = prod(sizes[axis] for axis in self.axes)
        ids = np.arange(prod(sizes)).reshape(sizes)
        groups = ids.transpose(*rest, *self.axes).reshape(-1, count)
        steps = (ring_steps if self.is_ring else _line_steps)(count, self.shift)
        return tuple((int(g[i]), int(g[j])) for g in groups for i, j in steps)


@dataclass(frozen=True)
class Traffic:
    """What an operator sends while it runs, and the memory it takes for itself.

    `moved_bytes` are what it writes and reads besides operands and results. Its work is
    cut in `num_parts`, and each exchange may run beside one of them. `num_kernels` is
    how many it starts.
    """

    exchanges: tuple[Exchange, ...]
    held_bytes: int
    moved_bytes: int
    num_parts: int
    num_kernels: int = 1


TrafficOf = Callable[[Operator, Sequence[Factor], Sequence[int]], Traffic]
_TRAFFIC: dict[str, TrafficOf] = {}


def register_traffic(kind: str, traffic: TrafficOf) -> None:
    """Say what operators of a kind send, if it is no halo."""
    _TRAFFIC[kind] = traffic


def has_traffic(op: Operator) -> bool:
    """Whether an operator itself knows what it sends and holds."""
    return op.kind in _TRAFFIC


def traffic_of(
    op: Operator, factors: Sequence[Factor], sizes: Sequence[int]
) -> Traffic | None:
    """What an operator sends by itself; None if it is halos, or nothing."""
    traffic = _TRAFFIC.get(op.kind)
    return None if traffic is None or not factors else traffic(op, factors, sizes)


def window_halo(low: int, span: int, stride: int, dilation: int) -> tuple[int, int]:
    """Elements that a shard reads before and behind its own, for every number of parts.

    Args:
      low: padding before the first element, in positions.
      span: positions between the first and the last that one window reads.
      stride: positions from one window to the next.
      dilation: positions from one element to the next.
    """
    after = (span - stride - low) // dilation + 1
    return int(low // dilation), int(after)  # JAX's own params may be numpy's integers


def exchanges(
    op: Operator, factors: Sequence[Factor], sizes: Sequence[int]
) -> tuple[Exchange, ...]:
    """What an operator sends, with one factor a mesh axis of these sizes."""
    found: list[Exchange] = []
    if not any(factor.halos for factor in factors):
        return ()
    for is_result, types in ((False, op.operand_types), (True, op.result_types)):
        for position, kind in enumerate(types):
            halos = halos_of(factors, position, is_result)
            if not halos:
                continue
            shape = list(shard_shape(op, factors, sizes, position, is_result))
            for halo, axes in halos:
                others = prod(shape) // max(shape[halo.dim], 1)
                shape[halo.dim] += halo.before + halo.after
                if prod(sizes[axis] for axis in axes) == 1:
                    continue
                away = -1 if is_result else 1
                for count, shift in ((halo.before, away), (halo.after, -away)):
                    num_bytes = count * others * kind.dtype.itemsize
                    if num_bytes > 0:
                        name = kind.dtype.name
                        found.append(Exchange(axes, shift, name, num_bytes))
    return tuple(found)


def copied_bytes(op: Operator, factors: Sequence[Factor], sizes: Sequence[int]) -> int:
    """Bytes of the copies in which halos lie beside the shards that they belong to.

    For each operand and result that has halos one copy: what is made of one dim is gone
    when the next one is made.
    """
    copied = 0
    if (own := traffic_of(op, factors, sizes)) is not None:
        return own.held_bytes
    if not any(factor.halos for factor in factors):
        return copied
    for is_result, types in ((False, op.operand_types), (True, op.result_types)):
        for position, kind in enumerate(types):
            halos = [halo for halo, _ in halos_of(factors, position, is_result)]
            if not any(max(halo.before, halo.after) > 0 for halo in halos):
                continue
            shape = list(shard_shape(op, factors, sizes, position, is_result))
            for halo in halos:
                shape[halo.dim] += halo.before + halo.after
            copied += prod(shape) * kind.dtype.itemsize
    return copied


def moved_bytes(op: Operator, factors: Sequence[Factor], sizes: Sequence[int]) -> int:
    """Bytes written and read besides operands and results: copies, or its own."""
    own = traffic_of(op, factors, sizes)
    return 2 * copied_bytes(op, factors, sizes) if own is None else own.moved_bytes


def factors_with_halos(op: Operator, names: Sequence[str]) -> tuple[Factor, ...]:
    """The factors of an operator by name, or none if no shard exchanges anything."""
    if not has_traffic(op) and not _any_has_halos(tuple(names)):
        return ()
    by_name = {factor.name: factor for factor in factors_of(op)}
    return tuple(by_name[name] for name in names)


def rows_with_halos(graph: OpGraph, names: Sequence[tuple[str, ...]]) -> list[int]:
    """Operators whose shards exchange something; `names` are those of their factors."""
    rows = enumerate(zip(graph.columns.where(has_traffic).tolist(), names, strict=True))
    return [k for k, (sends, own) in rows if sends or _any_has_halos(own)]


@lru_cache(maxsize=1 << 12)
def _any_has_halos(names: tuple[str, ...]) -> bool:
    return any(name.startswith(_PREFIXES) for name in names)


def halos_of(
    factors: Sequence[Factor], position: int, is_result: bool = False
) -> list[tuple[Halo, tuple[int, ...]]]:
    """The halos of an operand or result by dim, each with the axes that split it."""
    axes: dict[Halo, tuple[int, ...]] = {}
    for axis, factor in enumerate(factors):
        for halo in factor.halos:
            if (halo.position, halo.is_result) == (position, is_result):
                axes[halo] = (*axes.get(halo, ()), axis)
    return sorted(axes.items(), key=lambda item: item[0].dim)


def shard_shape(
    op: Operator,
    factors: Sequence[Factor],
    sizes: Sequence[int],
    position: int,
    is_result: bool = False,
) -> tuple[int, ...]:
    """The shape of one shard of an operand or result, without halos."""
    states = [f.results if is_result else f.operands for f in factors]
    types = op.result_types if is_result else op.operand_types
    spec = tuple(each[position] for each in states)
    return local_shape(types[position].shape, spec, sizes)


def extended(x: jax.Array, position: int, shard: Shard, padding: Any = 0) -> jax.Array:
    """A shard of an operand with its halos; `padding` lies beyond the borders."""
    for halo, axes in halos_of(shard.factors, position):
        before = _received(_end(x, halo.before, halo.dim, last=True), axes, 1, shard)
        after = _received(_end(x, halo.after, halo.dim, last=False), axes, -1, shard)
        index, count = shard.block_index(axes), _count(axes, shard)
        parts = [
            _padded(before, index == 0, padding),
            x,
            _padded(after, index == count - 1, padding),
        ]
        x = lax.concatenate([each for each in parts if each is not None], halo.dim)
        x = lax.slice_in_dim(
            x,
            max(-halo.before, 0),
            x.shape[halo.dim] - max(-halo.after, 0),
            axis=halo.dim,
        )
    return x


def returned(x: jax.Array, position: int, shard: Shard) -> jax.Array:
    """A shard of a result without its overhangs, which are added to the neighbours'."""
    for halo, axes in reversed(halos_of(shard.factors, position, is_result=True)):
        before, after, dim = halo.before, halo.after, halo.dim
        size = x.shape[dim] - before - after
        low = _end(x, before, dim, last=False)
        high = _end(x, after, dim, last=True)
        config = [(0, 0, 0)] * x.ndim
        config[dim] = (-before, -after, 0)
        x = lax.pad(x, jnp.zeros((), x.dtype), config)
        for part, shift in ((low, -1), (high, 1)):
            sent = _received(part, axes, shift, shard)
            if sent is not None:
                gap = size - sent.shape[dim]
                config[dim] = (gap, 0, 0) if shift < 0 else (0, gap, 0)
                x = x + lax.pad(sent, jnp.zeros((), x.dtype), config)
    return x


def window_padding(
    low: int, needed: int, elements: int, halo: Halo, dilation: int
) -> tuple[int, int]:
    """Padding of a shard with its halo, for windows that read `needed` positions."""
    first = low - halo.before * dilation
    return first, needed - first - (elements - 1) * dilation - 1


def _end(x: jax.Array, count: int, dim: int, *, last: bool) -> jax.Array | None:
    if count <= 0:
        return None
    size = x.shape[dim]
    start = size - count if last else 0
    return lax.slice_in_dim(x, start, start + count, axis=dim)


def _received(
    x: jax.Array | None, axes: Sequence[int], shift: int, shard: Shard
) -> jax.Array | None:
    """What the neighbour `shift` before sends; zeros where there is none."""
    count = _count(axes, shard)
    if x is None:
        return None
    if count == 1 or x.size == 0:
        return jnp.zeros_like(x)
    names = tuple(shard.mesh.axis_names[axis] for axis in axes)
    return lax.ppermute(x, names, _line_steps(count, shift))


def _padded(x: jax.Array | None, is_border: Any, padding: Any) -> jax.Array | None:
    if x is None or (isinstance(padding, int) and padding == 0):
        return x
    return jnp.where(is_border, jnp.asarray(padding, x.dtype), x)


def _count(axes: Sequence[int], shard: Shard) -> int:
    return prod(shard.mesh.axis_sizes[axis] for axis in axes)


def ring_steps(count: int, shift: int) -> list[tuple[int, int]]:
    """Who sends to whom in a ring of `count` devices: (source, target)."""
    return [(i, (i + shift) % count) for i in range(count)]


def _line_steps(count: int, shift: int) -> list[tuple[int, int]]:
    return [(i, i + shift) for i in range(count) if 0 <= i + shift < count]
