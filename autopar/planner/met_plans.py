"""Plans of one problem that were met, and what rows of memory say by them.

The solver sees memory as rows at program points, linear in its choices; a plan's own
figure comes from its kernels (`costs/memory.py`). A plan that is met brings the rows of
its own points, which say of it what the model says. Where an older row says more of it
than that, the row is lowered, by what only this plan chooses: of the plan that brought
the row it still says all (`solver/memory_rows.py`).

Rows say what is live; bounds are by these. A plan of which no more is live than may be
and that needs more, as the compiler leaves holes (`costs/packing.py`), also brings
packed rows, which have its holes. Those say what plans near it need, and where a plan
that fits is to be looked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from autopar.solver.array_pool import ArrayPool
from autopar.solver.assignment import Assignment
from autopar.solver.lagrangian import PricedPlans
from autopar.solver.memory_rows import MemoryRow
from autopar.solver.repeats import find_repeats
from autopar.solver.within_rows import mix_within_rows, solve_within_rows

from ..clusters.cluster import Cluster
from ..sharding.resharding import Resharder
from .barrier_ports import BarrierPorts
from .intra_op import read_profile
from .met_plan import MetPlan
from .met_rows import MetRows
from .program_points import conversion_rows, memory_rows
from .proved_bounds import ProvedBounds
from .relay_choices import without_needless_copies
from .relay_ties import RelayTies
from .search_work import SearchWork
from .sharding_problem import ShardingProblem

MOST_ROWS = 32  # of one plan
LEAST_TURN = 0.003
MOST_WORK_AT_ONCE = 40.0  # seconds, of one solution; see `solver/clock.py`
FAR_OFF = 1.1  # times what a plan holds
MOST_SAID = 1.1  # times the budget, by the rows of a plan that may fit


class MetPlans:
    """All plans met, in order, and the rows that they brought.

    `free` is the solution of the problem without a budget; it is the first plan met.
    Conversions that take `worth_a_turn` bytes, or else a small part of what `free`
    holds, are rows from the start; smaller ones come as they are met. `work` is what
    all solutions may take, and those of others that share it. No row keeps a plan of
    which at most `limit_bytes` were met to be live from being one within them.
    """

    def __init__(
        self,
        problem: ShardingProblem,
        cluster: Cluster,
        resharder: Resharder,
        free: Assignment,
        worth_a_turn: float,
        work: SearchWork | None = None,
        limit_bytes: float = math.inf,
    ) -> None:
        self.problem, self.free = problem, free
        self._cluster, self._resharder = cluster, resharder
        self._work = work or SearchWork()
        self.clock = self._work.clock
        self._priced = PricedPlans(problem.choice_graph, ArrayPool(self.clock))
        self._proved = ProvedBounds(self._priced)
        self._ports, self._ties = BarrierPorts(problem), RelayTies(problem)
        self.kept_back = 0.0  # seconds of work
        self.plans: list[MetPlan] = []
        self._far: set[MetPlan] = set()  # which rows say too much of
        self._looked_at: set[tuple[int, ...]] = set()
        self._rows = MetRows(problem.choice_graph.sizes, limit_bytes)
        first = self.see(free)
        self.add_rows(first)
        own = first.choices, worth_a_turn or LEAST_TURN * first.live_bytes
        self._add(first, conversion_rows(problem, first.profile, *own))

    def go_on(self, limit_bytes: int, work: SearchWork) -> None:
        """Begins another search, within another limit; the one before is over."""
        self._rows.limit_bytes, self.kept_back = limit_bytes, 0.0
        self._work, self.clock = work, work.clock
        self._priced.count_on(work.clock)
        self._looked_at = set()
        self.lower_refuted()

    @property
    def place(self) -> tuple[ShardingProblem, Cluster, Resharder]:
        """What the plans are of, and what moves tensors between their shards."""
        return self.problem, self._cluster, self._resharder

    @property
    def rows(self) -> list[MemoryRow]:
        """What is live, by all plans met."""
        return self.rows_of(packed=False)

    def rows_of(self, *, packed: bool) -> list[MemoryRow]:
        """What is live, and what is needed, too, if packed."""
        return self._rows.of(packed=packed)

    def doubted_rows(self, part: float) -> list[MemoryRow]:
        """All rows, saying a part less of what their own plans do not choose."""
        return self._rows.doubted(part)

    def solve(
        self,
        limit: float,
        gap: float,
        aim: float | None = None,
        cutoff: float = math.inf,
        *,
        packed: bool = False,
    ) -> MetPlan:
        """Meets the cheapest plan that no row puts above `limit` bytes.

        Or above `aim`, which is less; the bound is on all plans within the limit. Where
        the bound comes to `cutoff`, the plan is one within the limit that was met.
        Raises Infeasible where there is none, or none was found.
        """
        rows = self.rows_of(packed=packed)
        assignment = solve_within_rows(
            *(self.problem.choice_graph, rows, limit),
            gap=gap,
            free=replace(self.free, bound=self.bound(limit, packed=packed)),
            known=[each.choices for each in self.plans],
            aim=aim,
            plans=self._priced,
            most_work=min(self.work_left, MOST_WORK_AT_ONCE),
            cutoff=cutoff,
        )
        self._proved.add(assignment.bound, limit, rows)
        return self.see(assignment)

    def solve_doubted(
        self,
        limit: float,
        gap: float,
        part: float,
        beside: Sequence[MemoryRow],
        cutoff: float,
        most_work: float,
    ) -> MetPlan:
        """As `solve`, by rows that say a part less of others, and some beside them.

        The plan is not met.
        """
        assignment = solve_within_rows(
            *(self.problem.choice_graph, [*self.doubted_rows(part), *beside], limit),
            gap=gap,
            free=self.free,
            known=[each.choices for each in self.plans],
            plans=self._priced,
            most_work=min(most_work, MOST_WORK_AT_ONCE),
            cutoff=cutoff,
        )
        return self.look_at(assignment)

    def mix(self, aim: float, gap: float, *, packed: bool = False) -> MetPlan:
        """Meets a mixture of plans met that no row puts above `aim` bytes.

        Raises Infeasible where none was found.
        """
        assignment = mix_within_rows(
            *(self._priced, self.rows_of(packed=packed), aim),
            gap=gap,
            free=self.free,
            known=[each.choices for each in self.plans],
            most_work=min(self.work_left, MOST_WORK_AT_ONCE),
        )
        return self.see(assignment)

    def bound(
        self, limit: float, admitted: MetPlan | None = None, *, packed: bool = False
    ) -> float:
        """Seconds that no plan is below that no row puts above `limit` bytes.

        Of what all solutions so far proved with rows that were not lowered since. With
        `admitted`, a plan that fits, it is one on a problem that has this plan.
        """
        own = None if admitted is None else admitted.choices
        rows = self.rows_of(packed=packed)
        return max(self.free.bound, self._proved.of(limit, rows, own))

    @property
    def work_left(self) -> float:
        """Seconds of work until the limit, at least 0, without what is kept back."""
        return max(self._work.left - self.kept_back, 0.0)

    def give_up(self) -> None:
        """Leaves no work, to this search or what shares its limit."""
        self._work.give_up()

    @property
    def most_work(self) -> float:
        """Seconds of work that there were at the start."""
        return self._work.most

    @property
    def work_spent(self) -> float:
        """Seconds of work of all solutions, and of others on the same clock."""
        return self.clock.spent

    def see(self, assignment: Assignment) -> MetPlan:
        """Meets a plan: what the model says of its memory."""
        self.plans.append(self.look_at(assignment))
        return self.plans[-1]

    def look_at(self, assignment: Assignment) -> MetPlan:
        """A plan and what the model says of its memory; it is not met.

        The gap that its profile's plan tells is to the bound without a budget.
        """
        choices = self._normal(assignment.choices)
        cost = self.problem.choice_graph.cost(choices)
        assignment = replace(assignment, choices=choices, cost=cost)
        as_told = replace(assignment, bound=min(cost, self.free.bound))
        place = self._cluster, self._resharder
        return MetPlan(assignment, read_profile(self.problem, as_told, *place))

    def look_through(
        self, limit_bytes: int, most: int, *, packed: bool = False
    ) -> MetPlan | None:
        """Meets the cheapest plan that solutions came by, if it is within and new.

        Rows put it above the limit, by more than it holds. The model is asked of up to
        `most` plans that were not looked at before.
        """
        priced, best = self._priced, self.cheapest(limit_bytes, packed=packed)
        cost = math.inf if best is None else best.assignment.cost
        said = priced.used(self.rows_of(packed=packed)).max(axis=1, initial=0.0)
        for number in sorted(range(len(said)), key=priced.costs.__getitem__):
            if priced.costs[number] >= cost or not most:
                break
            is_far = said[number] > MOST_SAID * limit_bytes
            if is_far or priced.plans[number] in self._looked_at:
                continue
            most -= 1
            self._looked_at.add(priced.plans[number])
            found = self.look_at(replace(self.free, choices=priced.plans[number]))
            if found.bytes(packed=packed) <= limit_bytes:
                return self.take(found)
        return None

    def take(self, found: MetPlan) -> MetPlan:
        """Meets a plan that was looked at; rows that say too much of it are lowered."""
        self.plans.append(found)
        self.lower_refuted()
        return found

    def _normal(self, choices: Sequence[int]) -> tuple[int, ...]:
        problem, relays = self.problem, self.problem.relays
        return without_needless_copies(
            self._ties.holding_least(self._ports.passing_as_it_lies(choices)),
            {t: (v, problem.vertices[v].writes[0].choices) for t, v in relays.items()},
            {t: (v, a.choices) for t, (v, a) in problem.writers.items() if t in relays},
        )

    def add_rows(self, found: MetPlan) -> None:
        """Adds the points of a plan at which it holds the most.

        Packed as well, where its holes alone keep it from fitting.
        """
        self._add(found, self.own_rows(found))
        if self._is_kept_out(found):
            self._add(found, self.own_rows(found, packed=True), packed=True)

    def add_packed(self) -> None:
        """Adds the rows of all plans met that their holes alone keep from fitting."""
        packed = self._rows.packed_of()
        kept_out = {x.choices: x for x in self.plans if self._is_kept_out(x)}
        for choices, found in kept_out.items():
            if choices not in packed:
                self.add_rows(found)

    def _is_kept_out(self, found: MetPlan) -> bool:
        return found.live_bytes <= self._rows.limit_bytes < found.peak_bytes

    def own_rows(self, found: MetPlan, *, packed: bool = False) -> Sequence[MemoryRow]:
        """The points of a plan at which it holds the most, or needs it, if packed."""
        told = self.problem, found.profile, found.choices, self._layers
        return memory_rows(*told, packed=packed)[:MOST_ROWS]

    @cached_property
    def _layers(self) -> np.ndarray | None:
        """[n, p] the vertices of equal layers, if there are many."""
        repeats = find_repeats(self.problem.choice_graph, self._priced.pool)
        return None if repeats is None else repeats.layers

    def meet_start(self, assignment: Assignment) -> None:
        """Meets a plan, with its rows, that may be unlike all others.

        What rows say far too much of it is no reason to lower them: they hold near the
        plans that brought them, where those are looked for that cost little.
        """
        found = self.see(assignment)
        if self.said(found) > FAR_OFF * found.live_bytes:
            self._far.add(found)
        else:
            self.lower_refuted()
        self.add_rows(found)

    def said(self, found: MetPlan, *, packed: bool = False) -> float:
        """The most bytes that a row says of a plan."""
        rows = self.rows_of(packed=packed)
        return max((row.used(found.array) for row in rows), default=0.0)

    def admit_far(self) -> bool:
        """Lowers rows by all plans met; whether some had been kept from that."""
        had_far, self._far = bool(self._far), set()
        if had_far:
            self.lower_refuted()
        return had_far

    def admit_within(self, limit_bytes: int) -> None:
        """Lowers rows by all plans met if that admits those within a limit at all."""
        within = [each for each in self.plans if each.live_bytes <= limit_bytes]
        if within and self._far.issuperset(within):
            self.admit_far()

    def _add(
        self, found: MetPlan, rows: Sequence[MemoryRow], *, packed: bool = False
    ) -> None:
        self._rows.add(found, rows, self._near, packed=packed)

    @property
    def _near(self) -> list[MetPlan]:
        """The plans met that rows are lowered by."""
        return [each for each in self.plans if each not in self._far]

    def lower_refuted(self) -> float:
        """Lowers rows that say too much of a plan met; by how much of the latest."""
        return self._rows.lower(self._near, self.plans[-1])

    def cheapest(self, limit_bytes: int, *, packed: bool = False) -> MetPlan | None:
        """The cheapest plan met of which no more is live, or needed, if packed."""
        within = [x for x in self.plans if x.bytes(packed=packed) <= limit_bytes]
        return min(within, key=_cost, default=None)

    def fitting(self, budget_bytes: int) -> MetPlan | None:
        """The cheapest plan met for which the compiler needs no more."""
        return self.cheapest(budget_bytes, packed=True)

    def least(self) -> MetPlan:
        """The plan met that needs the least; of several, the cheapest."""
        return min(self.plans, key=lambda each: (each.peak_bytes, _cost(each)))

    def least_live_bytes(self) -> int:
        """Of the plan met of which the least is live."""
        return min(each.live_bytes for each in self.plans)


def _cost(met: MetPlan) -> float:
    return met.assignment.cost
