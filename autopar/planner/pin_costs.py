"""What pins cost: the predicted seconds of the plan, and of one without each pin.

Nothing is traced again: the graph is solved once for every pin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from ..graph.op_graph import Operator, OpGraph
from ..methods.methods import PipelineParallel
from ..options import Options
from ..sharding.pins import FREE
from .planning import Planned, batch_tensors, plan_graph

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
        width = max(len(cost.pin) for cost in self.costs)
        lines = [f"{'pin':{width}}  {'without it':>12}  {'it costs':>12}"]
        for cost in self.costs:
            part = cost.seconds / self.step_seconds if self.step_seconds else 0.0
            lines.append(
                f"{cost.pin:{width}}  {cost.seconds_without * 1e6:>9.1f} us  "
                f"{cost.seconds * 1e6:>9.1f} us ({part:.1%})"
            )
        return "\n".join(lines)


def pin_costs(planned: Planned, leaves: Sequence[Any], options: Options) -> PinCosts:
    """The cost of each pin of `options`, and of each line that calls `autopar.pin`.

    Args:
      planned: the step with all pins.
      leaves: the leaves of its arguments.
      options: what it was planned with.

    Raises:
      ValueError: the plan was given, not made.
      NotImplementedError: the plan is a pipeline.
    """
    if isinstance(options.method, PipelineParallel):
        raise NotImplementedError(
            "What a pin costs a pipeline is not told yet; compare the predicted "
            "seconds of two plans, or use autopar.ShardParallel()."
        )
    if options.plan is not None:
        raise ValueError(
            "What a pin costs is known of a plan that is solved here, but `plan` was "
            "given; leave it out."
        )
    mesh = planned.plan.sharding.mesh
    if options.mesh is None and mesh.size == planned.cluster.num_devices:
        options = replace(options, mesh=mesh)
    batch = batch_tensors(planned.traced, planned.graph, options)
    step_seconds = planned.plan.predicted.step_seconds
    costs = []
    for pin, graph, pins in _without_each(planned.graph, options.pins):
        rest = replace(options, pins=pins)
        plan = plan_graph(graph, leaves, batch, planned.cluster, rest)
        costs.append(PinCost(pin, step_seconds, plan.predicted.step_seconds))
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
