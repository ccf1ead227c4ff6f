"""Where unrolled forward work is cut, so that little crosses each cut.

What no product leads to (casts of parameters, masks) is ordered right before its first
reader, so that it does not cross borders before it is read. Borders are taken among
the local minima of the bytes that cross, one at most between two products, such that

    bytes kept at the borders + residuals of the fullest segment

is least: about as many segments as the square root of Chen et al. (2016) says, where
every layer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..graph.dependencies import leading_to, tensors_of
from ..graph.op_graph import Operator

MOST_TRIES = 40  # sizes of the fullest segment that are tried


def segments_of(
    forward: Sequence[Operator],
    residuals: Sequence[int],
    num_bytes: Callable[[int], int],
    is_heavy: Callable[[Operator], bool],
) -> list[list[Operator]]:
    """The forward operators that lead to residuals, in segments.

    Args:
      forward: in traced order.
      residuals: the tensors that the backward pass reads.
      num_bytes: of a tensor.
      is_heavy: whether an operator is a product; segments have one at least.
    """
    work = _light_ones_late(leading_to(residuals, forward), is_heavy)
    crossing = _crossing_bytes(work, num_bytes)
    borders = _candidates(work, crossing, is_heavy)
    held = np.zeros(len(work) + 1)
    kept = set(residuals)
    for position, op in enumerate(work):
        made = sum(num_bytes(t) for t in op.results if t in kept)
        held[position + 1] = held[position] + made
    chosen = _best_borders([0, *borders, len(work)], crossing, held)
    ends = [*chosen, len(work)]
    return [
        work[first:last]
        for first, last in zip([0, *chosen], ends, strict=True)
        if first < last
    ]


def _light_ones_late(
    work: Sequence[Operator], is_heavy: Callable[[Operator], bool]
) -> list[Operator]:
    """What no product leads to comes right before the first that reads it."""
    light: dict[int, Operator] = {}
    of_products: set[int] = set()
    order: list[Operator] = []
    placed: set[int] = set()

    def place(op: Operator) -> None:
        waiting = [op]
        while waiting:
            last = waiting[-1]
            reads = (light[t] for t in tensors_of(last.operands) if t in light)
            missing = [each for each in reads if each.index not in placed]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            if last.index not in placed:
                placed.add(last.index)
                order.append(last)

    for op in work:
        if is_heavy(op) or not of_products.isdisjoint(tensors_of(op.operands)):
            of_products.update(op.results)
            place(op)
        else:
            light.update(dict.fromkeys(op.results, op))
    for op in light.values():
        place(op)
    return order


def _crossing_bytes(
    work: Sequence[Operator], num_bytes: Callable[[int], int]
) -> list[int]:
    """Bytes made before each position and read from there on."""
    made = {t: i for i, op in enumerate(work) for t in op.results}
    last: dict[int, int] = {}
    for i, op in enumerate(work):
        last.update({t: i for t in tensors_of(op.operands) if t in made})
    change = [0] * (len(work) + 1)
    for tensor, position in last.items():
        change[made[tensor] + 1] += num_bytes(tensor)
        change[position + 1] -= num_bytes(tensor) if position < len(work) else 0
    return np.cumsum(change).tolist()


def _candidates(
    work: Sequence[Operator],
    crossing: Sequence[int],
    is_heavy: Callable[[Operator], bool],
) -> list[int]:
    """The position of the fewest crossing bytes between each two products."""
    heavy = [position for position, op in enumerate(work) if is_heavy(op)]
    found = []
    for first, last in zip(heavy[:-1], heavy[1:], strict=True):
        found.append(min(range(first + 1, last + 1), key=lambda p: (crossing[p], p)))
    return [
        border
        for i, border in enumerate(found)
        if crossing[border] <= min(crossing[p] for p in found[max(i - 1, 0) : i + 2])
    ]


def _best_borders(
    points: Sequence[int], crossing: Sequence[int], held: np.ndarray
) -> list[int]:
    """The borders, of `points` but the ends, of the fewest bytes in all."""
    inside = [held[b] - held[a] for a, b in zip(points[:-1], points[1:], strict=True)]
    least, most = max(inside, default=0.0), float(held[-1])
    if len(points) <= 2 or most <= 0:
        return []
    tries = np.geomspace(max(least, 1.0), max(most, 1.0), MOST_TRIES)
    found: dict[float, list[int]] = {}
    for limit in tries:
        chosen = fewest_bytes(points, crossing, held, float(limit) * (1 + 1e-9))
        ends = [0, *chosen, points[-1]]
        fullest = max(
            held[b] - held[a] for a, b in zip(ends[:-1], ends[1:], strict=True)
        )
        found.setdefault(sum(crossing[p] for p in chosen) + fullest, chosen)
    return found[min(found)]


def fewest_bytes(
    points: Sequence[int], crossing: Sequence[int], held: np.ndarray, limit: float
) -> list[int]:
    """The borders of the fewest crossing bytes with segments of at most `limit`."""
    best: list[float] = [0.0]
    before: list[int] = [0]
    for j in range(1, len(points)):
        cost, source = np.inf, j - 1
        for i in range(j - 1, -1, -1):
            if held[points[j]] - held[points[i]] > limit:
                break
            if best[i] < cost:
                cost, source = best[i], i
        own = crossing[points[j]] if j < len(points) - 1 else 0
        best.append(cost + own)
        before.append(source)
    chosen, j = [], before[len(points) - 1]
    while j > 0:
        chosen.append(points[j])
        j = before[j]
    return chosen[::-1]
