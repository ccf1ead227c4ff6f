"""The cheapest sequence of collectives from one spec of a tensor to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from ..clusters.cluster import Cluster
from ..sharding.collective import Groups
from ..sharding.mesh import MeshShape
from ..sharding.paths import cheapest_path, refined_mesh
from ..sharding.placement import Step, placement_of
from ..sharding.spec import SUM, Spec, dim_of
from .collectives import SIZES, AxisLink, at_size, collective_seconds

_REFERENCE_BYTES = float(1 << 24)  # paths are chosen for a tensor of this size
_EPSILON_SECONDS = 1e-12  # of two equal paths, the one with fewer steps


@dataclass(frozen=True)
class _Path:
    """Steps with their seconds, by the size of the whole tensor."""

    steps: tuple[Step, ...]
    by_size: np.ndarray


class _Prices:
    """What the steps on one mesh cost."""

    def __init__(self, mesh: MeshShape, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self._links: dict[frozenset[int], AxisLink] = {}
        self._seconds: dict[tuple[str, tuple[int, ...], float], float] = {}

    def by_size(self, steps: tuple[Step, ...]) -> np.ndarray:
        """Of a path; even one along axes of one device is dearer than none."""
        seconds = sum(map(self._by_size, steps), np.zeros(len(SIZES)))
        return np.maximum(seconds, _EPSILON_SECONDS)

    def seconds(self, step: Step) -> float:
        """Of a tensor of the size that paths are chosen for."""
        key = (step.kind, step.axes, step.fraction)
        if key not in self._seconds:
            self._seconds[key] = at_size(self._by_size(step), _REFERENCE_BYTES)
        return self._seconds[key]

    def _by_size(self, step: Step) -> np.ndarray:
        if step.kind == "slice" or step.kind == "mask":
            return np.full(len(SIZES), _EPSILON_SECONDS)
        link, sent = self._link(step.axes), SIZES * step.fraction
        return collective_seconds(step.kind, sent, link) + _EPSILON_SECONDS

    def _link(self, axes: Sequence[int]) -> AxisLink:
        key = frozenset(axes)
        if key not in self._links:
            names = [self.mesh.axis_names[axis] for axis in sorted(key)]
            self._links[key] = self.cluster.link(self.mesh, names)
        return self._links[key]


@dataclass
class _Known:
    """What was found so far; plans of one process share it.

    `table` has seconds by size and by the numbers of two specs; nan if not known.
    """

    paths: dict[tuple[Spec, Spec], _Path]
    index_by_spec: dict[Spec, int]
    table: np.ndarray


@lru_cache(maxsize=32)
def _known_on(mesh: MeshShape, cluster: Cluster) -> _Known:
    del mesh, cluster
    return _Known({}, {}, np.empty((len(SIZES), 0, 0)))


class Resharder:
    """Paths and their costs on one mesh; each distinct pair of specs is solved once."""

    def __init__(self, mesh: MeshShape, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self._fine, self._parts = refined_mesh(mesh)
        self._prices = _Prices(self._fine, cluster)
        self._known = _known_on(mesh, cluster)

    def steps(self, source: Spec, target: Spec) -> tuple[Step, ...]:
        """The path from `source` to `target`; empty when they are equal."""
        (source, target), names = _canonical(source, target)
        return tuple(_rename(step, names) for step in self._solve(source, target).steps)

    def seconds(self, source: Spec, target: Spec, num_bytes: float) -> float:
        """Of the path, for a whole tensor of `num_bytes`."""
        pair, _ = _canonical(source, target)
        return float(at_size(self._solve(*pair).by_size, num_bytes))

    def by_size(self, sources: Sequence[Spec], targets: Sequence[Spec]) -> np.ndarray:
        """Seconds for whole tensors of `SIZES`, from each source to each target."""
        rows, columns = self._indices(sources), self._indices(targets)
        where = np.ix_(range(len(SIZES)), rows, columns)
        table = self._known.table
        for row, column in np.argwhere(np.isnan(table[where][0])):
            pair, _ = _canonical(sources[row], targets[column])
            table[:, rows[row], columns[column]] = self._solve(*pair).by_size
        return table[where]

    def _indices(self, specs: Sequence[Spec]) -> list[int]:
        """Where the specs are in the table, which grows by those that are new."""
        known, table = self._known.index_by_spec, self._known.table
        found = [known.setdefault(spec, len(known)) for spec in specs]
        number = table.shape[1]
        if len(known) > number:
            size = 2 * len(known)
            larger = np.full((len(SIZES), size, size), np.nan)
            larger[:, :number, :number] = table
            self._known.table = larger
        return found

    def groups(self, step: Step) -> Groups:
        """Device groups of a collective, members in the order of the step's axes."""
        return step.groups or self.mesh.ordered_groups(step.axes)

    def _solve(self, source: Spec, target: Spec) -> _Path:
        key = (source, target)
        paths = self._known.paths
        if key not in paths:
            if source == target:
                return _Path((), np.zeros(len(SIZES)))
            num_dims = max(map(dim_of, (*source, *target, -1))) + 1
            start, goal = (placement_of(spec, num_dims, self._parts) for spec in key)
            steps = cheapest_path(
                start, goal, self._fine.axis_sizes, self._parts, self._prices.seconds
            )
            in_mesh = tuple(map(self._in_mesh, steps))
            paths[key] = _Path(in_mesh, self._prices.by_size(steps))
        return paths[key]

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
