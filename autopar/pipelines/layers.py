"""Layers: the parts of the forward pass, in topological order, that stages are made of.

The forward operators of a step follow each other in one topological order. Operator i
costs c_i, and a border before operator p moves b_p bytes between stages; only operators
that cost something count, and of each gap between two of them the one place with the
fewest bytes is a border, the last of equal ones: what comes behind a product belongs to
its stage, or the gradient of its parameter would be made on the next one. A dynamic
program over (stages, border) finds the smallest slowest stage; a second one, over
partitions in which no stage exceeds it nor an even share by more than `NEAR`, the
fewest bytes and then the most even stages.

Borders of layers are local minima of bytes. Where that gives too many, neighbours of
little work are joined in pairs, so that equal layers stay equal. Two layers are alike
if they do the same operators on the same types; the first and the last are apart, as
no cotangent leaves the one and the loss comes behind the other.

No border divides what one backward operator reads at once: a rematerialised layer
begins its backward pass with a barrier that hands on its input and all its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf

import numpy as np

from ..costs.compute import total_flops
from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import Operator, OpGraph, params_key
from ..graph.work import is_heavy_operator

NEAR = 0.15  # how far over an even share a stage may be to move fewer bytes
_TIE = 1e-6  # weight of evenness where bytes are equal


def stage_borders(
    costs: Sequence[float], crossing_bytes: Sequence[float], num_stages: int
) -> list[int]:
    """Units at which stages 1, 2, ... begin; each stage has a unit with a cost.

    `crossing_bytes[p]` is what a border before unit p moves, infinite where none may
    lie.

    Raises:
      ValueError: fewer units with a cost than stages.
    """
    cost, crossing = np.asarray(costs, float), np.asarray(crossing_bytes, float)
    places = border_places(cost, crossing)
    heavy = cost[cost > 0]
    chosen = product_borders(heavy, crossing[places], num_stages, NEAR)
    return [places[i - 1] for i in chosen]


def product_borders(
    costs: Sequence[float] | np.ndarray,
    crossing_bytes: Sequence[float] | np.ndarray,
    num_stages: int,
    near: float = 0.0,
) -> list[int]:
    """Products at which stages 1, 2, ... begin; each stage has one or more.

    `crossing_bytes[p]` is what a border before product p + 1 moves, infinite where
    none may lie. No stage exceeds the smallest slowest stage, or `near` over an even
    share.

    Raises:
      ValueError: fewer products than stages.
    """
    cost, crossing = np.asarray(costs, float), np.asarray(crossing_bytes, float)
    is_allowed = np.isfinite(crossing)
    if is_allowed.sum() + bool(len(cost)) < num_stages:
        raise ValueError(
            f"`num_stages` must be at most the number of products of the step's "
            f"forward pass that can be apart, {is_allowed.sum() + bool(len(cost))}, "
            f"but got {num_stages}; those of a loop are one, unless it goes over "
            f"layers. Use fewer stages, or autopar.ShardParallel()."
        )
    done = np.concatenate([[0.0], np.cumsum(cost)])
    between = done[None, :] - done[:, None]  # cost of a stage from product i to j
    between[np.tril_indices(len(done))] = np.inf
    refused = np.array([0.0, *np.where(is_allowed, 0, np.inf), 0.0])
    slowest, _ = _best(between, refused, num_stages, np.maximum)
    limit = max(slowest, done[-1] / num_stages * (1 + near)) * (1 + 1e-9)
    uneven = np.where(between <= limit, (between / done[-1]) ** 2 * _TIE, np.inf)
    moved = np.array([0.0, *crossing, 0.0])
    moved /= max(moved[np.isfinite(moved)].sum(), 1.0)
    _, chosen = _best(uneven, moved, num_stages, np.add)
    return chosen


def border_places(
    costs: Sequence[float] | np.ndarray, crossing_bytes: Sequence[float] | np.ndarray
) -> list[int]:
    """The unit that a border after the k-th unit with a cost comes before, for all k.

    It is the one with the fewest bytes of its gap, of equal ones the last.
    """
    crossing = np.asarray(crossing_bytes, float)
    heavy = np.flatnonzero(np.asarray(costs, float) > 0)
    return [
        int(last - np.argmin(crossing[last:first:-1]))
        for first, last in zip(heavy[:-1], heavy[1:], strict=True)
    ]


def _best(
    stage: np.ndarray, border: np.ndarray, num_stages: int, join: np.ufunc
) -> tuple[float, list[int]]:
    """The least joined cost of `num_stages` stages, and the places between them."""
    reached = stage[0] + border
    before: list[np.ndarray] = []
    for _ in range(num_stages - 1):
        through = join(reached[:, None], stage)
        before.append(np.argmin(through, axis=0))
        reached = through.min(axis=0) + border
    chosen = [len(border) - 1]
    for row in reversed(before):
        chosen.append(int(row[chosen[-1]]))
    return float(reached[-1]), chosen[:0:-1]


def inseparable(
    work: Sequence[Operator],
    backward: Iterable[Operator],
    sources_of: Callable[[Operator], set[int]],
) -> Iterator[tuple[int, int]]:
    """The first and last position of `work` that each backward operator holds together.

    `sources_of` gives the tensors that an operator reads. Only operators of the
    transposed program count, and of what they read only what the forward work touches.
    """
    touched: dict[int, list[int]] = {}
    for position, op in enumerate(work):
        for tensor in (*sources_of(op), *op.results):
            touched.setdefault(tensor, []).append(position)
    for op in backward:
        if "transpose(" not in op.name:
            continue
        places = [touched[t] for t in sources_of(op) if t in touched]
        if len(places) > 1:
            window = smallest_window(places)
            if window[0] < window[1]:
                yield window


def smallest_window(places: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The shortest range that holds one of each of the places, the last if several."""
    events = sorted((p, i) for i, each in enumerate(places) for p in each)
    inside = [0] * len(places)
    missing, first = len(places), 0
    best = (events[0][0], events[-1][0])
    for last, index in events:
        missing -= inside[index] == 0
        inside[index] += 1
        while not missing:
            start, oldest = events[first]
            if last - start <= best[1] - best[0]:
                best = (start, last)
            inside[oldest] -= 1
            missing += inside[oldest] == 0
            first += 1
    return best


