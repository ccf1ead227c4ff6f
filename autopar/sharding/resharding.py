"""The cheapest sequence of collectives from one spec of a tensor to another.

Dijkstra over *placements*: for every dim the ordered axes that split it, and the axes
whose reduction is pending. The moves are the collectives, plus two that cost nothing
on the wire: slicing a replicated axis onto a dim, and masking a replicated value so
that it is the sum of its shards. A dim never holds axes that neither spec puts on it,
so every placement on the way divides whenever both ends do.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, count, permutations, product
from math import inf, prod
from typing import Any, Literal

import numpy as np

from ..clusters.cluster import Cluster
from ..costs.collectives import AxisLink, CollectiveKind, affine
from .mesh import MeshShape
from .spec import REPLICATED, SUM, Spec, State, axes_of_dim

_REFERENCE_BYTES = float(1 << 24)  # paths are chosen for a tensor of this size
_EPSILON_SECONDS = 1e-12  # of two equal paths, the one with fewer steps


StepKind = CollectiveKind | Literal["slice", "mask"]


@dataclass(frozen=True)
class Step:
    """One local slice or mask, or one collective.

    `dim` is the dim that is gathered, scattered onto or sliced; an all_to_all gathers
    `dim` and splits `target_dim`. `fraction` is the size of one device's result as a
    part of the whole tensor. `pairs` are the (source, target) devices of a permutation.
    """

    kind: StepKind
    axes: tuple[int, ...]
    fraction: float
    dim: int = -1
    target_dim: int = -1
    reduction: State = SUM
    pairs: tuple[tuple[int, int], ...] = ()

    @property
    def is_collective(self) -> bool:
        return self.kind not in ("slice", "mask")


@dataclass(frozen=True)
class _Placement:
    """Ordered axes on each used dim, and pending axes with their reduction."""

    dims: tuple[tuple[int, ...], ...]
    pending: tuple[tuple[int, State], ...]

    def without(self, dim: int, axes: Sequence[int]) -> _Placement:
        return self.replace(dim, tuple(a for a in self.dims[dim] if a not in axes))

    def append(self, dim: int, axes: Sequence[int]) -> _Placement:
        return self.replace(dim, (*self.dims[dim], *axes))

    def replace(self, dim: int, axes: tuple[int, ...]) -> _Placement:
        dims = (*self.dims[:dim], axes, *self.dims[dim + 1 :])
        return _Placement(dims, self.pending)

    def close(self, axes: Sequence[int]) -> _Placement:
        pending = tuple(item for item in self.pending if item[0] not in axes)
        return _Placement(self.dims, pending)

    def used(self) -> set[int]:
        return {*chain(*self.dims), *(axis for axis, _ in self.pending)}


_Path = tuple[tuple[Step, _Placement], ...]


class Resharder:
    """Paths and their costs on one mesh; each distinct pair of specs is solved once."""

    def __init__(self, mesh: MeshShape, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self._links: dict[frozenset[int], AxisLink] = {}
        self._affine_of: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}
        self._paths: dict[tuple[Spec, Spec], tuple[Step, ...]] = {}
        self._costs: dict[tuple[Spec, Spec], tuple[float, float]] = {}
        self._index_by_spec: dict[Spec, int] = {}
        self._table = np.empty((0, 0, 2))  # seconds, seconds per byte; nan if not known

    def steps(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        """The path from `source` to `target`; empty when they are equal."""
        (source, target), names = _canonical(source, target)
        steps = self._solve(source, target)
        return tuple(_rename(step, names) for step in steps)

    def seconds(self, source: Spec, target: Spec) -> tuple[float, float]:
        """`(seconds, seconds per byte of the whole tensor)` of the path."""
        pair, _ = _canonical(source, target)
        if pair not in self._costs:
            fixed = per_byte = 0.0
            for step in self._solve(*pair):
                step_fixed, step_per_byte = self._affine(step)
                fixed += step_fixed
                per_byte += step_per_byte
            self._costs[pair] = (fixed, per_byte)
        return self._costs[pair]

    def affine_matrices(
        self, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and seconds per byte, from each source [n] to each target [m]."""
        rows, columns = self._indices(sources), self._indices(targets)
        where = np.ix_(rows, columns)
        for row, column in np.argwhere(np.isnan(self._table[where][..., 0])):
            pair = sources[row], targets[column]
            self._table[rows[row], columns[column]] = self.seconds(*pair)
        found = self._table[where]
        return found[..., 0], found[..., 1]

    def _indices(self, specs: Sequence[Spec]) -> list[int]:
        """Where the specs are in the table, which grows by those that are new."""
        known = self._index_by_spec
        found = [known.setdefault(spec, len(known)) for spec in specs]
        if len(known) > len(self._table):
            size = 2 * len(known)
            larger = np.full((size, size, 2), np.nan)
            before = len(self._table)
            larger[:before, :before] = self._table
            self._table = larger
        return found

    def _affine(self, step: Step) -> tuple[float, float]:
        if step.kind == "slice" or step.kind == "mask":
            return _EPSILON_SECONDS, 0.0
        key = (step.kind, step.axes)
        if key not in self._affine_of:
            self._affine_of[key] = affine(step.kind, [self._link(step.axes)])
        fixed, per_byte = self._affine_of[key]
        return fixed + _EPSILON_SECONDS, per_byte * step.fraction

    def _link(self, axes: Sequence[int]) -> AxisLink:
        key = frozenset(axes)
        if key not in self._links:
            names = [self.mesh.axis_names[axis] for axis in sorted(key)]
            self._links[key] = self.cluster.link(self.mesh, names)
        return self._links[key]

    def groups(self, step: Step) -> tuple[tuple[int, ...], ...]:
        """Device groups of a collective, members in the order of the step's axes."""
        if step.pairs:
            return step.pairs
        sizes = self.mesh.axis_sizes
        ids = np.arange(prod(sizes)).reshape(sizes)
        rest = [axis for axis in range(len(sizes)) if axis not in step.axes]
        group_size = prod(sizes[axis] for axis in step.axes)
        grouped = ids.transpose(*rest, *step.axes).reshape(-1, group_size)
        return tuple(tuple(map(int, group)) for group in grouped)

    def _solve(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        key = (source, target)
        if key not in self._paths:
            self._paths[key] = self._dijkstra(source, target)
        return self._paths[key]

    def _dijkstra(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        num_dims = max((*source, *target, -1)) + 1
        start = _placement(source, num_dims)
        goal = _placement(target, num_dims)
        tick = count(1)
        queue: list[tuple[float, int, _Placement, _Path]] = [(0.0, 0, start, ())]
        done: set[_Placement] = set()
        least: dict[_Placement, float] = {start: 0.0}
        while queue:
            cost, _, placement, path = heapq.heappop(queue)
            if placement == goal:
                return self._with_pairs(start, path)
            if placement in done:
                continue
            done.add(placement)
            for step, reached in self._moves(placement, start, goal):
                if reached not in done:
                    fixed, per_byte = self._affine(step)
                    total = cost + fixed + per_byte * _REFERENCE_BYTES
                    if total < least.get(reached, inf):
                        least[reached] = total
                        longer = (*path, (step, reached))
                        heapq.heappush(queue, (total, next(tick), reached, longer))
        raise AssertionError(f"no path from {source} to {target}")

    def _with_pairs(self, start: _Placement, path: _Path) -> tuple[Step, ...]:
        """The steps of a path, each permutation told who sends to whom."""
        steps, here = [], start
        for step, reached in path:
            if step.kind == "collective_permute":
                step = replace(step, pairs=self._pairs(here, reached))
            steps.append(step)
            here = reached
        return tuple(steps)

    def _fraction(self, placement: _Placement) -> float:
        sizes = self.mesh.axis_sizes
        return 1.0 / prod(sizes[axis] for axis in chain(*placement.dims))

    def _moves(
        self, here: _Placement, start: _Placement, goal: _Placement
    ) -> Iterator[tuple[Step, _Placement]]:
        yield from self._reductions(here, goal)
        sizes = self.mesh.axis_sizes
        wanted = {axis: dim for dim, axes in enumerate(goal.dims) for axis in axes}
        for dim, axes in enumerate(here.dims):
            for first in range(len(axes)):
                suffix = axes[first:]
                rest = here.without(dim, suffix)
                yield (
                    Step("all_gather", suffix, self._fraction(rest), dim),
                    rest,
                )
                targets = {wanted.get(axis, dim) for axis in suffix}
                if len(targets) == 1 and dim not in targets:
                    target_dim = targets.pop()
                    if set(here.dims[target_dim]) <= set(goal.dims[target_dim]):
                        moved = rest.append(target_dim, suffix)
                        fraction = self._fraction(moved)
                        yield (
                            Step("all_to_all", suffix, fraction, dim, target_dim),
                            moved,
                        )
        used = here.used()
        for axis in range(len(sizes)):
            if axis not in used:
                dim = wanted.get(axis)
                if dim is not None and set(here.dims[dim]) <= set(goal.dims[dim]):
                    reached = here.append(dim, (axis,))
                    yield Step("slice", (axis,), self._fraction(reached), dim), reached
                elif (axis, SUM) in goal.pending:
                    pending = tuple(sorted((*here.pending, (axis, SUM))))
                    reached = _Placement(here.dims, pending)
                    yield Step("mask", (axis,), self._fraction(here)), reached
        yield from self._permutations(here, start, goal)

    def _reductions(
        self, here: _Placement, goal: _Placement
    ) -> Iterator[tuple[Step, _Placement]]:
        keep = set(goal.pending)
        for reduction in sorted({state for _, state in here.pending}):
            closable = [
                axis
                for axis, state in here.pending
                if state == reduction and (axis, state) not in keep
            ]
            for axes in _subsets(closable):
                closed = here.close(axes)
                fraction = self._fraction(closed)
                yield Step("all_reduce", axes, fraction, reduction=reduction), closed
                if reduction != SUM:
                    continue
                for dim, wanted in enumerate(goal.dims):
                    if {*here.dims[dim], *axes} <= set(wanted):
                        reached = closed.append(dim, axes)
                        fraction = self._fraction(reached)
                        yield Step("reduce_scatter", axes, fraction, dim), reached

    def _permutations(
        self, here: _Placement, start: _Placement, goal: _Placement
    ) -> Iterator[tuple[Step, _Placement]]:
        """Relabel the axes of the dims so that every shard keeps its shape."""
        sizes = self.mesh.axis_sizes
        fixed = {axis for axis, _ in here.pending}
        free = [axis for axis in range(len(sizes)) if axis not in fixed]
        dims = [
            (len(axes), prod(sizes[axis] for axis in axes), set(after), set(before))
            for axes, after, before in zip(
                here.dims, goal.dims, start.dims, strict=True
            )
        ]
        num_used = sum(len(axes) for axes in here.dims)
        if not num_used:
            return
        for order in permutations(free, num_used):
            reached, taken = [], 0
            for length, size, after, before in dims:
                new = order[taken : taken + length]
                if prod([sizes[axis] for axis in new]) != size:
                    break
                if not after.issuperset(new) and not before.issuperset(new):
                    break
                reached.append(new)
                taken += length
            else:
                placement = _Placement(tuple(reached), here.pending)
                if placement != here:
                    axes, fraction = tuple(range(len(sizes))), self._fraction(here)
                    yield Step("collective_permute", axes, fraction), placement

    def _pairs(
        self, source: _Placement, target: _Placement
    ) -> tuple[tuple[int, int], ...]:
        """Which device sends its shard to which, each device sending once."""
        holders: dict[tuple[int, ...], list[int]] = {}
        readers: dict[tuple[int, ...], list[int]] = {}
        sizes = self.mesh.axis_sizes
        pending = [axis for axis, _ in source.pending]
        for device, position in enumerate(product(*map(range, sizes))):
            for placement, table in ((source, holders), (target, readers)):
                block = []
                for axes in placement.dims:
                    index = 0
                    for axis in axes:
                        index = index * sizes[axis] + position[axis]
                    block.append(index)
                block.extend(position[axis] for axis in pending)
                table.setdefault(tuple(block), []).append(device)
        pairs = [
            pair
            for block, devices in holders.items()
            for pair in zip(devices, readers[block], strict=True)
        ]
        return tuple(sorted(pairs))


def wire_dtype(step: Step, dtype: Any) -> np.dtype:
    """What the elements are sent as: booleans, and floats whose order matters, by code.

    An all-reduce with max or min may drop NaN (XLA's on CPU does), so floats go as
    integers in the same order, with NaN as the last one.
    """
    if step.kind != "all_reduce":
        return dtype
    if dtype == np.bool_:  # a sum of booleans is no boolean
        return np.dtype(np.uint8)
    if step.reduction == SUM or np.issubdtype(dtype, np.integer):
        return dtype
    return np.dtype(np.int64 if dtype.itemsize == 8 else np.int32)


def _subsets(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(axes), 0, -1):
        yield from combinations(axes, size)


def _placement(spec: Spec, num_dims: int) -> _Placement:
    dims = tuple(axes_of_dim(spec, dim) for dim in range(num_dims))
    pending = tuple((a, state) for a, state in enumerate(spec) if state < REPLICATED)
    return _Placement(dims, pending)


def _canonical(source: Spec, target: Spec) -> tuple[tuple[Spec, Spec], list[int]]:
    """The pair with its dims renamed 0, 1, ... by first use, and the old names."""
    names: list[int] = []
    for state in (*source, *target):
        if state >= 0 and state not in names:
            names.append(state)

    def rename(spec: Spec) -> Spec:
        return tuple(names.index(s) if s >= 0 else s for s in spec)

    return (rename(source), rename(target)), names


def _rename(step: Step, names: Sequence[int]) -> Step:
    return Step(
        step.kind,
        step.axes,
        step.fraction,
        names[step.dim] if step.dim >= 0 else -1,
        names[step.target_dim] if step.target_dim >= 0 else -1,
        step.reduction,
        step.pairs,
    )
