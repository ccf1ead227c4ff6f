"""Seconds and bytes of a collective.

Where they were measured (`Link.measured`), by kind, size of the group and bytes. Else,
with n devices in a group, R bytes of result on each, and the slowest link's latency
`alpha` and seconds per byte `beta`:

    seconds = launch + alpha * steps(n) + beta * wire(n) * R

`wire` is what a ring sends from each device (Patarasuk and Yuan 2009), `steps` the
rounds of recursive doubling and halving, which send the same bytes in fewer rounds
(Thakur, Rabenseifner and Gropp 2005, sections 3 and 4): libraries choose between them
by size, so each term takes the algorithm for which it matters. Between hosts of GPUs
NCCL gathers and scatters by rings alone, which pay the latency of every device. An
all_to_all sends as many bytes as a ring, but directly to every other device (NCCL user
guide, on point-to-point communication), so more of them leave a host: its `beta` is its
own (`Cluster.link`).
"""

import math
from bisect import bisect_right
from typing import Any

import numpy as np

from autopar.clusters.hardware import AxisLink as AxisLink
from autopar.clusters.hardware import Curve
from autopar.sharding.collective import COLLECTIVE_KINDS as COLLECTIVE_KINDS
from autopar.sharding.collective import CollectiveKind as CollectiveKind

SIZES = np.array([0.0, *(4.0**power for power in range(8, 19))])
"""Bytes of whole tensors for which costs are tabulated; linear between them."""


def wire_bytes(kind: CollectiveKind, result_bytes: Any, group_size: int) -> Any:
    """Bytes that each device sends in a ring.

    Args:
      kind: which collective.
      result_bytes: bytes of the HLO result on one device; for a reduce_scatter that is
        the shard.
      group_size: number of devices that take part together.

    Returns:
      Bytes; zero in a group of one.

    Raises:
      ValueError: `kind` is no collective, or the group is empty.
    """
    if group_size < 1:
        raise ValueError(
            f"a collective needs a group of 1 device or more, but got {group_size}."
        )
    if kind not in COLLECTIVE_KINDS:
        raise ValueError(
            f"a collective must be one of {', '.join(COLLECTIVE_KINDS)}, "
            f"but got {kind!r}."
        )
    if group_size == 1:
        return 0.0 * result_bytes
    match kind:
        case "all_reduce":
            return result_bytes * 2 * (group_size - 1) / group_size
        case "all_gather" | "all_to_all":
            return result_bytes * (group_size - 1) / group_size
        case "reduce_scatter":
            return result_bytes * (group_size - 1)
        case "collective_permute":
            return result_bytes


def priced_kind(kind: str) -> CollectiveKind:
    """What a collective is priced as: one of no kind with a price as a permutation."""
    return kind if kind in COLLECTIVE_KINDS else "collective_permute"


def collective_seconds(kind: CollectiveKind, result_bytes: Any, link: AxisLink) -> Any:
    """Seconds of one collective; zero in a group of one, where none is made.

    Args:
      kind: which collective.
      result_bytes: bytes of the HLO result on one device, or an array of such.
      link: what it runs over (`Cluster.link`).
    """
    sent = wire_bytes(kind, result_bytes, link.size)
    if link.size == 1:
        return sent
    if kind in link.measured:
        whole = result_bytes * (link.size if kind == "reduce_scatter" else 1)
        return _measured_seconds(kind, whole, link)
    latency = link.alpha_seconds * num_steps(kind, link.size)
    if kind in ("all_gather", "reduce_scatter") and link.ring_seconds is not None:
        latency = link.ring_seconds
    return link.launch_seconds + latency + link.seconds_per_sent_byte(kind) * sent


def at_size(by_size: np.ndarray, num_bytes: float) -> Any:
    """What costs for tensors of `SIZES`, by their first axis, are for another size."""
    i = min(max(bisect_right(SIZES, num_bytes) - 1, 0), len(SIZES) - 2)
    part = (num_bytes - SIZES[i]) / (SIZES[i + 1] - SIZES[i])
    return by_size[i] + (by_size[i + 1] - by_size[i]) * part


def _measured_seconds(kind: CollectiveKind, whole: Any, link: AxisLink) -> Any:
    """In a group of a size that was not measured, between those that were.

    A larger one sends more, as rings do, in more steps.
    """
    size, by_group = link.size, link.measured[kind]
    low = max((n for n in by_group if n <= size), default=min(by_group))
    high = min((n for n in by_group if n >= size), default=low)
    seconds = _between(by_group[low], whole)
    if low < size < high:
        part = math.log(size / low) / math.log(high / low)
        return seconds + (_between(by_group[high], whole) - seconds) * part
    if size > low:
        steps = num_steps(kind, size) - num_steps(kind, low)
        more = (1 - 1 / size) / (1 - 1 / low) if kind != "collective_permute" else 1.0
        seconds = seconds * more + link.alpha_seconds * steps
    return seconds


def _between(pairs: Curve, whole: Any) -> Any:
    """Linear between pairs; below them as the first, beyond them as the last two."""
    sizes, seconds = zip(*pairs, strict=True)
    slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    beyond = np.maximum(whole - sizes[-1], 0.0) * slope
    return np.interp(whole, sizes, seconds) + beyond


def num_steps(kind: CollectiveKind, group_size: int) -> int:
    """Rounds of messages in a group: what the latency of a link is paid for.

    Logarithmic for the collectives that halve or double; an all_to_all sends a message
    to each other device, and a collective_permute sends one.
    """
    if group_size == 1:
        return 0
    rounds = math.ceil(math.log2(group_size))
    match kind:
        case "all_reduce":
            return 2 * rounds
        case "all_gather" | "reduce_scatter":
            return rounds
        case "all_to_all":
            return group_size - 1
        case "collective_permute":
            return 1
