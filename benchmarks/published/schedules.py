"""What schedules of a pipeline take and hold, by running them; seconds by stage.

A schedule with c chunks deals its stages out to submeshes in turns, c to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.runtime.instructions import Send
from autopar.runtime.schedule import (
    Schedule,
    Task,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_h2,
)
from autopar.runtime.simulate import simulate_schedule

ONE_F_ONE_B = "1F1B"
INTERLEAVED = "interleaved"
_MAKERS = {
    ONE_F_ONE_B: one_f_one_b,
    "ZB-H1": zero_bubble_h1,
    "ZB-H2": zero_bubble_h2,
}
ZERO_BUBBLE = ("ZB-H1", "ZB-H2")
_ROUNDS = 3  # of the pipeline that are simulated before its period is taken as known


@dataclass(frozen=True, eq=False)
class StageSeconds:
    """Of one microbatch on each stage, [stages]; `update` is of a step.

    `backward` is all of it, `weight` the part that only gradients wait for; `sent` is
    from a stage to the next.
    """

    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    sent: np.ndarray
    update: np.ndarray


def schedule_of(
    name: str, num_stages: int, num_submeshes: int, num_microbatches: int
) -> Schedule:
    """The schedule of that name."""
    if name == INTERLEAVED:
        return interleaved(num_stages, num_microbatches, num_submeshes)
    return _MAKERS[name](num_stages, num_microbatches)


def makespan(
    name: str, seconds: StageSeconds, num_submeshes: int, num_microbatches: int
) -> float:
    """Seconds of a step: a few rounds as simulated, the rest at their period."""
    first, more = _ROUNDS * num_submeshes, num_submeshes
    if num_microbatches <= first + more:
        return _simulated(name, seconds, num_submeshes, num_microbatches)
    shorter, longer = (
        _simulated(name, seconds, num_submeshes, number)
        for number in (first, first + more)
    )
    return longer + (num_microbatches - first - more) * (longer - shorter) / more


def held_at_most(
    name: str, held: Sequence[float], num_submeshes: int, num_microbatches: int
) -> list[float]:
    """The most that microbatches in flight hold, by submesh.

    Args:
      held: by stage, of one microbatch from its forward task to the last of its others.
    """
    number = min(num_microbatches, 2 * _ROUNDS * num_submeshes)
    if name == ONE_F_ONE_B:
        ahead = np.minimum(np.arange(len(held), 0, -1), number)
        return (ahead * np.array(held)).tolist()
    schedule = schedule_of(name, len(held), num_submeshes, number)
    last = "weight" if schedule.has_weight_tasks else "backward"
    sign = {"forward": 1, last: -1}
    return [
        float(np.cumsum([sign.get(t.kind, 0) * held[t.stage] for t in row]).max())
        for row in schedule.rows
    ]


def _simulated(
    name: str, seconds: StageSeconds, num_submeshes: int, num_microbatches: int
) -> float:
    schedule = schedule_of(name, len(seconds.forward), num_submeshes, num_microbatches)
    backward = seconds.backward
    if schedule.has_weight_tasks:
        backward = backward - seconds.weight
    by_kind = {
        "forward": seconds.forward,
        "backward": backward,
        "weight": seconds.weight,
        "apply": seconds.update,
    }

    def task_seconds(task: Task) -> float:
        return float(by_kind[task.kind][task.stage])

    def transfer_seconds(send: Send) -> float:
        return float(seconds.sent[min(send.source, send.target)])

    found = simulate_schedule(schedule, task_seconds, transfer_seconds)
    return found.timeline.makespan_seconds
