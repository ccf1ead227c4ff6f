"""The logical meshes of a cluster: aligned shapes, and their neighbours.

Devices are numbered host by host, and a mesh is that row of devices, cut: `x:16;y:4`
cuts 64 devices into runs of 4. A shape is *aligned* if every cut keeps to the levels of
the cluster, whole hosts or equal parts of each host. Axes inside one level have equal
links, so of their orders only the descending one is a candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from ..clusters.cluster import Cluster
from ..sharding.mesh import MeshShape

MAX_AXES = 3
_NAMES = ("x", "y", "z")
_Sizes = tuple[int, ...]


def default_mesh(cluster: Cluster) -> MeshShape:
    """The shape where none is searched: one axis, or one for each level."""
    if cluster.num_hosts == 1 or cluster.devices_per_host == 1:
        return _shape((cluster.num_devices,))
    return _shape((cluster.num_hosts, cluster.devices_per_host))


def mesh_shapes(cluster: Cluster, max_axes: int = MAX_AXES) -> tuple[MeshShape, ...]:
    """Every aligned shape of the whole cluster, fewest axes first, symmetric ones once.

    Axes have two devices or more and are called x, y, z, major first.
    """
    number, inside = cluster.num_devices, cluster.devices_per_host
    cuts = [cut for cut in _divisors(number) if inside % cut == 0 or cut % inside == 0]
    inner = [cut for cut in cuts if 1 < cut < number]
    found = [
        sizes
        for chain in _chains(inner, max_axes - 1)
        if _is_canonical(sizes := _sizes(number, chain), inside)
    ]
    return tuple(_shape(sizes) for sizes in sorted(found, key=_order(cluster)))


def neighbours(
    mesh: MeshShape, cluster: Cluster, *, every_cut: bool = True
) -> Iterator[MeshShape]:
    """Shapes one step away: a cut moved to the next place, then an axis cut in two.

    An axis is cut between the levels if it holds both, else near its middle; with
    `every_cut` at its other places too.
    """
    shapes = {shape.axis_sizes: shape for shape in mesh_shapes(cluster)}
    sizes = mesh.axis_sizes
    near = [*_moved(sizes, shapes)]
    for places in _cut_in_two(sizes, shapes, cluster):
        near += places if every_cut else places[:1]
    yield from (shapes[each] for each in dict.fromkeys(near))


def is_refined_by(mesh: MeshShape, other: MeshShape) -> bool:
    """Whether `other` is `mesh` with none or more of its axes cut further."""
    return _cuts(mesh.axis_sizes) <= _cuts(other.axis_sizes)


def _moved(sizes: _Sizes, shapes: dict[_Sizes, MeshShape]) -> Iterator[_Sizes]:
    """For each pair of adjacent axes the nearest shapes with their cut elsewhere."""
    for axis in range(len(sizes) - 1):
        before, after = sizes[:axis], sizes[axis + 2 :]
        pair = math.prod(sizes[axis : axis + 2])
        minor = sorted(
            each[axis + 1]
            for each in shapes
            if len(each) == len(sizes)
            and each[:axis] == before
            and each[axis + 2 :] == after
        )
        place = minor.index(sizes[axis + 1])
        for near in minor[max(place - 1, 0) : place + 2]:
            if near != sizes[axis + 1]:
                yield (*before, pair // near, near, *after)


def _cut_in_two(
    sizes: _Sizes, shapes: dict[_Sizes, MeshShape], cluster: Cluster
) -> Iterator[list[_Sizes]]:
    """For each axis the shapes in which it is cut once more, the best place first."""
    for axis, size in enumerate(sizes):
        before, after = sizes[:axis], sizes[axis + 1 :]
        level = cluster.devices_per_host // math.prod(after)

        def merit(minor: int, size: int = size, level: int = level) -> tuple[bool, int]:
            return minor != level, size // minor + minor

        places = [
            (*before, size // minor, minor, *after)
            for minor in sorted(_divisors(size), key=merit)
        ]
        canonical = [_canonical(each, cluster.devices_per_host) for each in places]
        yield [each for each in dict.fromkeys(canonical) if each in shapes]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _chains(cuts: Sequence[int], length: int) -> Iterator[_Sizes]:
    """Up to `length` of the cuts, descending, each a multiple of the next."""
    yield ()
    if length:
        for cut in cuts:
            below = [each for each in cuts if each < cut and cut % each == 0]
            yield from ((cut, *rest) for rest in _chains(below, length - 1))


def _sizes(number: int, chain: Sequence[int]) -> _Sizes:
    """The axes of `number` devices cut into runs of the lengths in `chain`."""
    runs = (number, *chain, 1)
    return tuple(run // inner for run, inner in pairwise(runs))


def _cuts(sizes: _Sizes) -> set[int]:
    return {math.prod(sizes[axis:]) for axis in range(1, len(sizes))}


def _is_canonical(sizes: _Sizes, inside: int) -> bool:
    """Whether axes inside one level descend; those that span both are left alone."""
    return sizes == _canonical(sizes, inside)


def _canonical(sizes: _Sizes, inside: int) -> _Sizes:
    """The same with the axes of each level in descending order."""
    for axis in range(len(sizes) - 1):
        one, other = sizes[axis : axis + 2]
        minor = math.prod(sizes[axis + 2 :])
        is_one_level = minor * one * other <= inside or minor >= inside
        if is_one_level and one < other:
            swapped = (*sizes[:axis], other, one, *sizes[axis + 2 :])
            return _canonical(swapped, inside)
    return sizes


def _order(cluster: Cluster) -> Callable[[_Sizes], tuple[int, bool, int, _Sizes]]:
    """Fewest axes first, then those cut between the levels, then balanced ones."""

    def key(sizes: _Sizes) -> tuple[int, bool, int, _Sizes]:
        is_apart = cluster.devices_per_host not in _cuts(sizes)
        return len(sizes), is_apart, sum(sizes), sizes

    return key


def _shape(sizes: _Sizes) -> MeshShape:
    return MeshShape(_NAMES[: len(sizes)], sizes)
