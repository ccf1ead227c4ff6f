"""Links inside hosts whose devices are not all joined alike.

Eight V100s make a hybrid cube mesh: a device has six NVLink lanes, one or two to each
of four others and none to the other three, which it reaches over PCIe (NVIDIA DGX-1
with Tesla V100 System Architecture, figure 4; p3.16xlarge is wired the same). So two
neighbours have one lane where eight devices have six each. For devices inside a host:

    a ring       goes at the lanes that its poorest device has to others of its group
    all_to_all   each device serves its peers in turn, each over the lanes to that peer

Stages are taken to begin at the first device of a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.clusters.hardware import AxisLink
from autopar.sharding.mesh import MeshShape

LANES_BY_KIND = {
    "V100": (
        (0, 1, 1, 2, 2, 0, 0, 0),
        (1, 0, 2, 1, 0, 2, 0, 0),
        (1, 2, 0, 2, 0, 0, 1, 0),
        (2, 1, 2, 0, 0, 0, 0, 1),
        (2, 0, 0, 0, 0, 1, 1, 2),
        (0, 2, 0, 0, 1, 0, 2, 1),
        (0, 0, 1, 0, 1, 2, 0, 2),
        (0, 0, 0, 1, 2, 1, 2, 0),
    )
}
_PCIE_LANES = 8e9 / 25e9
"""PCIe in lanes of NVLink (25 GB/s): 16 GB/s (3.0 x16), shared by two devices."""


@lru_cache(maxsize=4096)
def link_of(cluster: Cluster, mesh: MeshShape, axes: tuple[str, ...]) -> AxisLink:
    """As `Cluster.link`, with the lanes of groups that stay inside a host.

    Hosts of a kind that is not known here join all their devices alike.
    """
    link = cluster.link(mesh, axes)
    table = LANES_BY_KIND.get(cluster.device.kind)
    groups = np.array(mesh.groups(axes))
    if table is None or mesh.size > len(table) or groups.shape[1] == 1:
        return link
    lanes = np.array(table, float)
    whole = float(lanes.sum(axis=1).max())
    ring = min(_ring_lanes(lanes, group) for group in groups)
    turn = max(_mean_turn(lanes, group) for group in groups)
    seconds = link.seconds_per_byte * whole
    return replace(
        link, seconds_per_byte=seconds / ring, exchange_seconds_per_byte=seconds * turn
    )


def _ring_lanes(lanes: np.ndarray, group: Sequence[int]) -> float:
    """Lanes of the poorest device to the others of its group."""
    inside = lanes[np.ix_(group, group)]
    return max(float(inside.sum(axis=1).min()), _PCIE_LANES)


def _mean_turn(lanes: np.ndarray, group: Sequence[int]) -> float:
    """Of the slowest device, the mean of one over its lanes to each peer."""
    inside = np.maximum(lanes[np.ix_(group, group)], _PCIE_LANES)
    turns = 1 / inside
    np.fill_diagonal(turns, 0.0)
    return float(turns.sum(axis=1).max()) / (len(group) - 1)
