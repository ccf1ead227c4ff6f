"""Mixtures of plans met that fit, where the solver's plan holds more than rows say.

A solution takes what rows do not tell of, and rows of its own points leave other such
places: it may take many rounds until one fits. Mixtures take no bound and hold more by
about as much as the solution did. So rows are kept to with so much less.
"""

from __future__ import annotations

from autopar.solver.choice_graph import Infeasible

from .met_plans import MetPlan, MetPlans
from .near_plans import MOST_NODES

MOST_MIXTURES = 3
BELOW = 3e-3  # of the limit, that rows say less besides
GAP = 3e-2  # of a mixture to the best one


def meet_mixtures(
    met: MetPlans, found: MetPlan, limit_bytes: float, *, packed: bool
) -> None:
    """Meets mixtures of plans met, one after the other until one is within a limit.

    `found` is above it. Small problems are solved whole, which is better
    (`near_plans.py`).
    """
    if len(met.problem.choice_graph.nodes) <= MOST_NODES:
        return
    for _ in range(MOST_MIXTURES):
        beyond = found.bytes(packed=packed) - limit_bytes
        aim = (
            min(met.said(found, packed=packed), limit_bytes)
            - beyond
            - BELOW * limit_bytes
        )
        if aim <= 0:
            return
        try:
            found = met.mix(aim, GAP, packed=packed)
        except Infeasible:
            return
        met.lower_refuted()
        if found.bytes(packed=packed) <= limit_bytes:
            return