@dataclass(frozen=True, eq=False)
class ForwardOrder:
    """The forward work that stages are cut along: units in trace order.

    A unit is an operator, or one iteration of a scan over layers, with its number.
    `crossing_bytes[p]` is what a border before unit p moves, infinite where none may
    lie: remat hands a layer's parameters on together with its input, in the backward
    pass, so these must be on one stage.
    """

    units: tuple[tuple[Operator, int], ...]
    costs: tuple[float, ...]  # flops
    crossing_bytes: tuple[float, ...]

    @cached_property
    def places(self) -> list[int]:
        """Where a border behind each unit with a cost may lie; see `border_places`."""
        return border_places(self.costs, self.crossing_bytes)

    @cached_property
    def num_products(self) -> int:
        """How many units cost something."""
        return sum(cost > 0 for cost in self.costs)

    def borders(self, num_stages: int, products: Sequence[int] | None) -> list[int]:
        """Units at which stages 1, 2, ... begin.

        Raises:
          ValueError: fewer products than stages, or others than `products` add up to.
        """
        if products is None:
            return stage_borders(self.costs, self.crossing_bytes, num_stages)
        total = self.num_products
        if len(products) != num_stages or sum(products) != total or min(products) < 1:
            raise ValueError(
                f"`stage_products` must give each of {num_stages} stages a product or "
                f"more, {total} in all, as the step's forward pass has, but got "
                f"{tuple(products)}."
            )
        borders = [self.places[end - 1] for end in accumulate(products[:-1])]
        for border in borders:
            if self.crossing_bytes[border] == inf:
                op, _ = self.units[border]
                raise ValueError(
                    f"A rematerialised layer must be on one stage, but "
                    f"`stage_products` {tuple(products)} begin one before {op.name!r} "
                    f"at {op.source or 'an unknown line'}, inside of a layer; let "
                    f"stages begin with layers."
                )
        return borders

    def balanced(self, num_stages: int, costs: Sequence[float]) -> tuple[int, ...]:
        """Products of each stage such that the slowest is as fast as can be.

        `costs` are those of the products, in order and any unit.

        Raises:
          ValueError: fewer products than stages, or another number of costs.
        """
        number = self.num_products
        if len(costs) != number:
            raise ValueError(
                f"`layer_costs` must have a cost for each product of the step's "
                f"forward pass, {number}, those of every layer of a scan apart, but "
                f"got {len(costs)}; give 0 to those that cost next to nothing."
            )
        crossing = [self.crossing_bytes[place] for place in self.places]
        borders = product_borders(costs, crossing, num_stages)
        return tuple(j - i for i, j in pairwise([0, *borders, number]))


