"""Bytes one device holds while the plan runs: liveness over the plan's local shards."""

from __future__ import annotations

from ..graph import Block, OpGraph
from ..plan import ShardingPlan
from ..spec import Spec, num_shards


def peak_bytes(graph: OpGraph, plan: ShardingPlan) -> int:
    """Largest sum of live shards at any operator, per device.

    State is donated: its next value takes its place once both are not needed at once.
    Fusion is not modelled, so the figure is an estimate; the compiled program tells.
    """
    return _Liveness(graph, plan).block_peak(graph.blocks[0])


class _Liveness:
    def __init__(self, graph: OpGraph, plan: ShardingPlan) -> None:
        self.graph, self.plan = graph, plan

    def shard_bytes(self, tensor: int, spec: Spec) -> int:
        whole = self.graph.tensors[tensor].type.bytes
        return whole // num_shards(spec, self.plan.mesh.axis_sizes)

    def held_bytes(self, tensor: int) -> int:
        """A tensor and its copies, all live as long as it is read."""
        plan = self.plan.tensors[tensor]
        specs = [plan.spec, *(c.target for c in plan.conversions)]
        return sum(self.shard_bytes(tensor, spec) for spec in dict.fromkeys(specs))

    def block_peak(self, block: Block) -> int:
        last_read: dict[int, int] = {}
        for position, op in enumerate(block.operators):
            for operand in op.operands:
                if isinstance(operand, int):
                    last_read[operand] = position
        end = len(block.operators)
        for operand in block.outputs:
            if isinstance(operand, int):
                last_read[operand] = end
        expiring: dict[int, list[int]] = {}
        for tensor, position in last_read.items():
            expiring.setdefault(position, []).append(tensor)
        kept = {i.tensor for i in self.graph.inputs if i.role != "state"}
        live = sum(self.held_bytes(t) for t in block.inputs)
        peak = live
        for position, op in enumerate(block.operators):
            made = sum(self.held_bytes(t) for t in op.results if t in last_read)
            bodies = [self.block_peak(self.graph.blocks[body]) for body in op.bodies]
            inner = max(bodies, default=0)
            peak = max(peak, live + made + inner)
            live += made
            for tensor in expiring.get(position, ()):
                if tensor not in kept:
                    live -= self.held_bytes(tensor)
        return peak
