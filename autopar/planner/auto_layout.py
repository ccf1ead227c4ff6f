"""The layout that holds the least memory: a mesh axis, or none, for each named dim.

As `auto_mtf.layout` of Mesh-TensorFlow, an integer program over layouts:

    minimise    t, and among equal ones the number of dims that no axis splits
    subject to  x[d] is none or an axis that divides dim d               (_axes_of)
                y[S] = x on S, the dims that a tensor has                (best)
                no axis is twice in y[S]                                 (_states)
                constant + sum_S bytes[S, y[S]] <= t at program points   (add)

Every plan under a layout holds each of its tensors in equal parts, so a row is linear
in y. Which tensors are in memory together is known of a plan only: the points are those
of the layouts planned yet, each as `LayoutRules` plans it. The best other one by the
rows is planned next, until they say clearly more of it than the best one holds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..clusters.cluster import Cluster
from ..costs.memory import memory_profile
from ..graph.op_graph import OpGraph
from ..methods.dim_names import Dim, DimTies
from ..methods.layout_rules import LayoutRules, layout_restriction
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from .intra_op import IntraOpSolution, plan_intra_op
from .layout_program import Layout, LayoutProgram, NamedDims
from .memory_users import infeasible_error
from .restrict import Limit

MOST_PLANNED = 24
DOUBT = 1.1  # times the best, what rows may say of a layout that is planned yet
_log = logging.getLogger("autopar")


@dataclass(frozen=True, eq=False)
class AutoLayout:
    """The layout found, its plan, and how many layouts were planned on the way."""

    rules: LayoutRules
    solution: IntraOpSolution
    num_planned: int

    @property
    def peak_bytes(self) -> int:
        return self.solution.plan.predicted.peak_bytes

    def __str__(self) -> str:
        number = self.num_planned
        return f"{self.rules}: {self.peak_bytes:,} B, {number} layouts planned"


def auto_layout(
    rules: LayoutRules,
    graph: OpGraph,
    mesh: MeshShape,
    cluster: Cluster,
    batch: Sequence[int],
    budget_bytes: int,
    *,
    pins: Mapping[int, Pin] | None = None,
    limits: Sequence[Limit] = (),
) -> AutoLayout:
    """The layout whose plan holds the least memory.

    Args:
      rules: has the names of dims; without any, each dim of the arguments gets one.
      graph: the step.
      mesh: has the axes.
      cluster: has the devices.
      batch: the tensors whose dim 0 is the batch.
      budget_bytes: what a device may hold.
      pins: those of arguments, by tensor.
      limits: what else is left to the solver.

    Raises:
      ValueError: see `LayoutRules`.
      InfeasiblePlanError: the plan does not fit the budget.
    """
    if rules.names is None:
        rules = replace(rules, names=names_of_arguments(graph, mesh, batch))

    def plan_of(layout: LayoutRules) -> IntraOpSolution:
        own = layout_restriction(layout, graph, mesh, batch, others_whole=True)
        restrictions = (own, *limits)
        place = graph, mesh, cluster
        return plan_intra_op(*place, pins=pins, restrictions=restrictions)

    program = LayoutProgram(NamedDims.of(rules, graph, mesh, batch))
    planned: list[Layout] = []
    best: tuple[int, int, AutoLayout] | None = None
    while len(planned) < MOST_PLANNED:
        found = program.best(planned)
        if found is None or (best and found[1] > DOUBT * best[0]):
            break
        layout = found[0]
        planned.append(layout)
        own = replace(rules, rules=program.dims.text(layout))
        solution = plan_of(own)
        program.add(memory_profile(graph, solution.plan), layout)
        each = AutoLayout(own, solution, len(planned))
        key = each.peak_bytes, -len(layout)
        if best is None or key < best[:2]:
            best = *key, each
    assert best is not None, "a layout may split nothing"
    found = replace(best[2], num_planned=len(planned))
    _log.info("%s: %s", graph.name, found)
    if found.peak_bytes > budget_bytes:
        profile = memory_profile(graph, found.solution.plan)
        raise infeasible_error(profile, budget_bytes)
    return found


def names_of_arguments(
    graph: OpGraph, mesh: MeshShape, batch: Sequence[int]
) -> dict[str, tuple[str | None, ...]]:
    """A name for each dim of the arguments, by path; dims that are one share it."""
    ties = DimTies.of(graph, mesh)
    names: dict[Dim, str] = {}
    for tensor in batch:
        names |= dict.fromkeys(ties.reach([(tensor, 0)], 1), "batch")
    for each in graph.inputs:
        for dim, size in enumerate(graph.tensors[each.tensor].type.shape):
            if size > 1 and (each.tensor, dim) not in names:
                name = f"{re.sub(r'[^A-Za-z0-9]+', '_', each.path).strip('_')}_{dim}"
                names |= dict.fromkeys(ties.reach([(each.tensor, dim)], 1), name)
    return {
        each.path: tuple(
            names.get((each.tensor, dim))
            for dim in range(graph.tensors[each.tensor].type.rank)
        )
        for each in graph.inputs
    }
