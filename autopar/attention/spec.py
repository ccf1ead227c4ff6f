"""Attention as two operators: which dims its tensors share, and what it computes.

    scores = queries . keys;  o = softmax over keys of `Scores` . values

Labels number the dims: those of the scores, of which one (`keys`) is what the softmax
is taken over, those that a product sums over and those that only values have. A dim of
size 1 has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Labels = tuple[int | None, ...]
Sizes = Mapping[int, int]  # by label
Names = tuple[int, ...]  # labels of the dims that have one


@dataclass(frozen=True)
class Scores:
    """What a softmax is taken of: `scale` times a product, and what follows.

    `biases` are factors of the first sides, which are added, `masks` whether the other
    sides are to be true or false; `low` is what stands for the rest. The last and the
    first key that a query reads are `after` and `before` positions from its own; None
    is no end.
    """

    scale: float
    biases: tuple[float, ...] = ()
    masks: tuple[bool, ...] = ()
    low: float = 0.0
    before: int | None = None
    after: int | None = None

    @property
    def is_banded(self) -> bool:
        return self.before is not None or self.after is not None

    def share(self, rows: int, keys: int) -> float:
        """The part of all scores whose keys are read, but for half the diagonal."""
        row = np.arange(rows) + 0.5
        last = keys if self.after is None else row + self.after
        first = 0 if self.before is None else row - self.before - 0.5
        read = np.clip(last, 0, keys) - np.clip(first, 0, keys)
        return float(np.maximum(read, 0).mean() / keys)


@dataclass(frozen=True)
class Attention:
    """One kind of attention: labels of every dim, dtypes of what is made.

    `raw` is how the product lays out scores. `sides` are what scores meet besides.
    Gradients are laid out as `d_q`, `d_k` and `d_v` say. `precision` is that of the
    products. `is_fused`: one kernel does it all, where there is one.
    """

    q: Labels
    k: Labels
    v: Labels
    o: Labels
    d_q: Labels
    d_k: Labels
    d_v: Labels
    raw: Labels
    keys: int
    sides: tuple[Labels, ...]
    scores: Scores
    score_dtype: str
    o_dtype: str
    gradient_dtypes: tuple[str, str, str]
    precision: Any = None
    row: int | None = None  # the dim of queries that positions count along
    is_fused: bool = False

    @cached_property
    def statistics(self) -> Names:
        """Labels of what there is one of for each row of scores."""
        return tuple(each for each in named(self.raw) if each != self.keys)

    @cached_property
    def table(self) -> Names:
        """Labels of scores whose keys are last."""
        return (*self.statistics, self.keys)

    @cached_property
    def rows(self) -> Names:
        """What queries have, and neither keys nor values."""
        other = (*self.k, *self.v)
        return tuple(each for each in self.statistics if each not in other)

    def sizes(
        self, q: Sequence[int], k: Sequence[int], v: Sequence[int]
    ) -> dict[int, int]:
        """By label, from shapes of queries, keys and values."""
        pairs = zip((*self.v, *self.k, *self.q), (*v, *k, *q), strict=True)
        return {label: size for label, size in pairs if label is not None}

    def product_flops(
        self, shapes: Sequence[Sequence[int]], is_gradient: bool
    ) -> float:
        """Flops of two products forward, or five backward, from operands' shapes.

        A kernel leaves out what is masked, a ring does not.
        """
        sizes = self.sizes(*shapes[:3])
        scores = prod(sizes[each] for each in self.table)
        depth = prod(sizes[each] for each in named(self.q) if each not in self.table)
        width = prod(sizes[each] for each in named(self.o) if each not in self.table)
        by_depth, by_width = (3, 2) if is_gradient else (1, 1)
        if self.is_fused and self.row is not None:
            scores *= self.scores.share(sizes[self.row], sizes[self.keys])
        return 2.0 * scores * (by_depth * depth + by_width * width)

    def input_of(
        self, raw: jax.Array, sides: Sequence[jax.Array], row: Any, key: Any
    ) -> jax.Array:
        """What the softmax is taken of, in float32 or more, with the labels `table`.

        `raw` are scores of queries and keys of which the first are at `row` and `key`.
        """
        scores, count = self.scores, len(self.scores.biases)
        size = raw.shape[self.raw.index(self.keys)]
        x = scores.scale * raw.astype(wide(self.score_dtype))
        columns = [
            self._like_raw(self._column(side, labels, key, size), labels)
            for side, labels in zip(sides, self.sides, strict=True)
        ]
        for factor, bias in zip(scores.biases, columns, strict=False):
            x = x + (factor * bias).astype(x.dtype)
        masks = [m == w for m, w in zip(columns[count:], scores.masks, strict=False)]
        masks += self._band(raw.shape, row, key)
        if masks:
            x = jnp.where(reduce(jnp.logical_and, masks), x, scores.low)
        return self._as_table(x)

    def _as_table(self, x: jax.Array) -> jax.Array:
        x = without_units(x, self.raw)
        return jnp.moveaxis(x, named(self.raw).index(self.keys), -1)

    def _band(self, shape: Sequence[int], row: Any, key: Any) -> list[jax.Array]:
        scores = self.scores
        if not scores.is_banded:
            return []
        assert self.row is not None
        at_row, at_key = (
            first + lax.broadcasted_iota(jnp.int32, shape, self.raw.index(label))
            for first, label in ((row, self.row), (key, self.keys))
        )
        ends = [(at_key - at_row, scores.after), (at_row - at_key, scores.before)]
        return [distance <= end for distance, end in ends if end is not None]

    def _column(self, side: jax.Array, labels: Labels, start: Any, size: int) -> Any:
        """The part of a side for `size` keys from `start` on."""
        if self.keys not in labels:
            return side
        dim = labels.index(self.keys)
        return lax.dynamic_slice_in_dim(side, start, size, axis=dim)

    def _like_raw(self, side: jax.Array, labels: Labels) -> jax.Array:
        """A side with all dims of scores, of size 1 where it has none."""
        own = named(labels)
        order = [own.index(each) for each in self.raw if each in own]
        moved = lax.transpose(without_units(side, labels), order)
        absent = [i for i, each in enumerate(self.raw) if each not in own]
        return lax.expand_dims(moved, absent)


def wide(dtype: Any) -> Any:
    """What softmaxes and sums are done in."""
    return jnp.promote_types(dtype, jnp.float32)


def shape_of(labels: Labels, sizes: Sizes) -> tuple[int, ...]:
    """The shape of what has these labels."""
    return tuple(1 if each is None else sizes[each] for each in labels)


def named(labels: Labels) -> Names:
    """The labels that there are."""
    return tuple(each for each in labels if each is not None)


def einsum_of(left: Labels, right: Labels, result: Labels) -> str:
    """A product as `jnp.einsum` writes it, without dims of size 1."""

    def letters(labels: Labels) -> str:
        return "".join(chr(ord("a") + each) for each in named(labels))

    return f"{letters(left)},{letters(right)}->{letters(result)}"


def without_units(x: jax.Array, labels: Labels) -> jax.Array:
    """`x` without the dims that have no label."""
    dims = [dim for dim, label in enumerate(labels) if label is None]
    return lax.squeeze(x, dims)


def with_units(x: jax.Array, labels: Labels) -> jax.Array:
    """`x` with the dims that have no label."""
    dims = [dim for dim, label in enumerate(labels) if label is None]
    return lax.expand_dims(x, dims)
