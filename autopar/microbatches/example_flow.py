"""Where the examples of a batch are in every tensor of a step, whatever it takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd

from ..costs.compute import total_flops
from ..graph.build_graph import SCAN, STRUCTURED
from ..graph.dependencies import made_from, tensors_of
from ..graph.op_graph import Operand, Operator, OpGraph
from ..graph.work import holds_heavy_work, is_heavy_operator
from ..sharding.spec import REPLICATED, SUM, State
from .joined_batches import WHOLE, Part
from .microbatch_flow import Flow


@dataclass
class ExampleFlow(Flow):
    """A flow as over devices: sums over examples are known to all of them at once.

    What needs all examples has none. `reduced` are the tensors that were sums, maxima
    or minima over examples, also where they were needed whole later on.
    """

    reduced: dict[int, State] = field(default_factory=dict[int, State])

    @classmethod
    def of(cls, graph: OpGraph, batch: Sequence[int]) -> ExampleFlow:
        """The flow of the examples along dim 0 of the `batch` inputs."""
        size = gcd(*(graph.tensors[tensor].type.shape[0] for tensor in batch)) or 1
        flow = cls(graph, size)
        flow.run(batch)
        return flow

    def run_split(self, op: Operator) -> bool:
        if not super().run_split(op):
            for tensor in tensors_of(op.operands):
                if self.state_of(tensor) < REPLICATED:
                    self.part[tensor] = WHOLE
            if not super().run_split(op):
                self.set_whole(op)
        return True

    def write(self, tensor: int, part: Part) -> None:
        super().write(tensor, part)
        self.reduced.pop(tensor, None)
        if part[0] < REPLICATED:
            self.reduced[tensor] = part[0]

    def heavy_flops(self) -> float:
        """The flops of products that examples share among them."""
        return sum(
            total_flops(op) * block.weight
            for block in self.graph.blocks
            for op in block.operators
            if op.kind not in STRUCTURED and is_heavy_operator(op)
            if max(self.factor[op.index].operands) >= 0
        )

    def reaches(self, results: Iterable[Operand]) -> bool:
        """Whether some of `results` are of examples, or scalars of sums over them."""
        tensors = self.graph.tensors
        known = {
            tensor
            for tensor, state in self.reduced.items()
            if state == SUM and not tensors[tensor].type.rank
        }
        for op in self.graph.blocks[0].operators:
            if not known.isdisjoint(tensors_of(op.operands)):
                known.update(t for t in op.results if not tensors[t].type.rank)
        found = tensors_of(results)
        return any(t in known or self.part[t] != WHOLE for t in found)

    def is_of_weights(self, batch: Sequence[int]) -> bool:
        """Whether forward work uses dim 0 of the `batch` inputs as that of weights.

        A product of examples sums over their dim only with the same examples, or what
        is made of them, and a loop does not multiply them with what it carries.
        """
        operators = self.graph.blocks[0].operators
        made = made_from(batch, operators)
        return any(
            self._sums_over_weights(op, made) or self._carries_through(op)
            for op in operators
            if "transpose(" not in op.name
        )

    def _sums_over_weights(self, op: Operator, made: set[int]) -> bool:
        """Whether a product sums over the dim in one operand alone.

        The other is not among `made`, which are made of the batch.
        """
        if op.kind not in ("dot_general", "conv_general_dilated"):
            return False
        left, right = (self.state_of(operand) for operand in op.operands)
        of_batch = [operand in made for operand in op.operands]
        if op.kind == "conv_general_dilated":
            return right >= 0 and not of_batch[0]  # of the kernel
        (of_left, of_right), _ = op.params["dimension_numbers"]
        return not all(of_batch) and any(
            (left == here) != (right == there)
            for here, there in zip(of_left, of_right, strict=True)
        )

    def _carries_through(self, op: Operator) -> bool:
        """Whether a loop over dim 0 multiplies what it carries with its slices."""
        if op.kind != SCAN:
            return False
        first = op.params["num_consts"]
        last = first + op.params["num_carry"]
        block = self.graph.blocks[op.bodies[0]]
        carried = made_from(block.inputs[first:last], block.operators)
        pairs = zip(op.operands[last:], block.inputs[last:], strict=True)
        examples = (inner for outer, inner in pairs if self.state_of(outer) == 0)
        sliced = made_from(examples, block.operators)
        return any(
            holds_heavy_work(self.graph, inner)
            and not inner.bodies
            and not carried.isdisjoint(tensors_of(inner.operands))
            and not sliced.isdisjoint(tensors_of(inner.operands))
            for inner in block.operators
        )
