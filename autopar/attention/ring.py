"""Attention on the shards of one device, with keys and values that come round a ring.

Ring attention (Liu, Zaharia and Abbeel 2023, 2310.01889): each device has its queries,
and a block of keys and values, which goes to the next device while it is used. Softmax
is taken online (Milakov and Gimelshein 2018, 1805.02867), so scores are never there but
for one block of them. Backward, gradients of keys and values go round and gather what
each device adds to them; keys and values go round again, unless they were kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..rules.halos import ring_steps
from .spec import (
    Attention,
    Labels,
    einsum_of,
    wide,
    with_units,
    without_units,
)

NO_RING: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ring:
    """The devices along mesh axes `names`, `count` of them; this one is at `index`."""

    names: tuple[str, ...] = NO_RING
    count: int = 1
    index: Any = 0

    def sent_on(self, x: jax.Array) -> jax.Array:
        """What the device before this one has."""
        if self.count == 1:
            return x
        return lax.ppermute(x, self.names, ring_steps(self.count, 1))


@dataclass(frozen=True)
class _Blocks:
    """What every block of keys needs: `attention` of queries `q`, with its `sides`.

    `row` is the position of the first query.
    """

    attention: Attention
    q: jax.Array
    sides: Sequence[jax.Array]
    row: Any

    def product(
        self, left: jax.Array, right: jax.Array, labels: tuple[Labels, Labels, Labels]
    ) -> jax.Array:
        """A product in the precision of the step's own, summed in float32 or more."""
        joint = jnp.promote_types(left.dtype, right.dtype)
        return _product(
            left.astype(joint), right.astype(joint), labels, self.attention, wide(joint)
        )

    def scores(self, k: jax.Array) -> jax.Array:
        """Queries times one block of keys."""
        a = self.attention
        dtype = jnp.dtype(a.score_dtype)
        return _product(self.q, k, (a.q, a.k, a.raw), a, dtype).astype(dtype)

    def input_of(self, scores: jax.Array, number: Any) -> jax.Array:
        """What the softmax is taken of, for block `number` of keys."""
        a = self.attention
        key = number * scores.shape[a.raw.index(a.keys)]
        return a.input_of(scores, self.sides, self.row, key)


def _product(
    left: jax.Array,
    right: jax.Array,
    labels: tuple[Labels, Labels, Labels],
    a: Attention,
    dtype: Any,
) -> jax.Array:
    made = jnp.einsum(
        einsum_of(*labels),
        without_units(left, labels[0]),
        without_units(right, labels[1]),
        precision=a.precision,
        preferred_element_type=dtype,
    )
    return with_units(made, labels[2])


