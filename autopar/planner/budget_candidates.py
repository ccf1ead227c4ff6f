"""The cheapest plan of a step within a budget, named methods among the candidates.

Where the cheapest plan of all does not fit, parameters may also be gathered again for
the backward pass (`gather_again.py`). What a named method plans is a plan of that
problem, too, but under a budget the search may end before it finds one as good, or any
at all. So where it ends with a gap, every named method that could be better is planned,
and the best of all plans is taken: no method that fits is predicted to be faster.
On a mesh of several axes those plans are searched first that use it as one axis; the
best of them is met, with its memory, before all others. Of a long step only where the
search of all ends with a gap.
Where the search ends without one, or far above the budget, methods are planned as they
are, without the budget: its bound holds for rows of memory that such a plan may not
fill. Where that bound is out of reach, none is planned.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from operator import mul

from ..clusters.cluster import Cluster
from ..costs.memory import memory_profile
from ..errors import InfeasiblePlanError
from ..graph.op_graph import OpGraph
from ..methods.axes_together import AxesTogether
from ..methods.gather_again import gathering_again, graph_of_plan
from ..methods.named_methods import (
    DataParallel,
    Megatron,
    NamedMethod,
    Zero,
    gathers_again,
    restriction_of,
)
from ..methods.restrictions import Restriction
from ..methods.zero_restriction import split_state, within_groups
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from .budget_search import BUDGET_GAP
from .earlier_searches import EarlierSearches
from .even_share import is_long
from .intra_op import IntraOpSolution, plan_intra_op
from .least_inputs import least_input_bytes
from .memory_users import infeasible_error
from .plan_within import plan_least_memory, plan_within_binding
from .search_work import SearchWork

FAR = 1.05  # times the budget, the least found
NEAR = 1.01  # times the budget, what any plan needs by rows
OUT_OF_REACH = 2  # times the budget, what any plan needs by rows: no method fits
NEARLY_CLOSED = 1.1  # times the gap that is wanted
ROUNDING = 1e-9
STARTS = Zero(3, reshard_after_forward=False), Zero(3)
_Place = tuple[OpGraph, MeshShape, Cluster]
_log = logging.getLogger("autopar")


@dataclass(frozen=True, eq=False)
class BudgetCandidates:
    """The plans of one step on one mesh, within one budget.

    `batch` are the tensors whose dim 0 is the batch, `pins` those of arguments. Plans
    of `cutoff` seconds or more are of no use. `work` is what all searches may take, and
    `free` the cheapest plan of all, where it is known; `again` makes the graph that
    gathers again, or has it. Searches within other budgets are gone on from that are
    among `earlier`.
    """

    graph: OpGraph
    mesh: MeshShape
    cluster: Cluster
    budget_bytes: int
    batch: Sequence[int]
    pins: Mapping[int, Pin]
    gap: float
    cutoff: float = math.inf
    work: SearchWork = field(default_factory=SearchWork)
    free: IntraOpSolution | None = None
    again: Callable[[], OpGraph] | None = None
    earlier: EarlierSearches | None = None

    def best(self) -> IntraOpSolution:
        """The cheapest plan that is found to fit; any, if the bound is at the cutoff.

        Raises:
          InfeasiblePlanError: no plan is found that fits.
        """
        place = self.graph, self.mesh, self.cluster
        free = self.free or plan_intra_op(
            *place, pins=self.pins, gap=self.gap, cutoff=self.cutoff
        )
        fits = free.plan.predicted.peak_bytes <= self.budget_bytes
        if fits or free.assignment.bound >= self.cutoff:
            return free
        self.work.spend_on_problem(len(self.graph.operators()))
        errors: list[InfeasiblePlanError] = []
        searched, bound, searches = None, free.assignment.bound, True
        try:
            searched = self._search()
        except InfeasiblePlanError as error:
            if error.far_bound_bytes > OUT_OF_REACH * self.budget_bytes:
                raise
            errors.append(error.without_frames())
            searches = self._may_be_met(error)
        else:
            if searched.assignment.bound >= self.cutoff:
                return searched
            gap = searched.assignment.gap
            searches = gap > NEARLY_CLOSED * max(self.gap, BUDGET_GAP)
            if searches:
                bound = max(bound, searched.assignment.bound)
        best = searched
        if self._may_search(searches) or not self._is_long:
            best = _faster(searched, self._together)
        for method in self._methods():
            if best is not None and _seconds(best) <= bound * (1 + BUDGET_GAP):
                break
            was_met = searched is not None and method in STARTS
            if was_met and not self._may_search(searches):
                continue
            try:
                if self._has_no_room(method):
                    continue
                best = self._plan(method, best, searches=searches) or best
            except InfeasiblePlanError as error:
                errors.append(error.without_frames())
            except (ValueError, NotImplementedError) as error:
                _log.info("%s: %s", method, error)
        if best is None and searches and not self._is_long:
            best = self._search_together(finds_least=True)
        if best is None:
            least = min(errors, key=lambda error: error.least_budget_bytes or math.inf)
            least.far_bound_bytes = max(error.far_bound_bytes for error in errors)
            raise least
        if searched is not None:  # its bound is one of all plans, whichever is best
            bound = max(bound, searched.assignment.bound)
        is_closed = best is searched and not searches
        if best.assignment.cost < bound:  # the rows of that bound rule out a plan
            bound = free.assignment.bound
        return best if is_closed else _with_bound(best, bound)

    def least_memory(self) -> IntraOpSolution:
        """The plan that is found to hold the least, whatever it costs.

        Raises:
          InfeasiblePlanError: that plan does not fit the budget.
        """
        place = self._gathering_again, self.mesh, self.cluster
        found = [plan_least_memory(*place, sys.maxsize, pins=self.pins)]
        for method in self._methods():
            try:
                place, limits = self._problem(method)
                found.append(plan_intra_op(*place, pins=self.pins, restrictions=limits))
            except (InfeasiblePlanError, ValueError, NotImplementedError) as error:
                _log.info("%s: %s", method, error)
        best = min(found, key=_bytes_and_seconds)
        if best.plan.predicted.peak_bytes > self.budget_bytes:
            graph = graph_of_plan(self.graph, best.plan)
            raise infeasible_error(memory_profile(graph, best.plan), self.budget_bytes)
        return best

    @cached_property
    def _gathering_again(self) -> OpGraph:
        return self.again() if self.again else gathering_again(self.graph)

    def _search(self) -> IntraOpSolution:
        together = None if self._is_long else self._together
        met = () if together is None else (together.assignment,)
        together_starts, grouped_starts = self._starts
        return plan_within_binding(
            *(self._gathering_again, self.mesh, self.cluster, self.budget_bytes),
            pins=self.pins,
            gap=self.gap,
            cutoff=self.cutoff,
            starts=(*together_starts, *grouped_starts, *met),
            work=self.work,
            earlier=self.earlier,
        )

    @cached_property
    def _starts(self) -> tuple[list[Restriction], list[Restriction]]:
        """Methods that split the state, as limits of the problem that is searched.

        Those that split by all mesh axes or none, and those by groups of devices.
        """
        found: list[Restriction] = []
        grouped: list[Restriction] = []
        for method in STARTS:
            try:
                found += self._problem(method)[1]
                if gathers_again(method):
                    zero, graph = found[-1], self._gathering_again
                    found.append(split_state(zero, graph))
                    if self.mesh.num_axes > 1:
                        grouped.append(within_groups(zero, graph))
            except (ValueError, NotImplementedError) as error:
                _log.info("%s: %s", method, error)
        return found, grouped

    @property
    def _is_long(self) -> bool:
        """Whether another search is worth it only where one left a gap."""
        return is_long(self.graph)

    @cached_property
    def _together(self) -> IntraOpSolution | None:
        """As `_search_together`, with a part of the work."""
        return self._search_together(finds_least=False)

    def _search_together(self, *, finds_least: bool) -> IntraOpSolution | None:
        """The cheapest plan found that splits by all mesh axes or none, if one fits.

        Not where another mesh's plan is to be beaten: one of these may be of one axis.
        """
        if self.mesh.num_axes < 2 or self.cutoff < math.inf:
            return None
        try:
            return plan_within_binding(
                *(self._gathering_again, self.mesh, self.cluster, self.budget_bytes),
                pins=self.pins,
                restrictions=(AxesTogether(),),
                gap=self.gap,
                finds_least=finds_least,
                starts=self._starts[0],
                work=self.work.half().half(),
                earlier=self.earlier,
            )
        except InfeasiblePlanError as error:
            _log.info("all axes together: %s", error)
            return None

    def _methods(self) -> Iterator[NamedMethod]:
        yield DataParallel()
        yield Zero(1)
        yield Zero(2)
        yield Zero(3, reshard_after_forward=False)
        yield Zero(3)
        groups = accumulate(reversed(self.mesh.axis_sizes), mul)
        for tensor, sequence in product(groups, (False, True)):
            if tensor > 1:
                yield Megatron(tensor, sequence)

    def _problem(self, method: NamedMethod) -> tuple[_Place, tuple[Restriction, ...]]:
        graph = self._gathering_again if gathers_again(method) else self.graph
        restriction = restriction_of(method, graph, self.mesh, self.batch)
        return (graph, self.mesh, self.cluster), (restriction,)

    def _plan(
        self, method: NamedMethod, best: IntraOpSolution | None, *, searches: bool
    ) -> IntraOpSolution | None:
        """The method's plan that fits, if there is one that is faster than `best`.

        `searches`: where its cheapest does not fit, one that does is searched for.
        """
        place, limits = self._problem(method)
        cutoff = math.inf if best is None else min(_seconds(best), self.cutoff)
        found = plan_intra_op(
            *place, pins=self.pins, restrictions=limits, gap=self.gap, cutoff=cutoff
        )
        if _seconds(found) >= cutoff:
            return None
        if found.plan.predicted.peak_bytes > self.budget_bytes:
            if not self._may_search(searches):
                graph = graph_of_plan(self.graph, found.plan)
                profile = memory_profile(graph, found.plan)
                raise infeasible_error(profile, self.budget_bytes)
            self.work.spend_on_problem(len(place[0].operators()))
            found = plan_within_binding(
                *(*place, self.budget_bytes),
                pins=self.pins,
                restrictions=limits,
                gap=self.gap,
                cutoff=cutoff,
                finds_least=False,
                work=self.work,
                earlier=self.earlier,
            )
        if _seconds(found) >= cutoff:
            return None
        _log.info("%s is better than what the search found", method)
        return found

    def _may_be_met(self, error: InfeasiblePlanError) -> bool:
        """Whether a method may fit that the search of all plans did not meet."""
        is_far = (error.least_budget_bytes or 0) > FAR * self.budget_bytes
        return not is_far and error.bound_bytes <= NEAR * self.budget_bytes

    def _may_search(self, searches: bool) -> bool:
        return searches and self.work.may_begin(len(self.graph.operators()))

    def _has_no_room(self, method: NamedMethod) -> bool:
        """Whether the arguments alone are above the budget, as a method has them."""
        (graph, _, _), limits = self._problem(method)
        least = (least_input_bytes(graph, self.mesh, each) for each in limits)
        return max(least, default=0.0) > self.budget_bytes


def _faster(
    one: IntraOpSolution | None, other: IntraOpSolution | None
) -> IntraOpSolution | None:
    """The cheaper plan of two, of those there are; the first of equal ones."""
    if one is None or other is None:
        return one or other
    return other if _seconds(other) < (1 - ROUNDING) * _seconds(one) else one


def _bytes_and_seconds(found: IntraOpSolution) -> tuple[int, float]:
    predicted = found.plan.predicted
    return predicted.peak_bytes, predicted.step_seconds


def _seconds(solution: IntraOpSolution) -> float:
    return solution.plan.predicted.step_seconds


def _with_bound(solution: IntraOpSolution, bound: float) -> IntraOpSolution:
    """With the gap against the bound of the free problem."""
    assignment = solution.assignment
    assignment = replace(assignment, bound=min(bound, assignment.cost))
    gaps = {"optimality_gap": float(assignment.gap), "free_gap": 0.0}
    predicted = replace(solution.plan.predicted, **gaps)
    return IntraOpSolution(replace(solution.plan, predicted=predicted), assignment)
