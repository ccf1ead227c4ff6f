"""The search for the cheapest plan of one problem within a budget that binds.

The solver's rows of memory and a plan's own figure (`met_plans.py`) are brought
together in rounds, first with a wide gap, then with a narrow one:

  1. solve within the rows; stop if the plan fits by its own figure
  2. add the plan's own points as rows (lazily: few of all points ever matter)
  3. lower what a row says, where the model says less of a plan that was met

Where a gap is left, plans that solutions came by and rows put a little above the budget
are looked at, mixtures (`mixed_plans.py`), and plans near the best. Where rows leave
nothing, but a plan far from all that brought them fits, they are lowered by it, too.
Rows see what is live. The compiler needs more where lives cross (`costs/packing.py`).
So what is live is kept to first, with a wide gap, and plans near are looked for that
fit (`packed_plans.py`); then rows are kept to that have the holes of the plans met,
with a narrow one. These rows find plans and say when to end; the bound that is told is
that of what is live, raised at last to what the best plan costs less the gap, if it can
be. Then rows are doubted (`doubted_rows.py`): they may rule out plans that fit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from time import perf_counter

from autopar.solver.assignment import Assignment
from autopar.solver.choice_graph import Infeasible
from autopar.solver.solve import solve

from ..clusters.cluster import Cluster
from ..graph.op_graph import OpGraph
from ..methods.restrictions import Limit, demanded_orders, restrict
from ..plans.explain import format_seconds
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.resharding import Resharder
from .doubted_rows import meet_doubted
from .earlier_searches import EarlierSearches, problem_key
from .even_share import is_long
from .intra_op import IntraOpSolution
from .least_memory import LeastMemory, least_memory
from .memory_users import infeasible_error
from .met_plans import MetPlan, MetPlans
from .mixed_plans import meet_mixtures
from .near_plans import improve_near
from .packed_plans import FAR, fit_near
from .search_work import SearchWork
from .sharding_problem import build_problem

BUDGET_GAP = 1e-2
WIDE_GAP, TIGHT_GAP = 3e-2, 2e-3
MOST_ROUNDS = 8  # with each gap
MARGINS = (0.97, 0.93, 0.88)  # of what may be live, once rounds are used up
MOST_RAISED = 8  # times that a plan met on the way to a bound is looked at
TO_FIT = 0.1  # of all work, to find a plan that fits packed
TO_RAISE = 0.3  # of the work left, to raise the bound to a plan that fits
WORTH_A_ROUND = 2e-3  # of the gap, once half the work is spent
WORTH_A_TURN = 0.03  # of the budget
WORTH_SOLVING_AGAIN = 0.005  # of the budget, by which a row was lowered
WORTH_AIMING_AT = 0.02  # of the budget, by which a plan was above it
FREE_ROUNDS, MOST_AIMED = 2, 0.03
MOST_LOOKED_AT, FEW_LOOKED_AT = 32, 8  # of what solutions left
MOST_NEAR, FEW_NEAR = 16, 4  # neighbourhoods in vain; few if another plan is to beat
_log = logging.getLogger("autopar")


class BudgetSearch:
    """One problem within `budget_bytes` a device.

    It ends at a relative `gap` to the bound, but at least `BUDGET_GAP`, or, once a plan
    fits, at a bound of `cutoff` seconds.
    """

    def __init__(
        self,
        graph: OpGraph,
        mesh: MeshShape,
        cluster: Cluster,
        pins: Mapping[int, Pin] | None,
        restrictions: Sequence[Limit],
        budget_bytes: int,
        gap: float,
        cutoff: float = math.inf,
        earlier: EarlierSearches | None = None,
    ) -> None:
        resharder = Resharder(mesh, cluster)
        place = graph, mesh, cluster, resharder
        orders = demanded_orders(restrictions)
        problem = build_problem(*place, pins, counts_memory=True, demanded=orders)
        problem = restrict(problem, restrictions, cluster)
        self.place = problem, cluster, resharder
        self.budget_bytes, self.gap = budget_bytes, max(gap, BUDGET_GAP)
        self.cutoff = cutoff
        self.earlier = earlier or EarlierSearches()
        self.key = problem_key(problem) if earlier else b""
        self.before = self.earlier.met(self.key)
        if self.before is None:
            self.free = solve(problem.choice_graph, gap=BUDGET_GAP / 10)
        else:
            self.free, self.place = self.before.free, self.before.place
        self.is_ruled_out = False
        self.is_in_vain = False
        self.limits: Sequence[Limit | Assignment] = ()
        self.looked_near: MetPlan | None = None

    def run(
        self,
        finds_least: bool,
        starts: Sequence[Limit | Assignment] = (),
        work: SearchWork | None = None,
    ) -> IntraOpSolution:
        start, budget = perf_counter(), self.budget_bytes
        work, self.limits = work or SearchWork(), starts
        if self.before is not None:
            met = self.before
            met.go_on(budget, work)
            for each in starts:
                if isinstance(each, Assignment):
                    met.meet_start(each)
        else:
            worth = WORTH_A_TURN * budget
            met = MetPlans(*self.place, self.free, worth, work, budget)
            self._meet_starts(met)
            self.earlier.keep_met(self.key, met)
        met.admit_within(budget)
        self._tell_first(met)
        self._narrow(met)
        if met.fitting(budget) is None and finds_least:
            self._meet_least(met)
        best = met.fitting(budget)
        if best is None:
            raise infeasible_error(met.least().profile, budget)
        solution = self.solution(best, met.bound(budget, best))
        is_cut = met.work_left <= 0 or self.is_in_vain
        if is_cut and not self._is_near(met):
            _log.warning(
                "The search for a plan within %d B a device ended %s: the plan has a "
                "gap of %.2f%%%s.",
                budget,
                "in vain" if self.is_in_vain else "at its limit of work",
                100 * solution.assignment.gap,
                " and depends on the machine" * met.clock.is_late,
            )
        _log.info(
            "%s: %d plans met, %d rows of memory, gap %.2f%%, %.1f s",
            *(self.place[0].graph.name, len(met.plans), len(met.rows)),
            *(100 * solution.assignment.gap, perf_counter() - start),
        )
        return solution

    def _narrow(self, met: MetPlans) -> None:
        """Meets the cheapest plans within the budget, and raises the bound to them."""
        kept_back, spent = met.kept_back, met.work_spent
        met.kept_back += min(TO_FIT * met.most_work, met.work_left / 2)
        self._search_live(met)
        met.kept_back = kept_back
        base = met.cheapest(self.budget_bytes)
        fit_near(met, base, self.budget_bytes, self.gap, self.cutoff)
        self._close_gap(met)
        best = met.fitting(self.budget_bytes)
        is_over = self.is_in_vain or met.bound(self.budget_bytes) >= self.cutoff
        if best is not None and self._is_near(met) and not is_over:
            own = self.budget_bytes, self.gap, met.work_spent - spent
            if meet_doubted(met, best, *own) is not best:
                self._close_gap(met)
        if self.is_in_vain:
            met.give_up()

    def _close_gap(self, met: MetPlans) -> None:
        """Searches by packed rows, and raises the bound, as long as a gap is left."""
        is_none_left = self.is_ruled_out and met.fitting(self.budget_bytes) is None
        if is_none_left or self._is_near(met):
            return
        kept_back = met.kept_back
        met.kept_back += TO_RAISE * met.work_left
        self._search_packed(met)
        met.kept_back = kept_back
        self._raise_bound(met)

    def _search_live(self, met: MetPlans) -> None:
        """Meets plans of which no more is live than may be, far from the bound yet."""
        self._solve_in_rounds(met, WIDE_GAP, packed=False)
        self._look_through(met, packed=False)
        is_over = self.is_ruled_out or self._is_closed(met, packed=False)
        if met.cheapest(self.budget_bytes) is None and not is_over:
            self._solve_with_margins(met)

    def _search_packed(self, met: MetPlans) -> None:
        """Meets the cheapest plans that fit, by rows with the holes of others."""
        met.add_packed()
        for gap in (WIDE_GAP, self.gap):
            if self._open_gap(met, packed=True) <= FAR:
                self._improve_near(met)
            if self._open_gap(met, packed=True) > gap:
                self._solve_in_rounds(met, gap, packed=True)
                self._look_through(met, packed=True)
        self._improve_near(met)

    def _raise_bound(self, met: MetPlans) -> None:
        """Raises the bound of all plans within the budget, as far as that is of use.

        None is above a plan of which no more is live, whatever it needs packed. A plan
        met above the budget brings rows; those that say too much of one are lowered.
        """
        budget = self.budget_bytes
        for _ in range(MOST_RAISED):
            best, live = met.fitting(budget), met.cheapest(budget)
            if best is None or live is None:
                return
            wanted = (1 - self.gap) * best.assignment.cost
            wanted = min(wanted, (1 - TIGHT_GAP) * live.assignment.cost, self.cutoff)
            if met.work_left <= 0 or met.bound(budget, best) >= wanted:
                return
            try:
                gap = 1 - wanted / live.assignment.cost
                found = met.solve(budget, gap, cutoff=wanted)
            except Infeasible:  # by rows that say a little more of plans met
                return
            met.lower_refuted()
            if found.live_bytes > budget:
                met.add_rows(found)
            elif met.fitting(budget) is best and met.cheapest(budget) is live:
                return

    def _meet_least(self, met: MetPlans) -> None:
        """Meets the plan of the least memory, and cheaper ones near it.

        Raises:
          InfeasiblePlanError: neither it nor one near it fits.
        """
        least = self.least_found(self.budget_bytes)
        met.meet_start(least.found.assignment)
        if fit_near(met, least.found, self.budget_bytes, self.gap) is None:
            raise least.error(self.budget_bytes)
        met.admit_within(self.budget_bytes)
        self.is_ruled_out = False
        self._narrow(met)

    def _is_near(self, met: MetPlans) -> bool:
        """Whether a plan fits, and the bound of all that may closes its gap."""
        return self._gap(met) <= self.gap

    def _gap(self, met: MetPlans) -> float:
        """Of the cheapest plan that fits to the bound of all; none at the cutoff."""
        best = met.fitting(self.budget_bytes)
        if best is None:
            return math.inf
        bound, cost = met.bound(self.budget_bytes, best), best.assignment.cost
        return 0.0 if bound >= self.cutoff else 1 - bound / cost

    def _tell_first(self, met: MetPlans) -> None:
        best, name = met.fitting(self.budget_bytes), self.place[0].graph.name
        if best is not None and is_long(self.place[0].graph):
            cost = best.assignment.cost
            gap = 100 * (cost / self.free.bound - 1)
            seconds = format_seconds(cost)
            _log.info("%s: a plan of %s fits, gap %.2f%%", name, seconds, gap)

    def _limited(self, limit: Limit | Assignment) -> Assignment | None:
        """The cheapest plan that a limit leaves, if it is one of the problem."""
        if isinstance(limit, Assignment):
            return limit
        problem, cluster, _ = self.place
        try:
            limited = restrict(problem, (limit,), cluster).choice_graph
            found = solve(limited, gap=BUDGET_GAP / 10)
        except (Infeasible, ValueError) as error:  # a pin says otherwise
            _log.info("%s: %s", limit, error)
            return None
        return found if problem.choice_graph.cost(found.choices) < math.inf else None

    @cached_property
    def starts(self) -> list[Assignment]:
        """The cheapest plans with limits, and others that were given."""
        return [each for limit in self.limits if (each := self._limited(limit))]

    def _meet_starts(self, met: MetPlans) -> None:
        for found in self.starts:
            met.meet_start(found)

    def _solve_in_rounds(self, met: MetPlans, gap: float, *, packed: bool) -> None:
        """Adds rows until the solver's plan fits, or nothing does.

        Where rows say a little less of a plan than the model does, the next one is
        aimed that much below the budget.
        """
        limit = aim = self.budget_bytes
        for number in range(MOST_ROUNDS):
            if met.work_left <= 0 or self.is_in_vain:
                break
            before = self._open_gap(met, packed=packed)
            enough = self._enough(met, packed=packed)
            try:
                found = met.solve(limit, gap, aim, enough, packed=packed)
            except Infeasible:
                is_some = met.cheapest(limit, packed=packed) is not None
                if is_some and met.admit_far():
                    continue
                self.is_ruled_out = not packed
                return
            by, beyond = met.lower_refuted(), found.bytes(packed=packed) - limit
            if packed and beyond <= 0:
                self._improve_near(met)
            if self._is_closed(met, packed=packed):
                return
            may_end = packed and gap <= self.gap and met.work_left < met.most_work / 2
            is_stuck = before - self._open_gap(met, packed=packed) < WORTH_A_ROUND
            if may_end and beyond <= 0 and is_stuck:
                self.is_in_vain = True
            if beyond > 0:
                meet_mixtures(met, found, limit, packed=packed)
                met.add_rows(found)
                self._look_through(met, packed=packed)
                if self._is_closed(met, packed=packed):
                    return
                if number >= FREE_ROUNDS or beyond <= WORTH_AIMING_AT * limit:
                    aim -= min(beyond, MOST_AIMED * limit)
            elif gap > self.gap or by <= WORTH_SOLVING_AGAIN * limit:
                return

    def _look_through(self, met: MetPlans, *, packed: bool) -> None:
        """Takes a cheaper plan that rows put above the budget, if it fits."""
        if not self._is_closed(met, packed=packed):
            most = FEW_LOOKED_AT if is_long(self.place[0].graph) else MOST_LOOKED_AT
            met.look_through(self.budget_bytes, most, packed=packed)

    def _improve_near(self, met: MetPlans) -> None:
        """Takes cheaper plans near the best, where it leaves a gap and is new."""
        best = met.fitting(self.budget_bytes)
        if best is None or best is self.looked_near:
            return
        if self._open_gap(met, packed=True) > self.gap:
            tries = MOST_NEAR if self.cutoff == math.inf else FEW_NEAR
            self.looked_near = improve_near(met, self.budget_bytes, self.gap, tries)

    def _open_gap(self, met: MetPlans, *, packed: bool) -> float:
        best = met.cheapest(self.budget_bytes, packed=packed)
        if best is None:
            return math.inf
        return 1 - met.bound(self.budget_bytes, packed=packed) / best.assignment.cost

    def _enough(self, met: MetPlans, *, packed: bool) -> float:
        """The bound that ends the search where a plan fits: its gap's, or a cutoff.

        Nor is more wanted once no plan of which as little is live is cheaper than one
        that fits packed.
        """
        best = met.cheapest(self.budget_bytes, packed=packed)
        if best is None:
            return math.inf
        enough = min((1 - self.gap) * best.assignment.cost, self.cutoff)
        fitting = met.fitting(self.budget_bytes)
        if not packed and fitting is not None:
            enough = min(enough, (1 - TIGHT_GAP) * fitting.assignment.cost)
        return enough

    def _is_closed(self, met: MetPlans, *, packed: bool) -> bool:
        """Whether a plan was met that fits, and the bound is enough."""
        enough = self._enough(met, packed=packed)
        return met.bound(self.budget_bytes, packed=packed) >= enough

    def _solve_with_margins(self, met: MetPlans) -> None:
        """Leaves room for points that were not met; the bound stays."""
        limit = self.budget_bytes
        for margin in MARGINS:
            try:
                found = met.solve(limit, WIDE_GAP, margin * limit)
            except Infeasible:
                return
            if found.live_bytes <= limit:
                return

    def least_found(self, enough_bytes: int) -> LeastMemory:
        """The plan of the least memory, or one that holds no more than is enough.

        It starts anew, and so goes the same way whatever the budget.
        """
        found = self.earlier.least(self.key, enough_bytes)
        if found is None:
            met = MetPlans(*self.place, self.free, 0.0)
            self._meet_starts(met)
            found = least_memory(met, enough_bytes)
            self.earlier.keep_least(self.key, enough_bytes, found)
        return found

    def solution(self, found: MetPlan, bound: float) -> IntraOpSolution:
        """With the gap against the bound of the problem at the full budget."""
        bound = min(bound, found.assignment.cost)
        peak = float(found.peak_bytes)
        assignment = replace(found.assignment, bound=bound, peak_bytes=peak)
        plan, free_gap = found.profile.plan, 0.0
        if bound > self.free.bound:  # as rows of memory have it
            free_gap = replace(assignment, bound=self.free.bound).gap
        gaps = {"optimality_gap": float(assignment.gap), "free_gap": float(free_gap)}
        predicted = replace(plan.predicted, **gaps)
        return IntraOpSolution(replace(plan, predicted=predicted), assignment)
