"""The link that a collective over some mesh axes meets, in hosts and between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .hardware import AxisLink


def link_of_groups(
    cluster: Any, device_groups: Sequence[Sequence[int]], axis_sizes: Sequence[int]
) -> AxisLink:
    """The link that groups of devices of equal size meet, all at once.

    `axis_sizes` are those of the mesh that the devices are numbered in.
    """
    groups, shape = np.array(device_groups), cluster.slice_shape
    inside = cluster.devices_per_host if shape is None else shape.size
    hosts = groups // inside
    leaves = (hosts != hosts[:, :1]).any(axis=1)
    within, between = cluster.host_link, cluster.network_link
    exchange = ring_seconds = None
    if shape is not None:
        places = shape.places(axis_sizes)[groups[0] % inside]
        ring, all_to_all = shape.speeds_in(places[hosts[0] == hosts[0, 0]])
        exchange = 1 / (all_to_all * within.bandwidth * within.efficiency)
        within = replace(within, bandwidth=ring * within.bandwidth)
    if not leaves.any():
        alpha_seconds = within.alpha_seconds
        seconds_per_byte = within.seconds_per_byte
    else:
        rings_by_host = np.zeros(hosts.max() + 1, int)
        for row in hosts[leaves]:
            rings_by_host[np.unique(row)] += 1
        share = int(rings_by_host.max()) / inside
        seconds_per_byte = share * between.seconds_per_byte
        if shape is None:
            size, joined = groups.shape[1], max(len(np.unique(row)) for row in hosts)
            apart, beside = joined - 1, size - joined
            ring_seconds = apart * between.alpha_seconds + beside * within.alpha_seconds
        alpha_seconds = between.alpha_seconds
        if any(len(np.unique(row)) < len(row) for row in hosts):
            alpha_seconds = max(alpha_seconds, within.alpha_seconds)
            seconds_per_byte = max(seconds_per_byte, within.seconds_per_byte)
        exchange = _exchange_seconds_per_byte(
            hosts,
            between.seconds_per_byte / inside,
            exchange or within.seconds_per_byte,
        )
    measured = (between if leaves.any() else within).measured
    return AxisLink(
        *(groups.shape[1], alpha_seconds, seconds_per_byte),
        *(cluster.launch_seconds, measured, exchange, ring_seconds),
    )


def _exchange_seconds_per_byte(
    hosts: np.ndarray, seconds_between: float, seconds_within: float
) -> float:
    """Seconds for each byte that a device sends in an all_to_all between hosts.

    `hosts` [groups, group size] has each device's host. Of n devices, k on a host,
    each of the k sends (n - k) / (n - 1) of its bytes out of the host, through the
    cards that all groups on it share, and (k - 1) / (n - 1) to the others inside.
    """
    num_groups, size = hosts.shape
    here = np.zeros((num_groups, hosts.max() + 1))
    np.add.at(here, (np.arange(num_groups)[:, None], hosts), 1)
    out = float((here * (size - here)).sum(axis=0).max())
    inside = float(here.max()) - 1
    return max(out * seconds_between, inside * seconds_within) / (size - 1)
