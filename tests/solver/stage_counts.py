"""Stages over numbers of microbatches and schedules, by trying all of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from autopar.solver.stage_dp import StageAssignment, solve_stages
from autopar.solver.stage_problem import ScheduleName, StageChoice, StageProblem


def best_over(
    problem: StageProblem,
    choices_of: Callable[[int], tuple[tuple[StageChoice, ...], np.ndarray]],
    microbatch_counts: Sequence[int],
    schedules: Sequence[tuple[ScheduleName, int]],
    gap: float = 0.0,
) -> tuple[StageProblem, StageAssignment] | None:
    """The fastest stages over numbers of microbatches and schedules.

    Arguments:
      choices_of: choices and `crossing_seconds` for a number of microbatches.
      schedules: names, with how many stages share a submesh.
    """
    best: tuple[StageProblem, StageAssignment] | None = None
    for number in microbatch_counts:
        choices, crossing = choices_of(number)
        for schedule, shared in schedules:
            each = replace(
                problem,
                choices=choices,
                crossing_seconds=crossing,
                num_microbatches=number,
                schedule=schedule,
                stages_per_submesh=shared,
            )
            found = solve_stages(each, gap, inf if best is None else best[1].seconds)
            if found is not None and (best is None or found.seconds < best[1].seconds):
                best = each, found
    return best
