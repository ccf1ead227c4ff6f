"""Layers: the runs of forward work that stages are made of, and which are alike.

Borders may lie where fewest bytes are live: local minima along the line of work, never
inside of a rematerialised layer. Where that gives too many, neighbours of little work
are joined in pairs, so that equal layers stay equal. Two layers are alike if they do
the same operators on the same types; the first and the last are apart, as no cotangent
leaves the one and the loss comes behind the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf

from ..graph.op_graph import Operator, params_key
from .stage_borders import border_places
from .work_line import WorkLine

MOST_LAYERS = 64


@dataclass(frozen=True)
class Layers:
    """Layers in order: how many products each has, how alike, and what they send.

    `kinds` are equal numbers for layers that are alike. `crossing_bytes[p]` is what a
    border before layer p moves in a step, forward, of the whole batch; 0 at both ends.
    """

    products: tuple[int, ...]
    flops: tuple[float, ...]
    kinds: tuple[int, ...]
    crossing_bytes: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.products)

    def stage_products(self, ends: Sequence[int]) -> tuple[int, ...]:
        """Products of the stages that end before these layers."""
        starts = [0, *ends[:-1]]
        return tuple(sum(self.products[i:j]) for i, j in zip(starts, ends, strict=True))

    def samples(self, most: int = 1) -> tuple[tuple[int, int], ...]:
        """Spans of up to `most` layers alike, which together hold every kind once."""
        found: dict[int, tuple[int, int]] = {}
        for first, kind in enumerate(self.kinds):
            if kind in found:
                continue
            end = first + 1
            while end < first + most and self.kinds[end : end + 1] == (kind,):
                end += 1
            found[kind] = (first, end)
        return tuple(found.values())


def find_layers(line: WorkLine, most: int = MOST_LAYERS) -> Layers:
    """The layers along a line of work."""
    places = border_places(line.costs, line.crossing_bytes)
    bytes_ = [line.crossing_bytes[p] for p in places]
    borders = [
        k
        for k, each in enumerate(bytes_)
        if each < inf
        and each
        <= min([*bytes_[max(k - 1, 0) : k], *bytes_[k + 1 : k + 2]], default=inf)
    ]
    heavy = [cost for cost in line.costs if cost > 0]
    while len(borders) >= most:
        borders = _joined(borders, heavy)
    ends = [*(k + 1 for k in borders), len(heavy)]
    starts = [0, *ends[:-1]]
    units = [0, *(places[k] for k in borders), len(line.units)]
    number: dict[Hashable, int] = {}
    kinds = []
    for index in range(len(ends)):
        own = line.units[units[index] : units[index + 1]]
        is_end = index == 0, index == len(ends) - 1
        key = (*is_end, tuple(_kind(op) for op, _ in own))
        kinds.append(number.setdefault(key, len(number)))
    return Layers(
        tuple(j - i for i, j in zip(starts, ends, strict=True)),
        tuple(sum(heavy[i:j]) for i, j in zip(starts, ends, strict=True)),
        tuple(kinds),
        (0.0, *(bytes_[k] for k in borders), 0.0),
    )


def _joined(borders: Sequence[int], heavy: Sequence[float]) -> list[int]:
    """Without every other border, where two neighbours have little work together."""
    ends = [*(k + 1 for k in borders), len(heavy)]
    work = [sum(heavy[i:j]) for i, j in zip([0, *ends[:-1]], ends, strict=True)]
    allowed = 2.0 * sum(work) / len(work)
    kept, index = [], 0
    while index < len(borders):
        if work[index] + work[index + 1] <= allowed * (1 + 1e-9):
            kept.extend(borders[index + 1 : index + 2])
            index += 2
        else:
            kept.append(borders[index])
            index += 1
    return kept if len(kept) < len(borders) else list(borders[::2])


def _kind(op: Operator) -> Hashable:
    if op.bodies:
        return op.kind, op.index  # iterations of one loop are alike
    return op.kind, params_key(op.params), op.operand_types, op.result_types
