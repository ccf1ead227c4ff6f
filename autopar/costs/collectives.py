"""Seconds and bytes of a collective, affine in the bytes of its per-device result.

With n devices in a group, R bytes of result on each, and the slowest link's latency
`alpha` and seconds per byte `beta`:

    seconds = launch + alpha * steps(n) + beta * wire(n) * R

`wire` is what a ring sends from each device (Patarasuk and Yuan 2009), `steps` the
rounds of recursive doubling and halving, which send the same bytes in fewer rounds
(Thakur, Rabenseifner and Gropp 2005, sections 3 and 4): libraries choose between them
by size, so each term takes the algorithm for which it matters. An all_to_all sends as
many bytes as a ring, but directly to every other device (NCCL user guide, on
point-to-point communication), so more of them leave a host: its `beta` is its own
(`Cluster.link`). A link that was measured has two factors for each kind of collective,
of all that is constant and of the bytes.
"""

import math
from collections.abc import Sequence

from autopar.clusters.hardware import COLLECTIVE_KINDS as COLLECTIVE_KINDS
from autopar.clusters.hardware import AxisLink as AxisLink
from autopar.clusters.hardware import CollectiveKind as CollectiveKind


def wire_bytes(kind: CollectiveKind, result_bytes: float, group_size: int) -> float:
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
    return _wire_fraction(kind, group_size) * result_bytes


def affine(kind: CollectiveKind, links: Sequence[AxisLink]) -> tuple[float, float]:
    """A collective's cost as a constant and a slope.

    Args:
      kind: which collective.
      links: the mesh axes it runs over. Several are charged as one group of their
        product at the slowest one's latency and bandwidth, which is never too low;
        `Cluster.link(mesh, axes)` gives the exact link for several axes, to be passed
        alone.

    Returns:
      (alpha_seconds, seconds_per_result_byte): launch and latency, and seconds for each
      byte of the per-device result. Both are zero in a group of one, where no
      collective is made.
    """
    group_size = math.prod(link.size for link in links)
    slope = _wire_fraction(kind, group_size)
    if group_size == 1:
        return 0.0, 0.0
    used = [link for link in links if link.size > 1]
    launch_seconds = max(link.launch_seconds for link in used)
    step_seconds = max(link.alpha_seconds for link in used)
    seconds_per_byte = max(link.seconds_per_sent_byte(kind) for link in used)
    latency = launch_seconds + step_seconds * num_steps(kind, group_size)
    slower, longer = _factors(kind, used)
    return slower * latency, longer * slope * seconds_per_byte


def collective_seconds(
    kind: CollectiveKind, result_bytes: float, links: Sequence[AxisLink]
) -> float:
    """Seconds of one collective whose result has `result_bytes` on each device.

    Args:
      kind: which collective.
      result_bytes: bytes of the HLO result on one device.
      links: the mesh axes it runs over, as in `affine`.
    """
    alpha_seconds, seconds_per_result_byte = affine(kind, links)
    return alpha_seconds + seconds_per_result_byte * result_bytes


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


def _factors(kind: CollectiveKind, links: Sequence[AxisLink]) -> tuple[float, float]:
    """The largest factors of any link: of its latency, and of its bytes."""
    pairs = [link.factors.get(kind, (1.0, 1.0)) for link in links]
    slower, longer = (max(each) for each in zip(*pairs, strict=True))
    return slower, longer


def _wire_fraction(kind: CollectiveKind, group_size: int) -> float:
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
        return 0.0
    match kind:
        case "all_reduce":
            return 2 * (group_size - 1) / group_size
        case "all_gather" | "all_to_all":
            return (group_size - 1) / group_size
        case "reduce_scatter":
            return float(group_size - 1)
        case "collective_permute":
            return 1.0
