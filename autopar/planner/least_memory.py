"""The plan that holds the least memory, found from above.

The rows of memory say little of plans that are unlike all plans met, and a plan that is
best by rows alone is such a plan. So the way down is in steps: the cheapest plan within
a little less than the best one found, which is like plans that were met, brings its own
rows (`met_plans.py`), and so on. A step that the rows rule out, or that led nowhere
several times, is halved, and none goes more than half way to a bound; at the least
step, or near the bound, the search ends.

The way depends on the problem alone and on no budget: what it found once it finds
again. A budget far below the bound of the rows ends it once some work is spent; it does
so the sooner the less the budget is, so a plan found by then is found where what it
holds is the budget.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from autopar.solver.choice_graph import Infeasible

from ..errors import InfeasiblePlanError
from .memory_users import infeasible_error
from .met_plans import MetPlan, MetPlans

FIRST_STEP, LEAST_STEP = 0.1, 0.005  # of the least bytes found
NEAR = 0.01  # of the least bytes found, that they are above the bound
MOST_STALLS = 3
COST_GAP = 0.1  # costs only keep plans like those met
MOST_STEPS, FEWEST_STEPS = 24, 8
STEPS_TIMES_CHOICES = 200_000
FAR_BELOW = 1.2  # times the budget, from which on the search only names a budget
FAR_WORK, FAR_GAP = 16.0, 0.05  # seconds of work, and gap to the bound, that then do
RULED_OUT_WORK, MOST_WORK = 20.0, 60.0  # seconds, after which no step is begun
LITTLE = 0.01  # of the least bytes found, that no plan is within
_log = logging.getLogger("autopar")


@dataclass(frozen=True, eq=False)
class LeastMemory:
    """The plan found; by the rows met, no plan holds less than `bound_bytes`.

    `far_bound_bytes` is such a bound where the search ended for it, and else 0.
    """

    found: MetPlan
    bound_bytes: float
    num_steps: int
    far_bound_bytes: int = 0

    def error(self, budget_bytes: int) -> InfeasiblePlanError:
        """That no plan was found that fits a budget."""
        far, profile = self.far_bound_bytes, self.found.profile
        error = infeasible_error(profile, budget_bytes, far)
        error.bound_bytes = int(self.bound_bytes)
        return error

    def __str__(self) -> str:
        least = self.found.peak_bytes
        return f"{least:,} B in {self.num_steps} steps, bound {self.bound_bytes:,.0f} B"


def least_memory(met: MetPlans, enough_bytes: int = 0) -> LeastMemory:
    """The plan of the least memory, or the first that holds at most `enough_bytes`.

    `met` should hold plans that depend on no budget only, so that equal problems have
    equal results.
    """
    at_least, far_bound = _rows_bound(met) if enough_bytes else 0.0, 0
    step, num_stalls, bound, number = FIRST_STEP, 0, 0.0, 0
    num_choices = met.problem.choice_graph.num_choices
    most = max(FEWEST_STEPS, min(MOST_STEPS, STEPS_TIMES_CHOICES // num_choices))
    while number < most and step >= LEAST_STEP:
        least = met.least_live_bytes()
        is_near = least - bound <= NEAR * least
        is_enough = met.least().peak_bytes <= enough_bytes
        if is_enough or is_near or met.work_left <= 0:
            break
        is_ruled_out = 0 < enough_bytes < at_least
        if met.work_spent > (RULED_OUT_WORK if is_ruled_out else MOST_WORK):
            break
        is_good = met.work_spent > FAR_WORK or least <= (1 + FAR_GAP) * at_least
        if at_least > FAR_BELOW * enough_bytes and is_good:
            far_bound = int(at_least)
            break
        number += 1
        try:
            found = met.solve(max((1 - step) * least, (bound + least) / 2), COST_GAP)
        except Infeasible as error:
            bound = error.least_budget_bound
            at_least = max(at_least, bound)
            step /= 2
            continue
        met.add_rows(found)
        met.lower_refuted()
        if found.live_bytes < bound:
            bound = 0.0  # the rows were refuted, and lowered
        if found.live_bytes < at_least:
            at_least = 0.0
        num_stalls = 0 if found.live_bytes < least else num_stalls + 1
        if num_stalls == MOST_STALLS:
            step, num_stalls = step / 2, 0
    found = met.least()
    bound = min(max(bound, far_bound), found.peak_bytes)
    result = LeastMemory(found, bound, number, far_bound)
    _log.info("%s: least memory %s", met.problem.graph.name, result)
    return result


def _rows_bound(met: MetPlans) -> float:
    """What no plan goes below by the rows of the plans met so far."""
    try:
        met.solve(LITTLE * met.least_live_bytes(), COST_GAP)
    except Infeasible as error:
        return error.least_budget_bound
    return 0.0
