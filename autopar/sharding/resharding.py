"""The cheapest sequence of collectives from one spec of a tensor to another.

Each pair of specs has two candidates: the collectives that leave every axis what it is
(`direct_paths`), and those around one exchange of whole shards (`permuted_paths`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ..clusters.cluster import Cluster
from ..costs.collectives import AxisLink, affine
from .collective import Groups
from .direct_paths import direct_path
from .mesh import MeshShape
from .permuted_paths import PermutedPaths, refined_mesh
from .placement import Placement, Step, placement_of
from .spec import SUM, Spec, dim_of

_REFERENCE_BYTES = float(1 << 24)  # paths are chosen for a tensor of this size
_EPSILON_SECONDS = 1e-12  # of two equal paths, the one with fewer steps


@dataclass(frozen=True)
class _Path:
    """Steps with their seconds, of the whole and for each byte of the tensor."""

    steps: tuple[Step, ...]
    fixed: float
    per_byte: float


class _Prices:
    """What the steps on one mesh cost."""

    def __init__(self, mesh: MeshShape, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self._links: dict[frozenset[int], AxisLink] = {}
        self._affine_of: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}

    def path(self, steps: tuple[Step, ...]) -> _Path:
        costs = [self._affine(step) for step in steps]
        return _Path(steps, sum(c[0] for c in costs), sum(c[1] for c in costs))

    def seconds(self, step: Step) -> float:
        """Of a tensor of the size that paths are chosen for."""
        fixed, per_byte = self._affine(step)
        return fixed + per_byte * _REFERENCE_BYTES

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


@dataclass
class _Known:
    """What was found so far; plans of one process share it.

    `table` has seconds, and seconds per byte, by the numbers of two specs; nan if not
    known.
    """

    paths: dict[tuple[Spec, Spec], _Path]
    index_by_spec: dict[Spec, int]
    table: np.ndarray


@lru_cache(maxsize=32)
def _known_on(mesh: MeshShape, cluster: Cluster) -> _Known:
    del mesh, cluster
    return _Known({}, {}, np.empty((0, 0, 2)))


class Resharder:
    """Paths and their costs on one mesh; each distinct pair of specs is solved once."""

    def __init__(self, mesh: MeshShape, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.prices = _Prices(mesh, cluster)
        self._fine, self._parts = refined_mesh(mesh)
        self._fine_prices = _Prices(self._fine, cluster)
        self._permuted = PermutedPaths(
            self._fine.axis_sizes, self._parts, self._fine_prices.seconds
        )
        self._known = _known_on(mesh, cluster)

    def steps(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        """The path from `source` to `target`; empty when they are equal."""
        (source, target), names = _canonical(source, target)
        return tuple(_rename(step, names) for step in self._solve(source, target).steps)

    def seconds(self, source: Spec, target: Spec) -> tuple[float, float]:
        """`(seconds, seconds per byte of the whole tensor)` of the path."""
        pair, _ = _canonical(source, target)
        path = self._solve(*pair)
        return path.fixed, path.per_byte

    def affine_matrices(
        self, sources: Sequence[Spec], targets: Sequence[Spec]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, and seconds per byte, from each source [n] to each target [m]."""
        rows, columns = self._indices(sources), self._indices(targets)
        where = np.ix_(rows, columns)
        table = self._known.table
        for row, column in np.argwhere(np.isnan(table[where][..., 0])):
            pair = sources[row], targets[column]
            table[rows[row], columns[column]] = self.seconds(*pair)
        found = table[where]
        return found[..., 0], found[..., 1]

    def _indices(self, specs: Sequence[Spec]) -> list[int]:
        """Where the specs are in the table, which grows by those that are new."""
        known, table = self._known.index_by_spec, self._known.table
        found = [known.setdefault(spec, len(known)) for spec in specs]
        if len(known) > len(table):
            size = 2 * len(known)
            larger = np.full((size, size, 2), np.nan)
            larger[: len(table), : len(table)] = table
            self._known.table = larger
        return found

    def groups(self, step: Step) -> Groups:
        """Device groups of a collective, members in the order of the step's axes."""
        return step.groups or self.mesh.ordered_groups(step.axes)

    def _solve(self, source: Spec, target: Spec) -> _Path:
        key = (source, target)
        paths = self._known.paths
        if key not in paths:
            num_dims = max(map(dim_of, (*source, *target, -1))) + 1
            ends = placement_of(source, num_dims), placement_of(target, num_dims)
            paths[key] = self._cheapest(*ends)
        return paths[key]

    def _cheapest(self, start: Placement, goal: Placement) -> _Path:
        sizes = self.mesh.axis_sizes
        cost, direct = direct_path(start, goal, sizes, self.prices.seconds)
        if len(direct) > 1:  # one step alone sends no more than what the goal lacks
            ends = start.renamed(self._parts), goal.renamed(self._parts)
            if ends[0] == ends[1]:  # but for axes of one device
                return self.prices.path(())
            permuted = self._permuted.path(*ends, cost)
            if permuted is not None:
                path = self._fine_prices.path(permuted)
                return replace(path, steps=tuple(map(self._in_mesh, permuted)))
        return self.prices.path(direct)

    def _in_mesh(self, step: Step) -> Step:
        """A step along axes of the finer mesh as one along those of the mesh."""
        owner = {part: axis for axis, parts in enumerate(self._parts) for part in parts}
        owners = list(dict.fromkeys(owner[part] for part in step.axes))
        whole = tuple(part for axis in owners for part in self._parts[axis])
        here = replace(step, axes=tuple(owners))
        if step.kind == "collective_permute" or step.axes == whole:
            return here
        if step.kind == "slice":
            (part,), (axis,) = step.axes, owners
            sizes = self._fine.axis_sizes
            stride = prod(sizes[p] for p in self._parts[axis] if p > part)
            return replace(here, part=(stride, sizes[part]))
        return replace(here, groups=self._fine.ordered_groups(step.axes))


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


def _canonical(source: Spec, target: Spec) -> tuple[tuple[Spec, Spec], tuple[int, ...]]:
    """The pair with its dims renamed 0, 1, ... by first use, and the old names."""
    names = tuple(dict.fromkeys((*_dims_of(source), *_dims_of(target))))
    return (_numbered(source, names), _numbered(target, names)), names


@lru_cache(maxsize=4096)
def _dims_of(spec: Spec) -> tuple[int, ...]:
    """The dims that axes split, by first use."""
    return tuple(dict.fromkeys(dim_of(state) for state in spec if state >= 0))


@lru_cache(maxsize=4096)
def _numbered(spec: Spec, names: tuple[int, ...]) -> Spec:
    """The spec with the place of each dim among names in its stead."""
    pairs = ((state, dim_of(state)) for state in spec)
    return tuple(s - d + names.index(d) if s >= 0 else s for s, d in pairs)


def _rename(step: Step, names: Sequence[int]) -> Step:
    dim, target_dim = (names[d] if d >= 0 else -1 for d in (step.dim, step.target_dim))
    return replace(step, dim=dim, target_dim=target_dim)
