"""Forward work that must be on one stage: what one backward operator needs at once.

A rematerialised layer begins its backward pass with a barrier that hands on the layer's
input and all its parameters. A value is available on the stages that make or read it,
so some stage must touch every one of them: a window of positions that no border cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..graph.op_graph import Operator


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