def heavy_flops(graph: OpGraph, op: Operator) -> float:
    """Flops of the products of one operator, in its bodies too; it runs once."""
    if op.kind not in STRUCTURED:
        return total_flops(op) if is_heavy_operator(op) else 0.0
    return sum(
        heavy_flops(graph, inner)
        * (graph.blocks[body].weight / graph.blocks[op.block].weight)
        for body in op.bodies
        for inner in graph.blocks[body].operators
    )


MOST_LAYERS = 64


@dataclass(frozen=True)
class Layers:
    """Layers in order: how many products each has, how alike, and what they send.

    `kinds` are equal numbers for layers that are alike. `crossing_bytes[p]` is what a
    border before layer p moves in a step, forward, of the whole batch; 0 at both ends.
    """

    products: tuple[int, ...]
    kinds: tuple[int, ...]
    crossing_bytes: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.products)

    def stage_products(self, ends: Sequence[int]) -> tuple[int, ...]:
        """Products of the stages that end before these layers."""
        return tuple(sum(self.products[i:j]) for i, j in pairwise([0, *ends]))

    def samples(self) -> tuple[int, ...]:
        """The first layer of each kind."""
        return tuple({k: self.kinds.index(k) for k in self.kinds}.values())


def find_layers(order: ForwardOrder, most: int = MOST_LAYERS) -> Layers:
    """The layers of a forward pass."""
    bytes_ = [order.crossing_bytes[place] for place in order.places]
    borders = [
        k
        for k, each in enumerate(bytes_)
        if each < inf and each <= min(bytes_[max(k - 1, 0) : k + 2])
    ]
    heavy = [cost for cost in order.costs if cost > 0]
    while len(borders) >= most:
        borders = _joined(borders, heavy)
    ends = [*(k + 1 for k in borders), len(heavy)]
    units = [0, *(order.places[k] for k in borders), len(order.units)]
    number: dict[Hashable, int] = {}
    kinds = []
    for index, (first, end) in enumerate(pairwise(units)):
        is_end = index == 0, index == len(ends) - 1
        key = (*is_end, tuple(_kind(op) for op, _ in order.units[first:end]))
        kinds.append(number.setdefault(key, len(number)))
    return Layers(
        tuple(j - i for i, j in pairwise([0, *ends])),
        tuple(kinds),
        (0.0, *(bytes_[k] for k in borders), 0.0),
    )


def _joined(borders: Sequence[int], heavy: Sequence[float]) -> list[int]:
    """Without every other border, where two neighbours have little work together."""
    ends = [*(k + 1 for k in borders), len(heavy)]
    work = [sum(heavy[i:j]) for i, j in pairwise([0, *ends])]
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
