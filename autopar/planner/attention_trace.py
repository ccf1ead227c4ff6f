"""A step in which attention is one operator forward and one backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from ..attention.finder import FoundAttention, find_attention
from ..attention.fused_attention import why_not_fused
from ..attention.rule import bind_backward, bind_forward
from ..costs.memory import family_of
from ..errors import FallbackWarning
from ..frontend.tracing import trace
from ..graph.blocks import as_array
from ..graph.build_graph import build_graph
from ..graph.op_graph import Operator, OpGraph
from ..graph.traced_function import TracedFunction
from ..jax_compat import equation_context, user_context
from ..microbatches.retracing import WholeRunner
from .whole_step import roles_of


def with_attention(
    traced: TracedFunction, graph: OpGraph, found: Sequence[FoundAttention]
) -> TracedFunction:
    """`traced`, whose graph is `graph`, with an operator for each attention."""
    return _AttentionRunner(graph, found).retraced(traced)


def with_fused_attention(fun: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """`fun`, whose attention is one kernel where devices of this `kind` have one.

    What is no such attention stays as it is, with a warning.
    """

    @wraps(fun)
    def fused(*args: Any, **kwargs: Any) -> Any:
        traced = trace(fun, args, kwargs)
        graph = build_graph(traced, roles_of(traced))
        found, refused = find_attention(traced, graph)
        able = []
        for each in found:
            types = [graph.tensors[t].type for t in (each.q, each.k, each.v)]
            shapes, dtypes = [t.shape for t in types], [t.dtype.name for t in types]
            family = family_of(kind)
            why = why_not_fused(each.attention, shapes, dtypes, family)
            if why:
                _warn_as_written(each.source, why)
            else:
                attention = replace(each.attention, is_fused=True)
                able.append(replace(each, attention=attention))
        for op, why in refused:
            _warn_as_written(op.source, why)
        closed = with_attention(traced, graph, able).jaxpr if able else traced.jaxpr
        leaves = jax.tree.leaves((args, kwargs))
        return jax.tree.unflatten(traced.out_tree, jaxpr_as_fun(closed)(*leaves))

    return fused


def _warn_as_written(source: str, why: str) -> None:
    warnings.warn(
        f"Attention stays as it is written, and its scores in memory, at {source}: "
        f"{why}.",
        FallbackWarning,
        stacklevel=2,
    )


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
            *operands, d_o = (
                as_array(self.values[t]) for t in (found.q, found.k, found.v, found.d_o)
            )
            given = self.made_forward(found), operands, d_o, self.sides(found)
            self.backward[id(found)] = bind_backward(found.attention, *given)
        return self.backward[id(found)]

    def sides(self, found: FoundAttention) -> list[Any]:
        return [as_array(self.values[t]) for t in found.sides]
