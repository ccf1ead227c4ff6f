"""Live sets of a sharding problem: vertices that hold memory together.

The program points are those of a plan: the fullest of each stretch of its kernels, also
inside of loops. What is live there under the plan is taken for every other assignment
as well; a plan that peaks elsewhere brings points of its own (`memory_budget.py`).

At a point a tensor is held by its writer from when it is made until it is copied, and
by its relay while the copy is read; a tensor with a relay that is read as it was made
is the relay's. Arguments are held throughout, but for those in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..costs.execution_order import Liveness
from ..costs.memory import MemoryProfile
from .sharding_problem import ShardingProblem

STRETCHES = 24  # of the outermost block
INNER_STRETCHES = 4  # of a loop's body


def live_sets(
    problem: ShardingProblem, profile: MemoryProfile
) -> tuple[tuple[int, ...], ...]:
    """What the problem's vertices hold together at the points of one of its plans."""
    inputs = [each for each in problem.graph.inputs if each.memory == "device"]
    homes = [problem.writers[each.tensor][0] for each in inputs]
    points = _Points(problem, profile)
    found = (tuple(sorted({*homes, *point})) for point in points.of_block(0, STRETCHES))
    return tuple(dict.fromkeys(found))


class _Points:
    def __init__(self, problem: ShardingProblem, profile: MemoryProfile) -> None:
        self.problem, self.profile = problem, profile
        self._bodies = {op.index: op.bodies for op in problem.graph.operators()}

    def of_block(self, block: int, stretches: int) -> Iterator[frozenset[int]]:
        liveness = self.profile.liveness[block]
        positions = _fullest(liveness, stretches)
        holders = self._holders(block, liveness, positions)
        for position, held in zip(positions, holders, strict=True):
            kernel = liveness.block.kernels[liveness.order[position]]
            bodies = ()
            if kernel.inner_bytes and kernel.operator is not None:
                bodies = self._bodies[kernel.operator]
            inner = [
                point
                for body in bodies
                for point in self.of_block(body, INNER_STRETCHES)
            ]
            for point in inner or [frozenset()]:
                yield held | point

    def _holders(
        self, block: int, liveness: Liveness, positions: list[int]
    ) -> list[frozenset[int]]:
        """The vertices that hold memory at each position."""
        relays, writers = self.problem.relays, self.problem.writers
        values = liveness.block.values
        reads = _reads(liveness)
        intervals: list[tuple[int, int, int]] = []
        relayed: dict[int, tuple[int, int]] = {}
        for index, value in enumerate(values):
            start, end = int(liveness.starts[index]), int(liveness.ends[index])
            if value.tensor in relays:
                first, last = (start, end) if start >= 0 else reads.get(index, (-1, -1))
                if last >= 0:
                    old = relayed.get(value.tensor, (first, last))
                    relayed[value.tensor] = min(first, old[0]), max(last, old[1])
                made_apart = not value.is_copy and not self._is_shared(value.tensor)
                if start < 0 or not made_apart:
                    continue
            elif start < 0 or value.is_copy or value.is_outside:
                continue
            if value.tensor in writers:
                intervals.append((start, end, writers[value.tensor][0]))
        intervals += [(*span, relays[tensor]) for tensor, span in relayed.items()]
        starts, ends, vertices = (
            np.array(intervals, int).reshape(-1, 3).T if intervals else np.zeros((3, 0))
        )
        return [
            frozenset(vertices[(starts <= at) & (ends >= at)].astype(int).tolist())
            for at in positions
        ]

    def _is_shared(self, tensor: int) -> bool:
        """Whether all readers read the tensor as it was made."""
        return not self.profile.plan.tensors[tensor].conversions


def _fullest(liveness: Liveness, stretches: int) -> list[int]:
    """The position of the most bytes in each of some stretches of equal length."""
    count = len(liveness.order)
    borders = np.linspace(0, count, min(stretches, count) + 1).astype(int)
    return [
        int(low + liveness.bytes[low:high].argmax())
        for low, high in zip(borders[:-1], borders[1:], strict=True)
        if high > low
    ]


def _reads(liveness: Liveness) -> dict[int, tuple[int, int]]:
    """First and last position at which each value is read, but by what replaces it:
    that needs no copy."""
    found: dict[int, tuple[int, int]] = {}
    replaced = set(liveness.block.replaced)
    for position, k in enumerate(liveness.order):
        kernel = liveness.block.kernels[k]
        for value in kernel.reads:
            if not any((value, written) in replaced for written in kernel.writes):
                found[value] = found.get(value, (position, position))[0], position
    return found
