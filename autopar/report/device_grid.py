"""The devices of a mesh as tables, with their hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from ..clusters.cluster import Cluster
from ..sharding.mesh import MeshShape

MOST_ROWS, MOST_COLUMNS, MOST_SLICES = 16, 16, 4


@dataclass(frozen=True)
class DeviceCell:
    """One device by number, and its host where that is known."""

    device: int
    host: int | None


@dataclass(frozen=True)
class GridSlice:
    """Devices along the last two axes; `title` fixes the others, as in `z = 1`."""

    title: str
    rows: tuple[tuple[DeviceCell, ...], ...]


@dataclass(frozen=True)
class DeviceGrid:
    """A mesh drawn: `row_axis` is empty if there is one axis.

    `is_whole` is false if only the first devices are drawn.
    """

    name: str
    mesh: MeshShape
    row_axis: str
    column_axis: str
    slices: tuple[GridSlice, ...]
    is_whole: bool


def device_grids(
    meshes: Sequence[MeshShape], cluster: Cluster | None, names: Sequence[str]
) -> tuple[DeviceGrid, ...]:
    """A grid for each mesh; their devices follow each other."""
    first, grids = 0, []
    for mesh, name in zip(meshes, names, strict=True):
        grids.append(_grid(mesh, cluster, name, first))
        first += mesh.size
    return tuple(grids)


def _grid(
    mesh: MeshShape, cluster: Cluster | None, name: str, first: int
) -> DeviceGrid:
    axes = mesh.axis_names
    sizes = (1, 1, *mesh.axis_sizes)
    *outer, num_rows, num_columns = sizes
    labels = ["", "", *axes][: len(outer)]

    def cell(device: int) -> DeviceCell:
        per_host = None if cluster is None else cluster.devices_per_host
        host = None if per_host is None else (first + device) // per_host
        return DeviceCell(first + device, host)

    slices = []
    for number, index in enumerate(product(*map(range, outer))):
        if number == MOST_SLICES:
            break
        fixed = zip(labels, index, strict=True)
        start = number * num_rows * num_columns
        rows = tuple(
            tuple(
                cell(start + row * num_columns + column)
                for column in range(min(num_columns, MOST_COLUMNS))
            )
            for row in range(min(num_rows, MOST_ROWS))
        )
        slices.append(GridSlice(", ".join(f"{a} = {i}" for a, i in fixed if a), rows))
    return DeviceGrid(
        name,
        mesh,
        axes[-2] if len(axes) > 1 else "",
        axes[-1] if axes else "",
        tuple(slices),
        num_rows <= MOST_ROWS
        and num_columns <= MOST_COLUMNS
        and prod(outer) <= MOST_SLICES,
    )
