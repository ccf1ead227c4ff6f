"""Steps that make several updates a call, each on a batch of its own.

Their batches are what a scan takes slices of, so the examples are a dim of the slices:
the body is a step, which is cut into microbatches, or stages, as any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from ..graph.blocks import as_array
from ..graph.build_graph import SCAN, WHILE
from ..graph.dependencies import made_from
from ..graph.op_graph import Block, Constant, Operand, Operator, OpGraph
from ..graph.traced_function import TracedFunction
from ..graph.work import holds_heavy_work
from ..jax_compat import abstract_value
from ..microbatches.retracing import WholeRunner

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


def loop_of_updates(graph: OpGraph, block: int = 0) -> Operator | None:
    """The loop whose body makes gradients, and does all heavy work of the step."""
    operators = graph.blocks[block].operators
    heavy = [op for op in operators if holds_heavy_work(graph, op)]
    if len(heavy) != 1 or heavy[0].kind not in (SCAN, WHILE):
        return None
    (loop,) = heavy
    is_outside = "transpose(" not in loop.name and "jvp(" not in loop.name
    return loop if is_outside and _holds_gradients(graph, loop) else None


def update_of(graph: OpGraph, loop: Operator) -> TracedFunction:
    """The body of a scan over updates: constants, carries and slices are arguments.

    Raises:
      ValueError: it is another loop, whose batches are no slices.
    """
    num_consts, num_carry = (
        loop.params.get(f"num_{n}", 0) for n in ("consts", "carry")
    )
    ends = num_consts, num_consts + num_carry, len(loop.operands)
    has_slices = ends[1] < ends[2]
    is_of_epochs = loop_of_updates(graph, loop.bodies[-1]) is not None
    if loop.kind != SCAN or not (has_slices or is_of_epochs):
        raise ValueError(
            f"Several updates a call are cut into microbatches if a scan takes their "
            f"batches, but {named(loop)} does not; write it as "
            f"jax.lax.scan(update, state, batches), call the step once an update, or "
            f"leave num_microbatches at 1."
        )
    (body,) = (graph.blocks[index] for index in loop.bodies)
    runner = WholeRunner(graph)
    types = [_struct(graph, tensor) for tensor in body.inputs]
    closed = jax.make_jaxpr(lambda *leaves: runner.run_block(body, leaves))(*types)
    names = [
        graph.tensors[operand].name if isinstance(operand, int) else f"literal {i}"
        for i, operand in enumerate(loop.operands)
    ]
    starts = (0, *ends)
    groups = (range(a, b) for a, b in zip(starts, ends, strict=False))
    results = range(len(body.outputs))
    return TracedFunction(
        f"update of {graph.name}",
        closed,
        jax.tree.structure((tuple(map(tuple, groups)), {})),
        jax.tree.structure((tuple(results[:num_carry]), tuple(results[num_carry:]))),
        tuple(names),
        tuple(f"update {graph.tensors[result].name}" for result in loop.results),
    )


def with_update(
    traced: TracedFunction, graph: OpGraph, loop: Operator, update: TracedFunction
) -> TracedFunction:
    """`traced`, whose graph is `graph`, with another body of its scan over updates."""
    return _UpdateRunner(graph, loop, update).retraced(traced)


def slices_of(graph: OpGraph, loop: Operator, batch: Collection[int]) -> list[int]:
    """Positions of a scan's operands that it slices and that are made of `batch`."""
    made = made_from(batch, graph.blocks[0].operators)
    first = loop.params["num_consts"] + loop.params["num_carry"]
    positions = range(first, len(loop.operands))
    return [i for i in positions if loop.operands[i] in made]


def named(loop: Operator) -> str:
    """The loop as errors call it."""
    return f"the loop of updates {loop.name!r} at {loop.source or 'an unknown line'}"


class _UpdateRunner(WholeRunner):
    def __init__(self, graph: OpGraph, loop: Operator, update: TracedFunction) -> None:
        super().__init__(graph)
        self.loop, self.update = loop, jaxpr_as_fun(update.jaxpr)

    def run_block(self, block: Block, inputs: Sequence[Any]) -> list[Any]:
        is_body = block.index in self.loop.bodies
        return self.update(*inputs) if is_body else super().run_block(block, inputs)


