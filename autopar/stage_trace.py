"""The three functions that a pipelined step is made of, each traced for itself.

prepare    once a step, from the batch: what a microbatch cannot know (token counts)
microbatch forward and backward of one microbatch: sums of gradients and losses
apply      once a step: the optimizer, from the sums over all microbatches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .build_graph import build_graph
from .graph import Operator, OpGraph, TensorType
from .jax_compat import ClosedJaxpr, dead_code_eliminated
from .microbatch_flow import tensors_of
from .microbatch_loop import MicrobatchRunner, WholeRunner, leaving_tensors
from .microbatches import MicrobatchSplit
from .roles import Roles
from .spec import SUM
from .tracing import TracedFunction

COUNTER = "microbatch"


@dataclass(frozen=True, eq=False)
class StepParts:
    """Graphs of the parts of a step; names of their inputs and outputs are slots.

    `held` are the leaves that live on stages, `batch` those cut into microbatches,
    `prepared` what the prepare function makes of the whole batch. `sums` are what a
    microbatch adds up; `outputs` the step's own, made by apply or passed through.
    """

    prepare: ClosedJaxpr
    microbatch: OpGraph
    apply: OpGraph
    held: tuple[str, ...]
    batch: tuple[str, ...]
    prepared: tuple[str, ...]
    sums: tuple[str, ...]


def trace_parts(
    traced: TracedFunction, graph: OpGraph, split: MicrobatchSplit
) -> StepParts:
    """Trace the parts of a step that was split along its batch.

    Raises:
      NotImplementedError: the step returns a value for each example, or closes over
        arrays, or needs parameters and the whole batch together before the loop.
    """
    if traced.jaxpr.consts:
        raise NotImplementedError(
            "A pipelined step may not close over arrays for now; pass them as "
            "arguments."
        )
    held = [i.tensor for i in graph.inputs if split.state[i.tensor] < 0]
    batch = [i.tensor for i in graph.inputs if split.state[i.tensor] >= 0]
    of_batch, of_held = _dependencies(split.phases.before, batch)
    names = {t.index: t.name for t in graph.tensors}
    made_of_batch = {t for op in of_batch for t in op.results}
    inside = [*of_held, *split.phases.loop, *split.phases.behind]
    read = dict.fromkeys(t for op in inside for t in tensors_of(op.operands))
    prepared = [t for t in read if t in made_of_batch]
    sums = leaving_tensors(graph, split)
    for tensor in sums:
        if split.state[tensor] != SUM:
            raise NotImplementedError(
                f"A pipelined step may only return sums over the batch for now, but "
                f"{names[tensor]} has a value for each example; leave it out."
            )

    def prepare(*leaves: Any) -> list[Any]:
        runner = WholeRunner(graph)
        runner.values.update(zip(batch, leaves, strict=True))
        generators = [op for op in of_held if not tensors_of(op.operands)]
        runner.run_operators([*generators, *of_batch])
        return [jnp.asarray(runner.values[t]) for t in prepared]

    def microbatch(*leaves: Any) -> list[Any]:
        *rest, counter = leaves
        values = dict(zip([*held, *batch, *prepared], rest, strict=True))
        whole = {t: values[t] for t in (*held, *prepared)}
        runner = MicrobatchRunner(graph, split, whole, counter)
        runner.values.update({t: values[t] for t in batch})
        runner.run_operators([*of_held, *split.phases.loop])
        return [runner.values[t] for t in sums]

    def apply(*leaves: Any) -> list[Any]:
        runner = WholeRunner(graph)
        runner.values.update(zip([*held, *prepared, *sums], leaves, strict=True))
        runner.run_operators([*of_held, *split.phases.behind])
        return runner.outputs(graph.blocks[0])

    types = {t.index: _struct(t.type) for t in graph.tensors}
    parts = {
        t: jax.ShapeDtypeStruct(
            (types[t].shape[0] // split.num_microbatches, *types[t].shape[1:]),
            types[t].dtype,
        )
        for t in batch
    }
    counter = jax.ShapeDtypeStruct((), jnp.uint32)
    taken = [
        *(types[t] for t in held),
        *(parts[t] for t in batch),
        *(types[t] for t in prepared),
        counter,
    ]
    sum_names = [f"sum of {names[t]}" for t in sums]
    taken_names = [names[t] for t in (*held, *batch, *prepared)]
    given = [types[t] for t in (*held, *prepared, *sums)]
    given_names = [*(names[t] for t in (*held, *prepared)), *sum_names]
    return StepParts(
        prepare=dead_code_eliminated(
            jax.make_jaxpr(prepare)(*(types[t] for t in batch))
        ),
        microbatch=graph_of(microbatch, taken, [*taken_names, COUNTER], sum_names),
        apply=graph_of(apply, given, given_names, traced.output_paths),
        held=tuple(names[t] for t in held),
        batch=tuple(names[t] for t in batch),
        prepared=tuple(names[t] for t in prepared),
        sums=tuple(sum_names),
    )


def graph_of(
    fun: Any,
    types: Sequence[jax.ShapeDtypeStruct],
    input_names: Sequence[str],
    output_names: Sequence[str],
    next_output: Sequence[int | None] | None = None,
) -> OpGraph:
    """The graph of a function of flat arrays; `next_output` ties inputs to outputs."""
    closed = dead_code_eliminated(jax.make_jaxpr(fun)(*types))
    ties = tuple(next_output or [None] * len(types))
    trees = jax.tree.structure(((0,) * len(types), {}))
    traced = TracedFunction(
        fun.__name__,
        closed,
        trees,
        jax.tree.structure((0,) * len(output_names)),
        tuple(input_names),
        tuple(output_names),
    )
    roles = Roles(tuple("other" if tie is None else "state" for tie in ties), ties, ())
    return build_graph(traced, roles)


def _dependencies(
    before: Sequence[Operator], batch: Sequence[int]
) -> tuple[list[Operator], list[Operator]]:
    """Operators before the loop that read the batch, and those that do not."""
    of_batch: list[Operator] = []
    of_held: list[Operator] = []
    from_batch = set(batch)
    for op in before:
        if from_batch.isdisjoint(tensors_of(op.operands)):
            of_held.append(op)
        else:
            of_batch.append(op)
            from_batch.update(op.results)
    made_of_held = {t: op for op in of_held for t in op.results}
    for op in of_batch:
        makers = [made_of_held.get(t) for t in tensors_of(op.operands)]
        if any(maker and tensors_of(maker.operands) for maker in makers):
            raise NotImplementedError(
                f"What is computed once from the whole batch may not read parameters "
                f"for now, but {op.name!r} at {op.source} does."
            )
    return of_batch, of_held


def _struct(kind: TensorType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)
