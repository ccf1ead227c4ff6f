"""What pins cost: the predicted seconds of the plan, and of one without each pin.

Nothing is traced again: the graph is solved once for every pin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from ..clusters.cluster import Cluster
from ..graph.op_graph import Operator, OpGraph
from ..options import Options
from ..plans.pin_cost import PinCost, PinCosts
from ..plans.plan import ShardingPlan
from ..sharding.pins import FREE
from .mesh_search import TIGHT_GAP
from .planning import Planned, batch_tensors, plan_graph, with_placed_pins

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
    batch = batch_tensors(planned.traced, planned.graph, options)
    plan, cluster = planned.plan.sharding, planned.cluster
    return costs_of_pins(plan, planned.graph, leaves, batch, cluster, options)


def costs_of_pins(
    plan: ShardingPlan,
    graph: OpGraph,
    leaves: Sequence[Any],
    batch: Sequence[int],
    cluster: Cluster,
    options: Options,
) -> PinCosts:
    """As `pin_costs`, of a step's graph and its plan with all pins.

    Raises:
      ValueError: the plan was given, not made.
    """
    if options.plan is not None:
        raise ValueError(
            "What a pin costs is known of a plan that is solved here, but `plan` was "
            "given; leave it out."
        )
    if options.mesh is None and plan.mesh.size == cluster.num_devices:
        options = replace(options, mesh=plan.mesh)
    options = with_placed_pins(options, graph, leaves, cluster)
    step_seconds = plan.predicted.step_seconds
    if plan.predicted.optimality_gap > TIGHT_GAP:  # as of a plan to a wider gap
        best = plan_graph(graph, leaves, batch, cluster, options)
        step_seconds = min(step_seconds, best.predicted.step_seconds)
    costs = []
    for pin, some, pins in _without_each(graph, options.pins):
        rest = replace(options, pins=pins)
        found = plan_graph(some, leaves, batch, cluster, rest)
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
