"""Cheaper plans near the best one that fits, by what the model says of their memory.

Rows of memory are exact of the plan that brought them and good near it: what it holds,
and what the compiler leaves free below that. So the plan's own rows alone are kept to,
and all that is not around two of its vertices is left as it is: what the one takes may
be saved by the other. A plan that is found so is asked for its own figure: the next
search starts from it if it fits, and knows its rows if it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.solver.array_pool import ArrayPool
from autopar.solver.memory_rows import MemoryRow, lowered
from autopar.solver.near import Neighbourhoods, best_near

from .met_plans import MetPlan, MetPlans

MOST_NODES = 2500
SIZE = 100  # vertices around each of two that may be split otherwise
MOST_ASKED = 3  # plans of one neighbourhood
MOST_REFUSED = 96  # rows of plans that do not fit
NEAR_GAP = 1e-3
PART_OF_WORK = 0.25  # of what is left
ASKED_VERTEX = 3e-5  # seconds of work to ask the model of a plan, and for its rows


def improve_near(
    met: MetPlans, limit_bytes: int, gap: float, most_in_vain: int = 16
) -> MetPlan | None:
    """Meets cheaper plans within a limit, near the cheapest one met; the best then.

    A relative gap to the bound ends it, which rows refuted by such a plan lower; so do
    some neighbourhoods in vain, one after the other. None if no plan fits.
    """
    best = met.fitting(limit_bytes)
    if best is None or len(met.problem.choice_graph.nodes) > MOST_NODES:
        return best
    search = _NearSearch(met, limit_bytes, best)
    search.run(gap, most_in_vain)
    return search.best


class RowsNear:
    """Rows by which plans near one are looked for.

    Its own, and those of plans refused, which say no more of it than the model does.
    """

    def __init__(self, met: MetPlans, base: MetPlan) -> None:
        self.met = met
        self.refused: list[tuple[MemoryRow, MetPlan]] = []
        self.move(base)

    def move(self, base: MetPlan) -> None:
        """Goes on near another plan."""
        self.base, self.own = base, self.met.own_rows(base, packed=True)

    def refuse(self, found: MetPlan, limit_bytes: float) -> None:
        """Keeps what rows of a plan say above a limit."""
        rows = self.met.own_rows(found, packed=True)
        broken = [row for row in rows if row.used(found.choices) > limit_bytes]
        self.refused += [(row, found) for row in broken]
        self.refused = self.refused[-MOST_REFUSED:]

    def rows(self, limit_bytes: float) -> list[MemoryRow]:
        """All rows; none puts the plan above the limit, if it needs no more."""
        own, most = self.base.choices, float(self.base.peak_bytes)
        sizes, limit_bytes = self.met.problem.choice_graph.sizes, max(limit_bytes, most)
        return [
            *self.own,
            *(
                row
                if row.used(own) <= limit_bytes
                else lowered(row, other.choices, own, most, sizes)
                for row, other in self.refused
            ),
        ]


class _NearSearch:
    def __init__(self, met: MetPlans, limit_bytes: int, best: MetPlan) -> None:
        self.met, self.limit_bytes = met, limit_bytes
        self.graph = met.problem.choice_graph
        self.around = Neighbourhoods(self.graph)
        self.pool = ArrayPool(met.clock)
        self.near = RowsNear(met, best)
        self.bound = met.bound(limit_bytes, best, packed=True)
        self.until = met.clock.spent + PART_OF_WORK * met.work_left

    @property
    def best(self) -> MetPlan:
        """The cheapest plan within the limit, near which others are looked for."""
        return self.near.base

    def run(self, gap: float, most_in_vain: int) -> None:
        """Tries one neighbourhood after the other."""
        random, num_in_vain = np.random.default_rng(0), 0
        seeds = np.flatnonzero(self.around.is_open)
        while seeds.size and num_in_vain < most_in_vain and not self._is_over(gap):
            one, other = random.choice(seeds, 2).tolist()
            is_free = self.around.around(one, SIZE) | self.around.around(other, SIZE)
            num_in_vain = 0 if self._improve(is_free) else num_in_vain + 1

    def _is_over(self, gap: float) -> bool:
        is_late = self.met.clock.now() >= self.until
        return is_late or self.bound >= (1 - gap) * self.best.assignment.cost

    def _improve(self, is_free: np.ndarray) -> bool:
        limit = self.limit_bytes
        for _ in range(MOST_ASKED):
            choices = best_near(
                *(self.graph, self.best.choices, is_free, self.near.rows(limit)),
                *(float(limit),),
                gap=NEAR_GAP,
                pool=self.pool,
            )
            if choices is None:
                return False
            found = ask(self.met, choices)
            if found.assignment.cost >= self.best.assignment.cost:
                return False
            if found.peak_bytes <= limit:
                self.near.move(self.met.take(found))
                self.bound = self.met.bound(limit, found, packed=True)
                return True
            self.near.refuse(found, limit)
        return False


def ask(met: MetPlans, choices: Sequence[int]) -> MetPlan:
    """What the model says of a plan, which is not met yet."""
    met.clock.spend(ASKED_VERTEX * len(choices))
    return met.look_at(replace(met.free, choices=tuple(choices)))