def _holds_gradients(graph: OpGraph, loop: Operator) -> bool:
    blocks = [graph.blocks[body] for body in loop.bodies]
    return any(
        "transpose(" in op.name or _holds_gradients(graph, op)
        for block in blocks
        for op in block.operators
    )


def _struct(graph: OpGraph, tensor: int) -> jax.ShapeDtypeStruct:
    kind = graph.tensors[tensor].type
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


@dataclass(frozen=True)
class Updates:
    """How a call of several updates is one call an update.

    `sliced` are argument leaves that each takes a slice of, `stacked` results that each
    makes one of; `next_leaf` is the result that a leaf becomes, by leaf.
    """

    order: Sequence[int]
    sliced: frozenset[int]
    stacked: frozenset[int]
    next_leaf: Mapping[int, int]

    def run(
        self,
        leaves: Sequence[Any],
        update: Callable[[Sequence[Any]], Sequence[Any]],
    ) -> list[Any]:
        """The results of all updates, one after the other."""
        now, results = list(leaves), list[Any]()
        stacks: dict[int, dict[int, Any]] = {output: {} for output in self.stacked}
        for number in self.order:
            given = [x[number] if i in self.sliced else x for i, x in enumerate(now)]
            results = list(update(given))
            for leaf, output in self.next_leaf.items():
                now[leaf] = results[output]
            for output, found in stacks.items():
                found[number] = results[output]
        for output, found in stacks.items():
            results[output] = jnp.stack([found[i] for i in sorted(found)])
        return results


def one_update(
    call: Call, traced: TracedFunction, graph: OpGraph
) -> tuple[Call, Updates, str] | None:
    """A call of one update for a call of several, and their loop; None if it makes one.

    Raises:
      ValueError: it does something else, too.
    """
    loop, block = loop_of_updates(graph), graph.blocks[0]
    if loop is None:
        return None
    update = update_of(graph, loop)
    first = loop.params["num_consts"]
    last = first + loop.params["num_carry"]
    places: dict[Operand, int] = {t: i for i, t in enumerate(block.inputs)}
    carried, sliced = loop.operands[first:last], loop.operands[last:]
    after, stacked = loop.results[: last - first], loop.results[last - first :]
    outputs = list(block.outputs)
    is_alone = (
        len(block.operators) == 1
        and loop.params["length"] > 0
        and {*carried, *sliced} <= places.keys()
        and {*carried}.isdisjoint(sliced)
        and {*after} <= {*outputs} <= {*after, *stacked, *places} - {*carried, *sliced}
    )
    if not is_alone:
        raise ValueError(
            f"Stages run several updates a call if the step is the scan over them and "
            f"nothing else, and returns what it carries, but there is more than "
            f"{named(loop)}; call the step once an update, or use "
            f"autopar.ShardParallel(), which takes num_microbatches as well."
        )
    fun, run = call[0], jaxpr_as_fun(update.jaxpr)

    @functools.wraps(fun)
    def single(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree.leaves((args, kwargs))
        values: dict[Operand, Any] = {}
        values.update(zip(block.inputs, (*leaves, *traced.jaxpr.consts), strict=True))
        operands = (
            o.value if isinstance(o, Constant) else values[o] for o in loop.operands
        )
        values.update(zip(loop.results, run(*map(as_array, operands)), strict=True))
        return jax.tree.unflatten(traced.out_tree, [values[o] for o in outputs])

    leaves = jax.tree.leaves(call[1:])
    for operand, aval in zip(sliced, update.jaxpr.in_avals[last:], strict=True):
        leaves[places[operand]] = abstract_value(aval)
    args, kwargs = jax.tree.unflatten(traced.in_tree, leaves)
    order = range(loop.params["length"])
    updates = Updates(
        order[::-1] if loop.params["reverse"] else order,
        frozenset(places[operand] for operand in sliced),
        frozenset(
            i for i, o in enumerate(outputs) if o in loop.results[last - first :]
        ),
        {
            places[operand]: outputs.index(result)
            for operand, result in zip(carried, after, strict=True)
        },
    )
    return (single, args, kwargs), updates, named(loop)
