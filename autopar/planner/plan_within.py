"""The cheapest plan that fits a memory budget.

A plan that is returned fits by what the model says of its memory, and its bound is that
of the rows met (`budget_search.py`). If none is found, that of the least memory does
(`least_memory.py`), or says what budget would do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.solver.assignment import Assignment

from ..clusters.cluster import Cluster
from ..graph.op_graph import OpGraph
from ..methods.restrictions import Limit
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from .budget_search import BudgetSearch
from .earlier_searches import EarlierSearches
from .intra_op import IntraOpSolution, plan_intra_op
from .least_inputs import check_room
from .memory_users import infeasible_error
from .search_work import SearchWork


def plan_within(
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    budget_bytes: int,
    *,
    pins: Mapping[int, Pin] | None = None,
    restrictions: Sequence[Limit] = (),
    gap: float = 1e-4,
    cutoff: float = math.inf,
    work: SearchWork | None = None,
    earlier: EarlierSearches | None = None,
) -> IntraOpSolution:
    """The cheapest plan whose predicted peak is at most `budget_bytes` a device.

    `gap` is the relative distance from the bound at which the solver stops; where the
    budget binds it is at least `BUDGET_GAP`. Where the bound without a budget is at
    least `cutoff` seconds, the plan is any, and need not fit.

    Raises:
      InfeasiblePlanError: as `plan_within_binding`, or arguments alone take more.
    """
    place = graph, mesh, cluster
    free = plan_intra_op(
        *place, pins=pins, restrictions=restrictions, gap=gap, cutoff=cutoff
    )
    fits = free.plan.predicted.peak_bytes <= budget_bytes
    if fits or free.assignment.bound >= cutoff:
        return free
    check_room(graph, free.plan, restrictions, budget_bytes)
    return plan_within_binding(
        *(*place, budget_bytes),
        pins=pins,
        restrictions=restrictions,
        gap=gap,
        cutoff=cutoff,
        work=work,
        earlier=earlier,
    )


def plan_within_binding(
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    budget_bytes: int,
    *,
    pins: Mapping[int, Pin] | None = None,
    restrictions: Sequence[Limit] = (),
    gap: float = 1e-4,
    cutoff: float = math.inf,
    finds_least: bool = True,
    starts: Sequence[Limit | Assignment] = (),
    work: SearchWork | None = None,
    earlier: EarlierSearches | None = None,
) -> IntraOpSolution:
    """As `plan_within`, where the cheapest plan of all is known not to fit.

    `starts`: the cheapest plan with each of these limits is met first, with its rows,
    or a plan of the same problem itself.
    `finds_least`: where the cheapest plans do not fit, the plan of the least memory is
    searched for. Once a plan was met that fits, a bound of `cutoff` seconds ends the
    search. `work` is what it may take, alone or with others; what an equal problem's
    search met within another budget is gone on from, if it is among `earlier`.

    Raises:
      InfeasiblePlanError: no plan was found that fits; it names a budget that will be
        planned, and what takes the most memory then.
    """
    ends = budget_bytes, gap, cutoff, earlier
    within = BudgetSearch(graph, mesh, cluster, pins, restrictions, *ends)
    return within.run(finds_least, starts, work)


def plan_least_memory(
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    budget_bytes: int,
    *,
    pins: Mapping[int, Pin] | None = None,
    restrictions: Sequence[Limit] = (),
) -> IntraOpSolution:
    """The plan of the least predicted peak that is found, and its cost's gap.

    Raises:
      InfeasiblePlanError: it does not fit the budget.
    """
    place = graph, mesh, cluster
    within = BudgetSearch(*place, pins, restrictions, budget_bytes, 0.0)
    found = within.least_found(0).found
    if found.peak_bytes > budget_bytes:
        raise infeasible_error(found.profile, budget_bytes)
    return within.solution(found, within.free.bound)
