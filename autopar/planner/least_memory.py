"""The plan that holds the least memory, found from above.

The rows of memory say little of plans that are unlike all plans met, and a plan that is
best by rows alone is such a plan. So the way down is in steps: the cheapest plan within
a little less than the best one found, which is like plans that were met, brings its own
rows (`met_plans.py`), and so on. A step that the rows rule out, or that led nowhere
several times, is halved; at the least step the search ends.

It depends on the problem alone and on no budget: what it found once it finds again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from autopar.solver.choice_graph import Infeasible

from .met_plans import MetPlan, MetPlans

FIRST_STEP, LEAST_STEP = 0.1, 0.005  # of the least bytes found
MOST_STALLS = 3
COST_GAP = 0.1  # costs only keep plans like those met
MOST_STEPS, FEWEST_STEPS = 24, 8
STEPS_TIMES_CHOICES = 200_000
_log = logging.getLogger("autopar")


@dataclass(frozen=True, eq=False)
class LeastMemory:
    """The plan found; by the rows met, no plan holds less than `bound_bytes`."""

    found: MetPlan
    bound_bytes: float
    num_steps: int

    def __str__(self) -> str:
        least = self.found.peak_bytes
        return f"{least:,} B in {self.num_steps} steps, bound {self.bound_bytes:,.0f} B"


def least_memory(met: MetPlans, enough_bytes: int = 0) -> LeastMemory:
    """The plan of the least memory, or the first that holds at most `enough_bytes`.

    `met` should hold the plan without a budget only, so that equal problems have equal
    results.
    """
    step, num_stalls, bound, number = FIRST_STEP, 0, 0.0, 0
    num_choices = met.problem.choice_graph.num_choices
    most = max(FEWEST_STEPS, min(MOST_STEPS, STEPS_TIMES_CHOICES // num_choices))
    while number < most and step >= LEAST_STEP:
        least = met.least().peak_bytes
        is_near = least - bound <= LEAST_STEP * least
        if least <= enough_bytes or is_near or met.work_left <= 0:
            break
        number += 1
        try:
            found = met.solve(max((1 - step) * least, bound), COST_GAP)
        except Infeasible as error:
            bound = error.least_budget_bound
            step /= 2
            continue
        met.add_rows(found)
        met.lower_refuted()
        if found.peak_bytes < bound:
            bound = 0.0  # the rows were refuted, and lowered
        num_stalls = 0 if found.peak_bytes < least else num_stalls + 1
        if num_stalls == MOST_STALLS:
            step, num_stalls = step / 2, 0
    found = met.least()
    result = LeastMemory(found, min(bound, found.peak_bytes), number)
    _log.info("%s: least memory %s", met.problem.graph.name, result)
    return result
