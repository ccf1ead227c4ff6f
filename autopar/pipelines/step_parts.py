"""The three functions that a pipelined step is made of, each traced for itself.

prepare    once a step, from the batch: what a microbatch cannot know (token counts,
           examples mixed with each other)
microbatch forward and backward of one microbatch: sums of gradients and losses
apply      once a step: the optimizer, from the sums over all microbatches

A guarded update (skip the step where gradients overflow) is one conditional on all
parameters, and matrices that are orthogonalised together are carried by one loop, which
no stage has. Their bodies rarely mix arrays: what belongs together becomes a
conditional or a loop of its own, on the stage that has it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import networkx

from ..frontend.dead_code import dead_code_eliminated
from ..graph.blocks import as_array
from ..graph.build_graph import COND, SCAN, WHILE, build_graph
from ..graph.dependencies import leading_to, made_from, read_by, tensors_of
from ..graph.op_graph import GraphInput, Operand, Operator, OpGraph, TensorType
from ..graph.traced_function import Roles, TracedFunction
from ..jax_compat import (
    ClosedJaxpr,
    DropVar,
    with_eqns,
    with_jaxpr,
    with_jaxprs,
    with_scan_counts,
)
from ..microbatches.microbatches import MicrobatchedStep
from ..microbatches.retracing import WholeRunner
from ..sharding.spec import State

COUNTER = "microbatch"


@dataclass(frozen=True, eq=False)
class StepParts:
    """Graphs of the parts of a step; names of their inputs and outputs are slots.

    `held` are the leaves that live on stages, closed-over arrays among them, `batch`
    those cut into microbatches, `prepared` what the prepare function makes of the whole
    batch and of what else is among `preparing`, its arguments. A microbatch returns
    `sums`, reduced as their states say, and parts of the outputs that have a value for
    each example: `joined` has slot, dim and grain of each, by output path. `fed`
    outputs are batch leaves as they came; the others are made by apply, or passed on.
    """

    step: MicrobatchedStep
    prepare: ClosedJaxpr
    microbatch: OpGraph
    apply: OpGraph
    held: tuple[str, ...]
    batch: tuple[str, ...]
    prepared: tuple[str, ...]
    sums: Mapping[str, State]
    joined: Mapping[str, tuple[str, int, int]]
    fed: Mapping[str, str]
    preparing: tuple[str, ...] = ()


def trace_parts(step: MicrobatchedStep, in_place: bool = False) -> StepParts:
    """Trace the parts of a step that was cut into microbatches.

    The update is the step's own operators and tensors, unless it is divided. With
    `in_place`, so is the microbatch, of the whole batch: enough to cut it, and quick.

    Raises:
      NotImplementedError: the step needs values of all examples behind the loop.
    """
    graph = step.graph
    batch = list(step.batch)
    held = [i.tensor for i in graph.inputs if i.tensor not in step.batch]
    phases = step.phases
    made_of_batch = made_from(batch, phases.before).difference(batch)
    of_batch = [op for op in phases.before if not made_of_batch.isdisjoint(op.results)]
    of_held = [op for op in phases.before if made_of_batch.isdisjoint(op.results)]
    for_batch = leading_to(read_by(of_batch), of_held)
    needed = {*read_by(for_batch), *read_by(of_batch)}
    preparing = [*batch, *(t for t in held if t in needed)]
    names = {t.index: t.name for t in graph.tensors}
    inside = [*of_held, *phases.loop, *phases.behind]
    read = [*read_by(inside), *tensors_of(graph.outputs)]
    prepared = [t for t in dict.fromkeys(read) if t in made_of_batch]
    sums = [each.tensor for each in step.reduced]
    _check_behind(step, prepared)

    def prepare(*leaves: Any) -> list[Any]:
        runner = WholeRunner(graph)
        runner.values.update(zip(preparing, leaves, strict=True))
        runner.run_operators([*for_batch, *of_batch])
        return [jnp.asarray(runner.values[t]) for t in prepared]

    def microbatch(*leaves: Any) -> list[Any]:
        *rest, counter = leaves
        values = dict(zip([*held, *batch, *prepared], rest, strict=True))
        whole = {t: values[t] for t in (*held, *prepared)}
        cut = {t: values[t] for t in batch}
        reduced, joined = step.run_part(whole, cut, counter, of_held)
        return [*reduced, *joined]

    parts = {each.tensor: f"part of {names[each.tensor]}" for each in step.joined}
    outputs = list(zip(graph.output_paths, graph.outputs, strict=True))
    elsewhere = {*parts, *batch}
    applied = [(path, operand) for path, operand in outputs if operand not in elsewhere]

    def apply(*leaves: Any) -> list[Any]:
        runner = WholeRunner(graph)
        runner.values.update(zip([*held, *prepared, *sums], leaves, strict=True))
        runner.run_operators([*of_held, *phases.behind])
        return [as_array(runner.value(operand)) for _, operand in applied]

    types = {t.index: _struct(t.type) for t in graph.tensors}
    taken = [
        *(types[t] for t in held),
        *(step.part_types[t] for t in batch),
        *(types[t] for t in prepared),
        jax.ShapeDtypeStruct((), jnp.uint32),
    ]
    sum_names = [f"sum of {names[t]}" for t in sums]
    prepared_names = [f"prepared {names[t]}" for t in prepared]
    taken_names = [*(names[t] for t in (*held, *batch)), *prepared_names]
    given = [types[t] for t in (*held, *prepared, *sums)]
    given_names = [*(names[t] for t in held), *prepared_names, *sum_names]
    made_names = [*sum_names, *parts.values()]
    applied_paths = [path for path, _ in applied]
    if in_place:
        of_microbatch = _part_of(
            graph,
            [*of_held, *phases.loop],
            dict(zip([*held, *batch, *prepared], taken_names, strict=True)),
            dict(zip(made_names, (*sums, *parts), strict=True)),
        )
    else:
        of_microbatch = graph_of(microbatch, taken, [*taken_names, COUNTER], made_names)
    if not any(op.kind in DIVIDED for op in phases.behind):
        of_apply = _part_of(
            graph,
            [*of_held, *phases.behind],
            dict(zip([*held, *prepared, *sums], given_names, strict=True)),
            dict(applied),
        )
    else:
        of_apply = graph_of(apply, given, given_names, applied_paths, is_update=True)
    return StepParts(
        step=step,
        prepare=dead_code_eliminated(
            jax.make_jaxpr(prepare)(*(types[t] for t in preparing))
        ),
        microbatch=of_microbatch,
        apply=of_apply,
        held=tuple(names[t] for t in held),
        batch=tuple(names[t] for t in batch),
        prepared=tuple(prepared_names),
        sums=dict(zip(sum_names, (e.state for e in step.reduced), strict=True)),
        joined={
            path: (parts[each.tensor], each.state, each.grain)
            for path, operand in outputs
            for each in step.joined
            if each.tensor == operand
        },
        fed={
            path: names[t] for path, t in outputs if isinstance(t, int) and t in batch
        },
        preparing=tuple(names[t] for t in preparing),
    )


def _check_behind(step: MicrobatchedStep, prepared: Sequence[int]) -> None:
    """Refuse work behind the loop on all examples: they lie on several stages."""
    examples = {*step.batch, *(each.tensor for each in step.joined)}
    for op in step.phases.behind:
        read = examples.intersection(tensors_of(op.operands)).difference(prepared)
        if read:
            name = step.graph.tensors[min(read)].name
            raise NotImplementedError(
                f"A pipelined step may return values for each example, but not compute "
                f"with those of all microbatches, as {op.name!r} at "
                f"{op.source or 'an unknown line'} does with {name}; compute it out "
                f"of the step, from values that it returns, or use "
                f"autopar.ShardParallel(num_microbatches={step.num_microbatches}), or "
                f'microbatch_semantics="independent", where only examples of one '
                f"microbatch meet."
            )


def _part_of(
    graph: OpGraph,
    operators: Sequence[Operator],
    inputs: Mapping[int, str],
    outputs: Mapping[str, Operand],
) -> OpGraph:
    """A graph of those operators that make its outputs; tensors are as they were."""
    tensors = list(graph.tensors)
    for tensor, name in inputs.items():
        tensors[tensor] = replace(tensors[tensor], name=name)
    block = replace(
        graph.blocks[0],
        inputs=tuple(inputs),
        outputs=tuple(outputs.values()),
        operators=leading_to(tensors_of(outputs.values()), operators),
    )
    return replace(
        graph,
        tensors=tuple(tensors),
        blocks=(block, *graph.blocks[1:]),
        inputs=tuple(GraphInput(t, name, "other") for t, name in inputs.items()),
        output_paths=tuple(outputs),
    )


def graph_of(
    fun: Any,
    types: Sequence[jax.ShapeDtypeStruct],
    input_names: Sequence[str],
    output_names: Sequence[str],
    next_output: Sequence[int | None] | None = None,
    is_update: bool = False,
) -> OpGraph:
    """The graph of a function of flat arrays; `next_output` ties inputs to outputs.

    What it closes over are literals of what it is traced from: nothing feeds them. The
    conditionals and loops of an update are divided by the arrays updated together.
    """
    closed = dead_code_eliminated(jax.make_jaxpr(fun)(*types))
    closed = with_divided_branches(closed) if is_update else closed
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
    return build_graph(traced, roles, has_literals=True)


def _struct(kind: TensorType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)


DIVIDED = (COND, SCAN, WHILE)


def with_divided_branches(closed: Any) -> Any:
    """The same jaxpr, its conditionals and loops divided where their bodies allow it.

    Work on scalars (a step count, a rate) is done in each that reads it.
    """
    return with_jaxpr(closed, _with_divided)


def _with_divided(jaxpr: Any) -> Any:
    return with_eqns(jaxpr, [new for eqn in jaxpr.eqns for new in _divided(eqn)])


def _divided(eqn: Any) -> Iterator[Any]:
    if eqn.primitive.name not in DIVIDED or eqn.effects:
        yield eqn
        return
    eqn = with_jaxprs(eqn, _with_divided)
    groups = _groups(eqn)
    if len(groups) < 2:
        yield eqn
        return
    for group in groups:
        outvars = [
            v if output in group else DropVar(v.aval)
            for output, v in enumerate(eqn.outvars)
        ]
        yield from _made_alone(eqn.replace(outvars=outvars))


def _made_alone(eqn: Any) -> Sequence[Any]:
    """The equation without what the results that it drops need."""
    read = dict.fromkeys(v for v in eqn.invars if not hasattr(v, "val"))
    made = [v for v in eqn.outvars if not isinstance(v, DropVar)]
    template = next(iter(_bodies(eqn)))[0]
    alone = template.replace(
        constvars=[],
        invars=list(read),
        outvars=made,
        eqns=[eqn],
        debug_info=template.debug_info.with_unknown_names(),
    )
    return dead_code_eliminated(ClosedJaxpr(alone, ())).jaxpr.eqns


def _groups(eqn: Any) -> list[set[int]]:
    """Results that some body makes of the same arrays; a scalar is by itself."""
    together = networkx.utils.UnionFind(range(len(eqn.outvars)))
    for jaxpr, names in _bodies(eqn):
        ids = map(id, jaxpr.invars)
        place: dict[int, Hashable] = dict(zip(ids, names, strict=True))
        literals = {id(v) for v in jaxpr.constvars}
        for inner in jaxpr.eqns:
            _unite(
                together,
                [
                    place.get(id(v), ("value", id(v)))
                    for v in _arrays(inner.invars, inner.outvars)
                    if id(v) not in literals
                ],
            )
        for output, v in enumerate(jaxpr.outvars):
            met = (place.get(id(v), ("value", id(v))) for v in _arrays([v]))
            _unite(together, [output, *met])
    groups: dict[Any, set[int]] = {}
    for output in range(len(eqn.outvars)):
        groups.setdefault(together[output], set()).add(output)
    return list(groups.values())


def _bodies(eqn: Any) -> Iterator[tuple[Any, Sequence[Hashable]]]:
    """Each body that makes the results, and what its inputs are.

    That is the number of a result, which a carry becomes, or an operand's name.
    """
    params = eqn.params
    if eqn.primitive.name == COND:
        for branch in params["branches"]:
            yield branch.jaxpr, _operands(branch.jaxpr)
        return
    if eqn.primitive.name == SCAN:
        counts, body = with_scan_counts(params), params["jaxpr"].jaxpr
        first, number = counts["num_consts"], counts["num_carry"]
    else:
        body, first = params["body_jaxpr"].jaxpr, params["body_nconsts"]
        number = len(eqn.outvars)
    names = _operands(body)
    names[first : first + number] = range(number)
    yield body, names


def _operands(jaxpr: Any) -> list[Hashable]:
    return [("operand", position) for position in range(len(jaxpr.invars))]


def _unite(together: Any, members: Sequence[object]) -> None:
    if members:
        together.union(*members)


def _arrays(*variables: Sequence[Any]) -> list[Any]:
    """Those that are neither literals nor scalars."""
    return [
        v for vs in variables for v in vs if not hasattr(v, "val") and v.aval.size > 1
    ]
