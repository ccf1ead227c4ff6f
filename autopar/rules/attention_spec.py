"""Attention as two operators: which dims its tensors share, and what it computes.

    scores = queries . keys;  o = g(softmax over keys of f(scores)) . values

Labels number the dims: those of the scores, of which one (`keys`) is what the softmax
is taken over, those that a product sums over and those that only values have. A dim of
size 1 has none. f and g are programs (`score_programs.py`); g is linear in each score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
from jax import lax

from .score_programs import Labels, Program

Names = tuple[int, ...]  # labels of the dims that have one


@dataclass(frozen=True)
class Attention:
    """One kind of attention: labels of every dim, dtypes of what is made.

    `raw` is how f reads scores, `scores` how the softmax does (keys are last) and
    `weights` what g makes. `sides` are what f and g read besides. Gradients are laid
    out as `d_q`, `d_k` and `d_v` say. `precision` is that of the products.
    """

    q: Labels
    k: Labels
    v: Labels
    o: Labels
    raw: Labels
    scores: Labels
    weights: Labels
    d_q: Labels
    d_k: Labels
    d_v: Labels
    sides: tuple[Labels, ...]
    f: Program
    g: Program
    score_dtype: str
    o_dtype: str
    gradient_dtypes: tuple[str, str, str]
    precision: Any = None

    @cached_property
    def statistics(self) -> Names:
        """Labels of what there is one of for each row of scores."""
        return named(self.scores)[:-1]

    @property
    def keys(self) -> int:
        """The label of keys."""
        return named(self.scores)[-1]

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
        """Flops of two products forward, or five backward, from operands' shapes."""
        sizes = self.sizes(*shapes[:3])
        scores = prod(sizes[each] for each in named(self.scores))
        depth = prod(sizes[each] for each in named(self.q) if each not in self.scores)
        width = prod(sizes[each] for each in named(self.o) if each not in self.scores)
        by_depth, by_width = (3, 2) if is_gradient else (1, 1)
        return 2.0 * scores * (by_depth * depth + by_width * width)

    def column(self, side: jax.Array, labels: Labels, start: Any, size: int) -> Any:
        """The part of a side for `size` keys from `start` on."""
        if self.keys not in labels:
            return side
        dim = labels.index(self.keys)
        return lax.dynamic_slice_in_dim(side, start, size, axis=dim)


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
