"""What pins cost: the predicted seconds of the plan, and of one without each pin.

Nothing is traced again: the graph is solved once for every pin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from ..graph.op_graph import Operator, OpGraph
from ..options import Options
from ..plans.pin_cost import PinCost, PinCosts
from ..plans.plan import ShardingPlan
from ..sharding.layouts import FREE
from .graph_plan import plan_graph
from .mesh_search import TIGHT_GAP
from .plan_request import PlanRequest
from .planned import Planned
from .whole_step import batch_tensors

_PIN = "autopar_pin"


def pin_costs(planned: Planned, leaves: Sequence[Any], options: Options) -> PinCosts:
    """The cost of each pin of `options`, and of each line that calls `autopar.pin`.

    Args:
      planned: the step with all pins.
      leaves: the leaves of its arguments.
      options: what it was planned with.

    Raises:
      ValueError: the plan was given, not made.
    """
    graph, cluster = planned.graph, planned.cluster
    batch = batch_tensors(planned.traced, graph, options)
    request = PlanRequest(graph, leaves, batch, cluster, options)
    return costs_of_pins(planned.plan, request)


def costs_of_pins(plan: ShardingPlan, request: PlanRequest) -> PinCosts:
    """As `pin_costs`, of a plan with all pins.

    Raises:
      ValueError: the plan was given, not made.
    """
    if request.options.plan is not None:
        raise ValueError(
            "What a pin costs is known of a plan that is solved here, but `plan` was "
            "given; leave it out."
        )
    is_whole = plan.mesh.size == request.cluster.num_devices
    if request.options.mesh is None and is_whole:
        request = request.asking(mesh=plan.mesh)
    request = request.with_placed_pins()
    step_seconds = plan.predicted.step_seconds
    if plan.predicted.optimality_gap > TIGHT_GAP:  # as of a plan to a wider gap
        best = plan_graph(request)
        step_seconds = min(step_seconds, best.predicted.step_seconds)
    costs = []
    for pin, some, pins in _without_each(request.graph, request.options.pins):
        found = plan_graph(replace(request, graph=some).asking(pins=pins))
        costs.append(PinCost(pin, step_seconds, found.predicted.step_seconds))
    costs.sort(key=lambda cost: -cost.seconds)
    return PinCosts(step_seconds, tuple(costs))


def _without_each(
    graph: OpGraph, pins: Mapping[str, PartitionSpec]
) -> Iterator[tuple[str, OpGraph, Mapping[str, PartitionSpec]]]:
    """Each pin, with the graph and the pins that are left without it."""
    for key in pins:
        yield key, graph, {k: spec for k, spec in pins.items() if k != key}
    lines = dict.fromkeys(op.source for op in graph.operators() if op.kind == _PIN)
    for line in lines:
        yield f"autopar.pin at {line}", unpinned(graph, line), pins


def unpinned(graph: OpGraph, line: str) -> OpGraph:
    """The graph with the pins of one source line free."""

    def freed(op: Operator) -> Operator:
        if op.kind != _PIN or op.source != line:
            return op
        spec = PartitionSpec(*[FREE] * op.operand_types[0].rank)
        return replace(op, params={**op.params, "spec": spec})

    blocks = tuple(
        replace(block, operators=tuple(map(freed, block.operators)))
        for block in graph.blocks
    )
    return replace(graph, blocks=blocks)
