"""Plans that fit packed, near a cheap one of which no more is live than may be.

The compiler leaves holes where lives cross, so that such a plan may need more than is
live of it (`costs/packing.py`). How much more changes with every size and order, but
most plans near it leave holes alike. So of those plans the cheapest are asked for that
hold so much less where the memory in use comes to more than may be, around vertices
that hold more than they must there, until one fits by what the model says. Where so
much less may be more than any plan can save, the way there is in steps, from plan to
plan.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.solver.array_pool import ArrayPool
from autopar.solver.near import Neighbourhoods, best_near

from .met_plans import MetPlan, MetPlans
from .near_plans import MOST_ASKED, MOST_NODES, NEAR_GAP, PART_OF_WORK, RowsNear, ask

# Vertices around each of two that may be split otherwise: large ones are tried last.
SIZES = 100, 200, 100, 200, 100, 200, 400, 800
MOST_IN_VAIN = 8
PART_OF_WAY = 0.25  # to what fits, that is asked for at once as long as nothing does
FAR = 0.06  # gap of a plan, whose neighbours are not worth asking for
PART_IF_FAR = 0.75  # of the work left, as long as no better plan fits
AS_CHEAP = 1e-5  # of the cost, within which a plan that needs less is gone on from


def fit_near(
    met: MetPlans,
    base: MetPlan | None,
    budget_bytes: int,
    gap: float,
    cutoff: float = math.inf,
) -> MetPlan | None:
    """Meets plans that need no more than a budget; the cheapest that does then.

    They are near one that needs more, and then near the best. A relative gap to the
    bound within the budget ends it. Once one fits, others of `cutoff` seconds or more
    are of no use.
    """
    is_large = len(met.problem.choice_graph.nodes) > MOST_NODES
    if base is None or base.peak_bytes <= budget_bytes or is_large:
        return met.fitting(budget_bytes)
    search = _PackedSearch(met, base, budget_bytes, cutoff)
    is_first = search.best is None
    search.run(gap)
    if search.best is not None and (is_first or search.gap <= FAR):
        search.near.move(search.best)
        search.run(gap)
    return search.best


class _PackedSearch:
    def __init__(
        self, met: MetPlans, base: MetPlan, budget_bytes: int, cutoff: float
    ) -> None:
        self.met, self.budget_bytes, self.cutoff = met, budget_bytes, cutoff
        self.best = met.fitting(budget_bytes)
        self.graph = met.problem.choice_graph
        self.around = Neighbourhoods(self.graph)
        self.pool = ArrayPool(met.clock)
        self.near = RowsNear(met, base)
        part = PART_OF_WORK if self.gap <= FAR else PART_IF_FAR
        self.until = met.clock.spent + part * met.work_left

    @property
    def aim_bytes(self) -> int:
        """What a plan may need.

        As long as none fits, part of the way is enough: then what needs less is gone on
        from, whatever it costs.
        """
        if self.best is not None:
            return self.budget_bytes
        needed = self.near.base.peak_bytes
        return needed - math.ceil(PART_OF_WAY * (needed - self.budget_bytes))

    @property
    def below(self) -> float:
        """Seconds that a plan is to be below."""
        if self.best is None:
            return math.inf
        return min(self.best.assignment.cost, self.cutoff)

    @property
    def gap(self) -> float:
        """What a plan may save at most, by the bound of all that fit."""
        if self.best is None:
            return math.inf
        return 1 - self.met.bound(self.budget_bytes, self.best) / self.below

    def run(self, gap: float) -> None:
        """Tries one neighbourhood after the other."""
        random, num_in_vain, number = np.random.default_rng(0), 0, 0
        likely = self._likely()
        while num_in_vain < MOST_IN_VAIN and likely.any() and not self._is_over(gap):
            size, number = SIZES[number % len(SIZES)], number + 1
            seeds = random.choice(len(likely), 2, p=likely / likely.sum()).tolist()
            is_free = np.any([self.around.around(each, size) for each in seeds], axis=0)
            base = self.near.base
            num_in_vain = 0 if self._improve(is_free) else num_in_vain + 1
            if self.near.base is not base:
                likely = self._likely()

    def _is_over(self, gap: float) -> bool:
        return self.met.clock.now() >= self.until or self.gap <= gap

    def _likely(self) -> np.ndarray:
        """[vertices] the most bytes that each could save where too much is in use.

        Where that is nowhere, all are alike.
        """
        own, saved = self.near.base.choices, np.zeros(len(self.graph.nodes))
        for row in self.near.own:
            if row.used(own) > self.aim_bytes:
                for node, weights in zip(row.nodes, row.weights, strict=True):
                    less = float(weights[own[node]] - weights.min())
                    saved[node] = max(saved[node], less)
        return (saved if saved.any() else 1.0) * self.around.is_open

    def _improve(self, is_free: np.ndarray) -> bool:
        """Whether a cheaper plan was found that fits, or one to go on from."""
        for _ in range(MOST_ASKED):
            base, aim = self.near.base, self.aim_bytes
            choices = best_near(
                *(self.graph, base.choices, is_free, self.near.rows(aim), float(aim)),
                gap=NEAR_GAP,
                pool=self.pool,
                below=self.below,
            )
            if choices is None:
                return False
            found = ask(self.met, choices)
            if found.assignment.cost >= self.below:
                return False
            if found.peak_bytes <= self.budget_bytes:
                if base is self.best:
                    self.near.move(found)
                self.best = self.met.take(found)
                return True
            is_as_cheap = found.assignment.cost <= (1 + AS_CHEAP) * base.assignment.cost
            may_move = is_as_cheap or self.best is None
            if may_move and found.peak_bytes < base.peak_bytes:
                self.near.move(found)
                return True
            if found.peak_bytes <= aim:
                return False
            self.near.refuse(found, aim)
        return False
