"""Plans that rows of memory rule out, though they fit.

A bound is one of rows, which may say too much of plans that were not met. So at the end
of a search rows are doubted: they say a part less of what their own plans do not choose
(`met_rows.py`). The cheapest plan that is left is asked for its own figure. If it fits
it is better than the best, and the rows that ruled it out are lowered; if not, it
brings rows of its own. Where nothing is left that would be cheaper by the gap, the
bound also holds for plans of which rows say so much too much.
"""

from __future__ import annotations

import logging

from autopar.solver.choice_graph import Infeasible
from autopar.solver.memory_rows import MemoryRow

from .met_plan import MetPlan
from .met_plans import MetPlans

PARTS = 0.2, 0.35  # that rows may say too much: the next once one leaves nothing
MOST_DOUBTED = 8  # plans
LEAST_WORK, PART_OF_WORK = 5.0, 0.3  # seconds, and of what the search took
_log = logging.getLogger("autopar")


def meet_doubted(
    met: MetPlans, best: MetPlan, budget_bytes: int, gap: float, spent: float
) -> MetPlan:
    """Meets plans that fit and that doubted rows leave; the best, or a cheaper one.

    It takes a part of the seconds of work `spent` by the search, and ends where none is
    left that is cheaper by a relative gap. Plans that do not fit are not met: they
    would lower rows, and so bounds, for nothing.
    """
    first = best
    until = met.work_spent + min(max(PART_OF_WORK * spent, LEAST_WORK), met.work_left)
    own: list[MemoryRow] = []  # of plans that do not fit
    parts = list(PARTS)
    for _ in range(MOST_DOUBTED):
        left = until - met.work_spent
        if not parts or left <= 0:
            break
        enough = (1 - gap) * best.assignment.cost
        try:
            found = met.solve_doubted(budget_bytes, gap, parts[0], own, enough, left)
        except Infeasible:
            found = best
        if found.assignment.cost >= best.assignment.cost:
            parts.pop(0)
            continue
        if found.peak_bytes <= budget_bytes:
            best = met.take(found)
        else:
            is_packed = found.live_bytes <= budget_bytes
            own += met.own_rows(found, packed=is_packed)
    if best is not first:
        costs = best.assignment.cost, first.assignment.cost
        _log.info("%s: %.4g s where rows left %.4g", met.problem.graph.name, *costs)
    return best