def attend(
    attention: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sides: Sequence[jax.Array],
    ring: Ring,
    row: Any,
    *,
    keeps: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """o, the log of the sum of each row's exponentials, and the keys and values.

    `q`, `k` and `v` are this device's, `sides` those of its rows, which begin at `row`,
    and of all keys. The keys and values returned are its own, or all of them if it
    `keeps` what comes by.
    """
    a, blocks = attention, _Blocks(attention, q, sides, row)
    kept = _Kept.of(a, k, v, ring) if keeps else None
    own = k, v
    top: Any = None
    total: Any = 0.0
    o: Any = 0.0
    for hop in range(ring.count):
        number = (ring.index - hop) % ring.count
        if kept is not None:
            kept = kept.with_block(k, v, number)
        is_last = hop == ring.count - 1
        coming = () if is_last else (ring.sent_on(k), ring.sent_on(v))
        x = blocks.input_of(blocks.scores(k), number)
        most = jnp.max(x, axis=-1)
        new_top = most if top is None else jnp.maximum(top, most)
        p = jnp.exp(x - _finite(new_top)[..., None])
        weights = p.astype(v.dtype)
        weighted = blocks.product(weights, v, (a.table, a.v, a.o))
        weighted = weighted.astype(wide(a.o_dtype))
        here = jnp.sum(p, axis=-1)
        if top is None:
            total, o = here, weighted
        else:
            factor = jnp.exp(_finite(top) - _finite(new_top))
            factor = jnp.where(jnp.isneginf(top), 0.0, factor)
            total = total * factor + here
            o = o * _as_rows_of(factor, a) + weighted
        top = new_top
        if coming:
            k, v, top, total, o = _in_turn(*coming, top, total, o)
    o = (o / _as_rows_of(total, a)).astype(a.o_dtype)
    total = _finite(top) + jnp.log(total)
    return o, total, *(own if kept is None else (kept.k, kept.v))


def attend_backward(
    attention: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    o: jax.Array,
    total: jax.Array,
    d_o: jax.Array,
    sides: Sequence[jax.Array],
    ring: Ring,
    row: Any,
    *,
    keeps: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v, each of what this device has.

    `total` and `o` are of the forward pass, `d_o` the cotangent of `o`; if it `keeps`
    them, `k` and `v` are all keys and values. Flash attention's recurrences (Dao et al.
    2022, 2205.14135, appendix B): scores are made again block by block.
    """
    a, blocks = attention, _Blocks(attention, q, sides, row)
    wider = wide(a.score_dtype)
    delta = _product(
        o.astype(wider), d_o.astype(wider), (a.o, a.o, a.statistics), a, wider
    )
    types = [jnp.dtype(each) for each in a.gradient_dtypes]
    d_q: Any = 0.0
    d_k: Any = 0.0
    d_v: Any = 0.0
    coming = [] if keeps else [ring.sent_on(k), ring.sent_on(v)]
    for hop in range(ring.count):
        # This device's own block is last, so that its gradients are then at home.
        number = (ring.index - hop - 1) % ring.count
        if keeps:
            k_here, v_here = _kept_block(a, k, v, ring, number)
        else:
            k_here, v_here = coming
            is_next_own = hop >= ring.count - 2
            coming = [k, v] if is_next_own else [*map(ring.sent_on, coming)]
        if hop:
            d_k, d_v = ring.sent_on(d_k), ring.sent_on(d_v)
        x, back = jax.vjp(
            lambda s, b=blocks, n=number: b.input_of(s, n), blocks.scores(k_here)
        )
        p = jnp.exp(x - total[..., None])
        d_p = blocks.product(d_o, v_here, (a.o, a.v, a.table))
        (d_scores,) = back((p * (d_p - delta[..., None])).astype(x.dtype))
        d_q += blocks.product(d_scores, k_here, (a.raw, a.k, a.d_q))
        more_k = blocks.product(d_scores, q, (a.raw, a.q, a.d_k)).astype(types[1])
        weights = p.astype(v.dtype)
        more_v = blocks.product(weights, d_o, (a.table, a.o, a.d_v)).astype(types[2])
        d_k, d_v = d_k + more_k, d_v + more_v
        if hop < ring.count - 1:
            *coming, q, d_q, d_k, d_v = _in_turn(*coming, q, d_q, d_k, d_v)
            blocks = _Blocks(attention, q, sides, row)
    return d_q.astype(types[0]), d_k, d_v


def _in_turn(*values: Any) -> Any:
    """`values`, of which nothing is used before all are there.

    So no block is begun before the one before it is done, and the memory of one will do
    for all; what comes in meanwhile may still travel beside its products.
    """
    return lax.optimization_barrier(values)


def _kept_block(
    a: Attention, k: jax.Array, v: jax.Array, ring: Ring, number: Any
) -> tuple[jax.Array, jax.Array]:
    """One block of all keys and values."""

    def block(x: jax.Array, names: Labels) -> jax.Array:
        dim = names.index(a.keys)
        size = x.shape[dim] // ring.count
        return lax.dynamic_slice_in_dim(x, number * size, size, dim)

    return block(k, a.k), block(v, a.v)


@dataclass(frozen=True)
class _Kept:
    """All keys and values, as far as they came by."""

    attention: Attention
    k: jax.Array
    v: jax.Array

    @classmethod
    def of(cls, a: Attention, k: jax.Array, v: jax.Array, ring: Ring) -> _Kept:
        def room(x: jax.Array, names: Labels) -> jax.Array:
            shape = list(x.shape)
            shape[names.index(a.keys)] *= ring.count
            return jnp.zeros(shape, x.dtype)

        return cls(a, room(k, a.k), room(v, a.v))

    def with_block(self, k: jax.Array, v: jax.Array, number: Any) -> _Kept:
        def put(whole: jax.Array, x: jax.Array, names: Labels) -> jax.Array:
            dim = names.index(self.attention.keys)
            return lax.dynamic_update_slice_in_dim(whole, x, number * x.shape[dim], dim)

        a = self.attention
        return _Kept(a, put(self.k, k, a.k), put(self.v, v, a.v))


def _finite(top: jax.Array) -> jax.Array:
    """A row with no score but -inf is compared with 0: its sum is 0, then."""
    return jnp.where(jnp.isneginf(top), jnp.zeros_like(top), top)


def _as_rows_of(statistic: jax.Array, a: Attention) -> jax.Array:
    """One number a row of scores, to be multiplied with o."""
    names = [each for each in a.o if each in a.statistics]
    order = [a.statistics.index(each) for each in names]
    moved = lax.transpose(statistic, order)
    shape = iter(moved.shape)
    return moved.reshape([next(shape) if n in a.statistics else 1 for n in a.o])
