"""Pipelines: where units are cut into stages, what a schedule takes and holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.runtime.schedule import Task, interleaved, one_f_one_b
from benchmarks.stage_chain import simulate_schedule

_HALVINGS = 10  # of the interval that holds the slowest stage's seconds
_ROUNDS = 3  # of the pipeline that are simulated before its period is taken as known


@dataclass(frozen=True, eq=False)
class StageSeconds:
    """Of one microbatch on each stage, [stages]; `update` is of a step.

    `sent` is from a stage to the next. `number` submeshes have the stages in turns.
    """

    number: int
    forward: np.ndarray
    backward: np.ndarray
    sent: np.ndarray
    update: np.ndarray

    @property
    def busy(self) -> np.ndarray:
        return self.forward + self.backward

    def bound(self, num_microbatches: int) -> float:
        """Of 1F1B with unequal stages: a step takes as long as its stages one after the
        other, and then a *period* for each further microbatch, the longest that any
        stage makes the others wait,

            max over stages k of (sum over i >= k of busy_i + 2 sent_i)
                                 / min(stages - k, microbatches)

        and at least the busiest stage's. Interleaved, as 1F1B of each turn at once.
        """
        turns = len(self.busy) // self.number
        busy, sent = (x.reshape(turns, -1).sum(axis=0) for x in (self.busy, self.sent))
        behind = np.cumsum((busy + 2 * sent)[::-1])[::-1]
        ahead = np.minimum(np.arange(len(busy), 0, -1), num_microbatches)
        period = max(float(busy.max()), float((behind / ahead).max()))
        once = float(behind[0]) / turns + float(self.update.max())
        return once + (num_microbatches - 1 / turns) * period - period * (1 - 1 / turns)

    def makespan(self, num_microbatches: int) -> float:
        """Of the schedule: a few rounds as simulated, the rest at their period."""
        first, more = _ROUNDS * self.number, self.number
        if num_microbatches <= first + more:
            return self._simulated(num_microbatches)
        shorter, longer = (self._simulated(n) for n in (first, first + more))
        left = num_microbatches - first - more
        return longer + left * (longer - shorter) / more

    def _simulated(self, num_microbatches: int) -> float:
        stages = len(self.busy)
        if stages == self.number:
            schedule = one_f_one_b(stages, num_microbatches)
        else:
            schedule = interleaved(stages, num_microbatches, self.number)

        def task_seconds(task: Task) -> float:
            kinds = {"forward": self.forward, "backward": self.backward}
            return float(kinds.get(task.kind, self.update)[task.stage])

        timeline = simulate_schedule(
            schedule,
            task_seconds,
            lambda send: float(self.sent[min(send.source, send.target)]),
        ).timeline
        return timeline.makespan_seconds

    def in_flight(self, num_microbatches: int) -> np.ndarray:
        """[stages] microbatches between their two passes, at most (Narayanan et al.
        2021, section 2.2; interleaved, their chunks shared out evenly)."""
        place, turns = np.arange(self.number), len(self.busy) // self.number
        held = (self.number - place).astype(float)
        if turns > 1:
            held = (2 * (held - 1) + (turns - 1) * self.number + 1) / turns
        return np.tile(np.minimum(held, num_microbatches), turns)


def balanced_bounds(
    busy: Sequence[np.ndarray],
    held: Sequence[np.ndarray],
    capacity: float,
) -> tuple[int, ...] | None:
    """Contiguous units for each stage, so that the slowest is as fast as can be.

    Args:
      busy: [units] seconds by stage.
      held: [units] bytes of state by stage, of which none has above `capacity`.
    """
    number = len(busy[0])
    sums, states = (
        [np.concatenate([[0.0], np.cumsum(each)]) for each in rows]
        for rows in (busy, held)
    )

    def deal(limit: float) -> tuple[int, ...] | None:
        bounds = [0]
        for index, (total, state) in enumerate(zip(sums, states, strict=True)):
            start = bounds[-1]
            most = total[start] + limit * (1 + 1e-9)
            end = int(np.searchsorted(total, most, "right")) - 1
            full = int(np.searchsorted(state, state[start] + capacity, "right")) - 1
            end = min(end, full, number - (len(sums) - index - 1))
            if end <= start:
                return None
            bounds.append(end)
        return tuple(bounds) if bounds[-1] == number else None

    slowest = np.max(busy, axis=0)
    low = float(np.min(busy, axis=0).sum()) / len(busy)
    high = float(slowest.sum()) / len(busy) + float(slowest.max())
    best = deal(high)
    if best is None:
        high = float(slowest.sum())
        best = deal(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = deal(middle)
        best, low, high = (found, low, middle) if found else (best, middle, high)
    return best
