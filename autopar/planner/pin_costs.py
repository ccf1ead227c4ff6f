"""What pins cost: the predicted seconds of the plan, and of one without each pin.

Nothing is traced again: the graph is solved once for every pin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jax.sharding import PartitionSpec
from rich.text import Text

from ..graph.op_graph import Operator, OpGraph
from ..plans.explain import as_text, table
from ..plans.plan import ShardingPlan
from ..sharding.layouts import FREE
from .graph_plan import plan_graph
from .mesh_search import TIGHT_GAP
from .plan_request import PlanRequest

_PIN = "autopar_pin"


@dataclass(frozen=True)
class PinCost:
    """Seconds of a step with all pins, and with all but this one.

    `pin` is its key among `pins` of `parallelize`, or the line of an `autopar.pin`.
    """

    pin: str
    step_seconds: float
    seconds_without: float

    @property
    def seconds(self) -> float:
        """What the pin adds to a step; nothing if the solver would do the same."""
        return max(0.0, self.step_seconds - self.seconds_without)


@dataclass(frozen=True)
class PinCosts:
    """The cost of every pin, the dearest first; prints as a table.

    Costs do not add up: of two pins that ask for the same, neither costs anything.
    """

    step_seconds: float
    costs: tuple[PinCost, ...]

    def __str__(self) -> str:
        if not self.costs:
            return "no pins"
        rows = table("pin", ">with it", ">without it", ">it costs")
        for cost in self.costs:
            part = cost.seconds / self.step_seconds if self.step_seconds else 0.0
            seconds = cost.step_seconds, cost.seconds_without, cost.seconds
            first, second, third = (f"{each * 1e6:.1f} us" for each in seconds)
            rows.add_row(Text(cost.pin), first, second, f"{third} ({part:.1%})")
        return as_text([rows])


def pin_costs(plan: ShardingPlan, request: PlanRequest) -> PinCosts:
    """The cost of each pin of a request, and of each line that calls `autopar.pin`.

    Args:
      plan: the step with all pins.
      request: what it was planned of, on the plan's mesh.

    Raises:
      ValueError: the plan was given, not made.
    """
    if request.options.plan is not None:
        raise ValueError(
            "What a pin costs is known of a plan that is solved here, but `plan` was "
            "given; leave it out."
        )
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
