"""Run a graph's operators while a new function is traced: its trace, written anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from ..frontend.dead_code import dead_code_eliminated
from ..graph.blocks import BlockRunner, as_array
from ..graph.build_graph import PINS
from ..graph.op_graph import Block, Constant, Operand, Operator, OpGraph
from ..graph.traced_function import TracedFunction
from ..jax_compat import abstract_value, equation_context, user_context
from ..rules.base import bind_params


class RetracingRunner(BlockRunner):
    """What is traced again keeps its source lines and name scopes."""

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph)
        self.values: dict[int, Any] = {}

    def scope(self, op: Operator) -> str:
        return op.name.rpartition("/")[0]

    def write(self, tensor: int, value: Any) -> None:
        self.values[tensor] = value

    def execute(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        if op.kind in PINS:  # a pin says the same of a part as of the whole
            with equation_context(op.eqn), user_context(op.eqn):
                return bind_params(op, [as_array(x) for x in operands])
        return super().execute(op, operands)


class WholeRunner(RetracingRunner):
    """Runs operators on whole arrays, as the function itself does."""

    def value(self, operand: Operand) -> Any:
        """A tensor as it was made, or a literal."""
        if isinstance(operand, Constant):
            return operand.value
        return self.values[operand]

    def operands(self, op: Operator) -> list[Any]:
        return [self.value(operand) for operand in op.operands]

    def outputs(self, block: Block) -> list[Any]:
        return [as_array(self.value(operand)) for operand in block.outputs]

    def bind(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        with equation_context(op.eqn), user_context(op.eqn):
            return bind_params(op, operands)

    def retraced(self, traced: TracedFunction) -> TracedFunction:
        """`traced`, whose graph is this one, as it is run here; without dead code."""
        types = [abstract_value(var.aval) for var in traced.jaxpr.jaxpr.invars]
        consts = [as_array(value) for value in traced.jaxpr.consts]
        step = self.graph.blocks[0]
        closed = jax.make_jaxpr(lambda *x: self.run_block(step, (*x, *consts)))(*types)
        return replace(traced, jaxpr=dead_code_eliminated(closed))
