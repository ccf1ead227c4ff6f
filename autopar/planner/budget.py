"""The cheapest plan of a step on one mesh, within a memory budget.

Where the cheapest plan of all fits, it is that. Else the problem is solved by prices on
memory (`solver/budget.py`), parameters being gathered again for the backward pass where
that pays, and with the plans of all named methods to begin with: so no method that fits
is predicted to be faster. What is told of the plan is one gap, to the bound of all
plans, whatever their memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from operator import mul

from autopar.solver.assignment import Assignment
from autopar.solver.budget import Found, least_memory, solve_within
from autopar.solver.choice_graph import Infeasible
from autopar.solver.solve import solve

from ..clusters.cluster import Cluster
from ..costs.memory import MemoryProfile
from ..costs.resharding import Resharder
from ..graph.op_graph import OpGraph
from ..graph.work import is_heavy_operator
from ..methods.named_methods import (
    DataParallel,
    Megatron,
    NamedMethod,
    Zero,
    restriction_of,
)
from ..methods.restrictions import NOT_SPLIT, Restriction
from ..option_values import NO_BUDGET
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from .gather_again import gathering_again
from .intra_op import IntraOpSolution, plan_intra_op, read_profile
from .lower_bound import memory_on_one_device
from .memory_constraints import MemoryRows
from .memory_users import infeasible_error, no_room_error
from .restrict import Limit, demanded_orders, restrict
from .sharding_problem import build_problem

METHOD_GAP = 0.02  # at which plans to begin with are taken
_log = logging.getLogger("autopar")


@dataclass(frozen=True, eq=False)
class BudgetPlanner:
    """A step on one mesh.

    `batch` are the tensors whose dim 0 is the batch, `pins` those of arguments, by
    tensor. `limits` are what a method leaves; without any, parameters may be gathered
    again, and named methods are tried.
    """

    graph: OpGraph
    mesh: MeshShape
    cluster: Cluster
    batch: Sequence[int] = ()
    pins: Mapping[int, Pin] = field(default_factory=dict)
    limits: Sequence[Limit] = ()

    def within(
        self, budget_bytes: int, gap: float, cutoff: float = math.inf
    ) -> IntraOpSolution:
        """The cheapest plan found that fits; any, if the free bound is at the cutoff.

        Raises:
          InfeasiblePlanError: no plan was found that fits.
        """
        if budget_bytes != NO_BUDGET:
            self.check_room(budget_bytes)
        free = plan_intra_op(
            *(self.graph, self.mesh, self.cluster),
            pins=self.pins,
            restrictions=self.limits,
            gap=gap,
            cutoff=cutoff,
        )
        fits = free.plan.predicted.peak_bytes <= budget_bytes
        if fits or free.assignment.bound >= cutoff:
            return free
        search = _Search(self, budget_bytes)
        return replace(search.best(free.assignment.bound), is_searched=True)

    def least(self, budget_bytes: int) -> IntraOpSolution:
        """The plan that is found to hold the least, whatever it costs.

        Raises:
          InfeasiblePlanError: it does not fit the budget.
        """
        return _Search(self, budget_bytes).least()

    def check_room(self, budget_bytes: int) -> None:
        """Refuses a budget that no plan can fit.

        Raises:
          InfeasiblePlanError: each argument split as far as can be, and the largest
            product's shard, take more.
        """
        methods = [each for each in self.limits if isinstance(each, Restriction)]
        arguments = max(
            self.input_bytes(each)
            for each in (*methods, Restriction("any plan", {}, {}, {}))
        )
        products = [
            sum(kind.bytes for kind in op.result_types)
            for op in self.graph.columns.distinct
            if is_heavy_operator(op)
        ]
        largest = max(products, default=0) / self.mesh.size
        if arguments + largest > budget_bytes:
            profile = memory_on_one_device(self.graph)
            raise no_room_error(
                *(profile, self.mesh, budget_bytes, int(arguments), int(largest))
            )

    def input_bytes(self, restriction: Restriction) -> float:
        """Bytes a device of all arguments, split as often as a method lets them be."""
        demands = {**restriction.everywhere, **restriction.homes}
        least = 0.0
        for given in self.graph.inputs:
            demand = demands.get(given.tensor)
            states = demand or (None,) * self.mesh.num_axes
            free = (
                size
                for size, allowed in zip(self.mesh.axis_sizes, states, strict=True)
                if allowed is None or not allowed <= NOT_SPLIT
            )
            if given.memory == "device":
                least += self.graph.tensors[given.tensor].type.bytes / math.prod(free)
        return least

    def methods(self) -> Iterator[NamedMethod]:
        """Those that may be tried on the mesh."""
        yield DataParallel()
        yield from (Zero(1), Zero(2), Zero(3, reshard_after_forward=False), Zero(3))
        groups = accumulate(reversed(self.mesh.axis_sizes), mul)
        for tensor, sequence in product(groups, (False, True)):
            if tensor > 1:
                yield Megatron(tensor, sequence)


class _Search:
    """The problem, with the memory of its plans."""

    def __init__(self, asked: BudgetPlanner, budget_bytes: int) -> None:
        self.asked, self.budget_bytes = asked, budget_bytes
        graph = asked.graph if asked.limits else gathering_again(asked.graph)
        resharder = Resharder(asked.mesh, asked.cluster)
        place = graph, asked.mesh, asked.cluster, resharder
        orders = demanded_orders(asked.limits)
        problem = build_problem(*place, asked.pins, demanded=orders)
        self.problem = restrict(problem, asked.limits, asked.cluster)
        self.graph, self.resharder = graph, resharder
        self.rows = MemoryRows(self.problem)

    def look(self, choices: tuple[int, ...]) -> Found:
        """What a plan holds, as rows of its fullest points say of others, too."""
        cost = self.problem.choice_graph.cost(choices)
        profile = self._profile(Assignment(choices, cost, bound=0.0))
        rows = self.rows.of(profile, choices)
        return Found(choices, cost, profile.peak_bytes, rows)

    def _profile(self, assignment: Assignment) -> MemoryProfile:
        return read_profile(
            self.problem, assignment, self.asked.cluster, self.resharder
        )

    def best(self, bound: float) -> IntraOpSolution:
        """The cheapest plan found that fits; `bound` is one of all plans.

        Raises:
          InfeasiblePlanError: no plan was found that fits.
        """
        graph, budget = self.problem.choice_graph, float(self.budget_bytes)
        free = solve(graph, gap=METHOD_GAP)
        starts = self._starts()
        found = solve_within(graph, budget, self.look, starts=starts, free=free)
        _log.info("%s: %s", self.graph.name, found)
        return self._solution(found.best or found.least, bound)

    def least(self) -> IntraOpSolution:
        """The plan that is found to hold the least.

        Raises:
          InfeasiblePlanError: it does not fit.
        """
        graph = self.problem.choice_graph
        free = solve(graph, gap=METHOD_GAP)
        starts = [free.choices, *self._starts()]
        found = least_memory(graph, self.look, starts=starts)
        return self._solution(found, free.bound)

    def _starts(self) -> Iterator[tuple[int, ...]]:
        """The cheapest plans of named methods, of those whose arguments fit."""
        if self.asked.limits:
            return
        for method in self.asked.methods():
            try:
                limit = restriction_of(
                    method, self.graph, self.asked.mesh, self.asked.batch
                )
                if self.asked.input_bytes(limit) > self.budget_bytes:
                    continue
                limited = restrict(self.problem, (limit,), self.asked.cluster)
                found = solve(limited.choice_graph, gap=METHOD_GAP)
            except (ValueError, NotImplementedError, Infeasible) as error:
                _log.info("%s: %s", method, error)
                continue
            if self.problem.choice_graph.cost(found.choices) < math.inf:
                yield found.choices

    def _solution(self, found: Found, bound: float) -> IntraOpSolution:
        """With the gap to the bound of all plans.

        Raises:
          InfeasiblePlanError: the plan does not fit.
        """
        bound = min(bound, found.cost)
        assignment = Assignment(found.choices, found.cost, bound)
        profile = self._profile(assignment)
        if found.bytes > self.budget_bytes:
            raise infeasible_error(profile, self.budget_bytes)
        return IntraOpSolution(profile.plan, assignment)
