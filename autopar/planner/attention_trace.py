"""A step in which attention is one operator forward and one backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from ..frontend.dead_code import dead_code_eliminated
from ..frontend.tracing import TracedFunction
from ..graph.op_graph import Operator, OpGraph
from ..jax_compat import (
    abstract_value,
    equation_context,
    user_context,
)
from ..lowering.blocks import as_array
from ..microbatches.microbatch_runners import WholeRunner
from ..rules.attention import bind_backward, bind_forward
from .attention_finder import FoundAttention


def with_attention(
    traced: TracedFunction, graph: OpGraph, found: Sequence[FoundAttention]
) -> TracedFunction:
    """`traced`, whose graph is `graph`, with an operator for each attention."""

    def run(*leaves: Any) -> list[Any]:
        return _AttentionRunner(graph, found).run_block(graph.blocks[0], leaves)

    types = [abstract_value(var.aval) for var in traced.jaxpr.jaxpr.invars]
    arrays = [as_array(value) for value in traced.jaxpr.consts]
    closed = jax.make_jaxpr(lambda *leaves: run(*leaves, *arrays))(*types)
    return replace(traced, jaxpr=dead_code_eliminated(closed))


class _AttentionRunner(WholeRunner):
    """Runs a step's operators, but for those that attention takes the place of."""

    def __init__(self, graph: OpGraph, found: Sequence[FoundAttention]) -> None:
        super().__init__(graph)
        self.replaced = frozenset[int]().union(*(each.replaced for each in found))
        self.of_end = {
            end.index: each
            for each in found
            for end in (each.forward_end, *each.backward_ends)
            if end is not None
        }
        self.forward: dict[int, list[Any]] = {}  # by id of the attention
        self.backward: dict[int, list[Any]] = {}

    def run_operators(self, operators: Sequence[Operator]) -> None:
        for op in operators:
            if op.index in self.of_end:
                self.end(op, self.of_end[op.index])
            elif op.index not in self.replaced:
                super().run_operators((op,))

    def end(self, op: Operator, found: FoundAttention) -> None:
        """Makes what `op` made, and with it all that is made at once."""
        with (
            jax.named_scope(self.scope(op)),
            equation_context(op.eqn),
            user_context(op.eqn),
        ):
            if found.forward_end is op:
                self.write(op.results[0], self.made_forward(found)[0])
                return
            number = [each.index for each in found.backward_ends].index(op.index)
            self.write(op.results[0], self.made_backward(found)[number])

    def made_forward(self, found: FoundAttention) -> list[Any]:
        if id(found) not in self.forward:
            q, k, v = (as_array(self.values[t]) for t in (found.q, found.k, found.v))
            sides = self.sides(found)
            made = bind_forward(found.attention, q, k, v, sides)
            self.forward[id(found)] = made
        return self.forward[id(found)]

    def made_backward(self, found: FoundAttention) -> list[Any]:
        if id(found) not in self.backward:
            assert found.d_o is not None
            q, d_o = (as_array(self.values[t]) for t in (found.q, found.d_o))
            forward = self.made_forward(found)
            made = bind_backward(found.attention, forward, q, d_o, self.sides(found))
            self.backward[id(found)] = made
        return self.backward[id(found)]

    def sides(self, found: FoundAttention) -> list[Any]:
        return [as_array(self.values[t]) for t in found.sides]
