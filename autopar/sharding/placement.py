"""Where a tensor lies on the way from one spec to another, and the steps it takes.

A placement says for every dim which axes split it, the most major first, and which axes
owe a reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations
from math import prod
from typing import Literal

import numpy as np

from .collective import CollectiveKind, Groups
from .spec import REPLICATED, SUM, Spec, State, axes_of_dim

StepKind = CollectiveKind | Literal["slice", "mask"]


@dataclass(frozen=True)
class Step:
    """One local slice or mask, or one collective.

    Attributes:
      kind: what is done.
      axes: the mesh axes along which devices talk, or by which is sliced or masked.
      fraction: the size of one device's result as a part of the whole tensor.
      dim: the dim that is gathered, scattered onto or sliced; an all_to_all gathers it
        and splits `target_dim`.
      reduction: of an all_reduce or a reduce_scatter.
      part: of a slice: `(stride, size)`, where it is not by the index `i` along its
        axis but by `i // stride % size`.
      groups: the devices that talk, where they are not all along `axes`; the (source,
        target) pairs of a permutation.
    """

    kind: StepKind
    axes: tuple[int, ...]
    fraction: float
    dim: int = -1
    target_dim: int = -1
    reduction: State = SUM
    part: tuple[int, int] | None = None
    groups: Groups = ()

    @property
    def is_collective(self) -> bool:
        return self.kind not in ("slice", "mask")


@dataclass(frozen=True)
class Placement:
    """Ordered axes on each used dim, and pending axes with their reduction."""

    dims: tuple[tuple[int, ...], ...]
    pending: tuple[tuple[int, State], ...]

    def without(self, dim: int, axes: Sequence[int]) -> Placement:
        return self.replace(dim, tuple(a for a in self.dims[dim] if a not in axes))

    def append(self, dim: int, axes: Sequence[int]) -> Placement:
        return self.replace(dim, (*self.dims[dim], *axes))

    def replace(self, dim: int, axes: tuple[int, ...]) -> Placement:
        dims = (*self.dims[:dim], axes, *self.dims[dim + 1 :])
        return Placement(dims, self.pending)

    def close(self, axes: Sequence[int]) -> Placement:
        pending = tuple(item for item in self.pending if item[0] not in axes)
        return Placement(self.dims, pending)

    def owe(self, axes: Sequence[int]) -> Placement:
        added = ((axis, SUM) for axis in axes)
        return Placement(self.dims, tuple(sorted((*self.pending, *added))))

    def used(self) -> set[int]:
        return {*chain(*self.dims), *(axis for axis, _ in self.pending)}

    def counts(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Into how many parts each dim is cut."""
        return _counts(self.dims, sizes)

    def fraction(self, sizes: Sequence[int]) -> float:
        """One shard as a part of the tensor."""
        return 1.0 / prod(self.counts(sizes))


@lru_cache(maxsize=4096)
def _counts(dims: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple([prod([sizes[axis] for axis in axes]) for axes in dims])


Move = tuple[Step, Placement]
"""A step, and where it leads."""


def placement_of(
    spec: Spec, num_dims: int, parts: Sequence[tuple[int, ...]]
) -> Placement:
    """What a spec of a tensor with `num_dims` dims says.

    Args:
      spec: states of the axes of a mesh.
      num_dims: of the tensor.
      parts: the axes that each of them is made of; none if it has one device.
    """
    dims = tuple(
        tuple(chain(*(parts[axis] for axis in axes_of_dim(spec, dim))))
        for dim in range(num_dims)
    )
    pending = tuple(
        (part, state)
        for axis, state in enumerate(spec)
        if state < REPLICATED
        for part in parts[axis]
    )
    return Placement(dims, pending)


def reductions(
    here: Placement,
    goal: Placement,
    sizes: Sequence[int],
    bundles: Sequence[tuple[int, ...]],
    may_hold: Callable[[int, Placement], bool],
) -> Iterator[Move]:
    """The collectives that close pending axes that the goal does not have.

    Args:
      here: has the pending axes.
      goal: keeps some.
      sizes: of the axes.
      bundles: axes that are closed together.
      may_hold: whether a dim may be split as it is in a placement.
    """
    keep = set(goal.pending)
    for reduction in sorted({state for _, state in here.pending}):
        owed = {axis for axis, state in here.pending if state == reduction}
        closable = [
            axes
            for axes in bundles
            if axes and owed.issuperset(axes) and (axes[0], reduction) not in keep
        ]
        numbers = range(len(closable), 0, -1)
        for chosen in chain(*(combinations(closable, n) for n in numbers)):
            axes = tuple(chain(*chosen))
            closed = here.close(axes)
            fraction = closed.fraction(sizes)
            yield Step("all_reduce", axes, fraction, reduction=reduction), closed
            if reduction != SUM:
                continue
            for dim in range(len(goal.dims)):
                ordered = _in_order(axes, goal.dims[dim])
                reached = closed.append(dim, ordered)
                if may_hold(dim, reached):
                    fraction = reached.fraction(sizes)
                    yield Step("reduce_scatter", ordered, fraction, dim), reached


def _in_order(axes: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Axes in the order that they have in a dim, if it has them all."""
    if not set(axes) <= set(wanted):
        return axes
    return tuple(sorted(axes, key=wanted.index))


def moved_axes(
    source: Placement, target: Placement, sizes: Sequence[int]
) -> tuple[int, ...]:
    """The axes that do not mean the same in two placements."""
    before, after = _roles(source, sizes), _roles(target, sizes)
    return tuple(axis for axis in range(len(sizes)) if before[axis] != after[axis])


def permuted_pairs(
    source: Placement, target: Placement, sizes: Sequence[int]
) -> Groups:
    """Which device sends its shard to which, between placements with equal shards.

    Each sends once, to one that has the same index along every axis but the moved.
    """
    moved = moved_axes(source, target, sizes)
    kept = tuple(axis for axis in range(len(sizes)) if axis not in moved)
    positions = np.indices(sizes).reshape(len(sizes), -1)

    def blocks(placement: Placement) -> np.ndarray:
        """[devices] the number of the shard, and where along the axes that are kept."""
        axes = tuple(chain(kept, *placement.dims))
        if not axes:
            return np.zeros(prod(sizes), np.intp)
        shape = tuple(sizes[axis] for axis in axes)
        return np.asarray(np.ravel_multi_index(tuple(positions[list(axes)]), shape))

    held, read = blocks(source), blocks(target)
    readers = np.arange(len(held))  # nobody sends to another what it reads itself
    senders = np.flatnonzero(held != read)
    order = np.argsort(held[senders], kind="stable")
    to = np.argsort(read[senders], kind="stable")
    readers[senders[order]] = senders[to]
    return tuple(enumerate(readers.tolist()))


def _roles(placement: Placement, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """What each axis means: the dim it splits and the parts before, or what it owes."""
    found: list[tuple[int, ...]] = [(REPLICATED,)] * len(sizes)
    for axis, state in placement.pending:
        found[axis] = (state,)
    for dim, axes in enumerate(placement.dims):
        before = 1
        for axis in axes:
            found[axis] = (dim, before)
            before *= sizes[axis]
    return found
