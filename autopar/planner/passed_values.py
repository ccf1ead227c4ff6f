"""When what passes a barrier is kept only for those who read it behind the barrier.

That is from its last direct reading on, or where nothing else reads it from the barrier
on. A port that is split lets what was gathered before be dropped, and gathered again by
those behind; one that is whole keeps it. `PlanPoints` tells so of copies of arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..costs.execution_order import Liveness
from ..graph.op_graph import Block
from ..graph.ports import barriers_of
from .reading_spans import ReadingSpans


@dataclass(frozen=True)
class Passed:
    """A value of a block that passes a barrier, and what it is called behind it.

    `tensor` is that of the value, `behind` the result of the barrier. It is kept for
    those behind from the position after `since` to `until`.
    """

    value: int
    tensor: int
    behind: int
    since: int
    until: int


def passed_values(
    block: Block, liveness: Liveness, spans: ReadingSpans
) -> tuple[Passed, ...]:
    """What passes the barriers of a block, and when.

    Of several barriers that let the same value pass, each holds it from where the one
    before is read last.
    """
    found: dict[int, list[tuple[int, int, int]]] = {}
    for value, at, behind, until in _hops(block, liveness, spans):
        found.setdefault(value, []).append((until, at, behind))
    return tuple(
        each
        for value, hops in found.items()
        for each in _in_turn(value, liveness, spans, sorted(hops))
    )


def _hops(
    block: Block, liveness: Liveness, spans: ReadingSpans
) -> Iterator[tuple[int, int, int, int]]:
    """(value, position of the barrier, name behind it, its last reading)."""
    kernels = liveness.block
    position = {kernel: at for at, kernel in enumerate(liveness.order)}
    barriers = [(op, *each) for op, each in barriers_of(block)]
    passed = list(kernels.passed.items())
    assert len(barriers) == len(passed), "each passes one value"
    reached: dict[int, int] = {}  # by tensor, the last barrier that it passes
    hops: list[tuple[int, int, int]] = []
    for (_, tensor, behind), (own, value) in zip(barriers, passed, strict=True):
        at = position.get(int(kernels.maker[own]), -1)
        reached[tensor] = max(reached.get(tensor, -1), at)
        hops.append((value, at, behind))
    for value, at, behind in hops:
        if at >= 0:
            until = max(int(spans.last[behind]), reached.get(behind, -1))
            yield value, at, behind, until


def _in_turn(
    value: int,
    liveness: Liveness,
    spans: ReadingSpans,
    hops: Sequence[tuple[int, int, int]],
) -> Iterator[Passed]:
    """The hops of one value, (last reading, position, name) in the order of time."""
    tensor = liveness.block.values[value].tensor
    since = int(spans.last[tensor])
    if since < 0:  # nothing but a barrier reads it
        since = min(at for _, at, _ in hops)
    for until, _, behind in hops:
        if until > since:
            yield Passed(value, tensor, behind, since, until)
            since = until
