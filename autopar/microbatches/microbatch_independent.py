"""Microbatches that are batches of their own: what `"independent"` means, exactly.

The step is traced again for one microbatch, with its shapes, so that everything which
looks at the whole batch (BatchNorm's statistics, the capacity of experts, the negatives
of a contrastive loss) looks at the microbatch. Its work falls into two parts:

    in the loop  all that reads the batch, forward and backward, and what comes before
    behind it    the update: what is made of gradients, and not to be differentiated

What crosses from one to the other, or is returned, becomes one value of the step:

    floats       the mean over the microbatches: losses, gradients, statistics
    integers     their sum: they are counts
    maxima       of examples, as minima: the maximum over the microbatches
    per example  joined in the order of the batch: logits, predictions

So gradients are those of the mean of the microbatches' losses, and the update is done
once. Random keys are the same in every microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp

from ..frontend.tracing import trace
from ..graph.build_graph import build_graph, tensor_type
from ..graph.dependencies import made_from, read_by, tensors_of, updates_of
from ..graph.op_graph import Operator, OpGraph
from ..graph.traced_function import Roles, TracedFunction
from ..option_values import MicrobatchSemantics
from ..sharding.spec import MAX, MIN, SUM, State
from .example_flow import ExampleFlow
from .microbatch_flow import Phases
from .microbatches import (
    BatchCoupledError,
    Leaving,
    MicrobatchedStep,
    batch_size_of,
    exact_step,
    leaving_tensors,
)

_DIFFERENTIATED = ("jvp(", "transpose(")  # name scopes that jax.grad leaves


def microbatched(
    trace_part: Callable[[], TracedFunction],
    graph: OpGraph,
    roles: Roles,
    batch: Sequence[int],
    num_microbatches: int,
    semantics: MicrobatchSemantics,
    *,
    sums_stay_apart: bool = False,
) -> MicrobatchedStep:
    """The step of `graph` in microbatches of its `batch` inputs.

    `trace_part` traces it for one microbatch, where that is a batch of its own. With
    `sums_stay_apart`, sums are not added to each other in the loop: the two gradients
    of a tied parameter may belong to different stages.

    Raises:
      ValueError: the batch size is not divisible.
      BatchCoupledError: the step cannot be cut so.
    """
    if semantics == "exact":
        return exact_step(
            graph, batch, num_microbatches, sums_stay_apart=sums_stay_apart
        )
    batch_size_of(graph, batch, num_microbatches)
    part = build_graph(trace_part(), roles)
    varying = _varying(graph, part, num_microbatches)
    whole = ExampleFlow.of(graph, batch)
    extremes = _extremes(part, whole, varying)
    flow = _Flow(part, batch, frozenset(varying), frozenset(extremes), sums_stay_apart)
    _check_updates(flow, roles)
    phases = flow.phases
    reduced, joined = list[Leaving](), list[Leaving]()
    for tensor in leaving_tensors(part, phases):
        if tensor in varying:
            joined.append(_joined_parts(part, whole, tensor, num_microbatches))
        else:
            reduced.append(Leaving(tensor, extremes.get(tensor, SUM)))
            if num_microbatches > 1 and tensor not in extremes:
                _check_combined(part, tensor, roles)
    read_behind = {*read_by(phases.behind)}
    assert read_behind.isdisjoint(each.tensor for each in joined)
    return MicrobatchedStep(
        part, tuple(batch), num_microbatches, phases, tuple(reduced), tuple(joined)
    )


def _check_combined(part: OpGraph, tensor: int, roles: Roles) -> None:
    """Refuse a value that is neither a mean nor a count."""
    found, dtype = part.tensors[tensor], part.tensors[tensor].type.dtype
    updated = {part.outputs[o] for o in roles.next_output if o is not None}
    is_count = jnp.issubdtype(dtype, jnp.number) and tensor not in updated
    if not is_count and not jnp.issubdtype(dtype, jnp.inexact):
        raise NotImplementedError(
            f"Values of independent microbatches become one by the mean of floats or "
            f"the sum of counts, but {found.name!r} is {found.type}; return a number "
            f"instead, write a count in the state as the old count + that of the "
            f"batch, or compute it from the gradients."
        )


def trace_microbatch(
    fun: Callable[..., Any],
    traced: TracedFunction,
    graph: OpGraph,
    batch: Sequence[int],
    num_microbatches: int,
) -> TracedFunction:
    """`fun` traced for one microbatch of the `batch` inputs of its `graph`.

    Raises:
      BatchCoupledError: other arrays are closed over for the smaller batch.
      Exception: whatever `fun` raises, with a note.
    """
    leaves = []
    for var, each in zip(traced.jaxpr.jaxpr.invars, graph.inputs, strict=False):
        shape, weak = tuple(var.aval.shape), var.aval.weak_type
        if each.tensor in batch:
            shape = (shape[0] // num_microbatches, *shape[1:])
        leaves.append(jax.ShapeDtypeStruct(shape, var.aval.dtype, weak_type=weak))
    args, kwargs = jax.tree.unflatten(traced.in_tree, leaves)
    try:
        part = trace(fun, args, kwargs)
    except Exception as error:
        error.add_note(
            f"The step was traced for one of {num_microbatches} independent "
            f"microbatches; it must work for a batch of that size."
        )
        raise
    constants = [tensor_type(var.aval) for var in traced.jaxpr.jaxpr.constvars]
    if [tensor_type(var.aval) for var in part.jaxpr.jaxpr.constvars] != constants:
        raise BatchCoupledError(
            "A step must close over the same arrays for every size of batch, but it "
            "does not for one microbatch; pass them as arguments."
        )
    return part


def _varying(whole: OpGraph, part: OpGraph, num_microbatches: int) -> set[int]:
    """Tensors whose shape depends on the number of examples."""
    of_whole, of_part = whole.operators(), part.operators()
    if [*map(_form, of_whole)] == [*map(_form, of_part)]:
        pairs = zip(whole.tensors, part.tensors, strict=True)
        return {a.index for a, b in pairs if a.type != b.type}
    pairs = zip_longest(of_whole, of_part)
    a, b = next((a, b) for a, b in pairs if not (a and b) or _form(a) != _form(b))
    at = a or b
    assert at is not None
    raise BatchCoupledError(
        f"A step must be the same program for the batch and for one of "
        f"{num_microbatches} independent microbatches, but they differ from "
        f"{at.name!r} at {at.source or 'an unknown line'} on; use fewer microbatches "
        f"(a batch of one example is often a case of its own)."
    )


_OVER_EXAMPLES = {
    **dict.fromkeys(("reduce_max", "reduce_or", "scatter-max"), MAX),
    **dict.fromkeys(("reduce_min", "reduce_and", "scatter-min"), MIN),
}


def _extremes(part: OpGraph, whole: ExampleFlow, varying: Set[int]) -> dict[int, State]:
    """Maxima and minima over examples, those that are only moved among them.

    Where examples meet each other, `whole` knows nothing of them, but shapes do.
    """
    found = {t: state for t, state in whole.reduced.items() if state in (MAX, MIN)}
    for op in part.operators():
        if op.kind in _OVER_EXAMPLES and not varying.isdisjoint(
            tensors_of(op.operands)
        ):
            found.update(dict.fromkeys(op.results, _OVER_EXAMPLES[op.kind]))
    return {t: state for t, state in found.items() if t not in varying}


def _form(op: Operator) -> tuple[Any, ...]:
    """What two operators of equal programs share, whatever their shapes."""
    return op.kind, op.results, tuple(o for o in op.operands if isinstance(o, int))


def _joined_parts(
    part: OpGraph, whole: ExampleFlow, tensor: int, num_microbatches: int
) -> Leaving:
    """The one dim of a tensor along which its parts make up the whole batch's."""
    small = part.tensors[tensor].type.shape
    large = whole.graph.tensors[tensor].type.shape
    dims = [
        d for d, pair in enumerate(zip(small, large, strict=True)) if len({*pair}) > 1
    ]
    if len(dims) == 1 and small[dims[0]] * num_microbatches == large[dims[0]]:
        (dim,), (state, number) = dims, whole.part[tensor]
        if state == dim:
            return Leaving(tensor, dim, large[dim] // number)
        if large[dim] == whole.batch_size:
            return Leaving(tensor, dim)
    raise BatchCoupledError(
        f"A step of independent microbatches may return one value for the batch or one "
        f"for each example, but {part.tensors[tensor].name!r} is {list(small)} for a "
        f"microbatch and {list(large)} for the batch; leave it out of the results."
    )


@dataclass(frozen=True)
class _Flow:
    """What of a microbatch's graph reads the batch, and what is done with gradients."""

    graph: OpGraph
    batch: Sequence[int]
    varying: frozenset[int]
    extremes: frozenset[int]
    sums_stay_apart: bool

    @cached_property
    def of_batch(self) -> set[int]:
        """Tensors that depend on the batch."""
        return made_from(self.batch, self.graph.blocks[0].operators)

    @cached_property
    def updates(self) -> frozenset[int]:
        """Operators on gradients, by index."""
        return updates_of(self.graph.blocks[0].operators)

    @property
    def phases(self) -> Phases:
        return Phases.of(
            self.graph.blocks[0].operators,
            lambda op: not self.of_batch.isdisjoint(op.results),
            self.is_update,
        )

    def is_update(self, op: Operator) -> bool:
        """Whether an operator that the loop does not need may run on the means."""
        reads = tensors_of(op.operands)
        if not self.varying.isdisjoint([*reads, *op.results]):
            return False
        if op.kind in ("add", "add_any"):
            # A count is added to once, and a tied parameter's gradients belong to
            # different stages.
            if self.sums_stay_apart or not self.of_batch.issuperset(reads):
                return True
        if any(scope in op.name for scope in _DIFFERENTIATED):
            return False
        return op.index in self.updates or not self.extremes.isdisjoint(reads)


def _check_updates(flow: _Flow, roles: Roles) -> None:
    """Refuse a state whose next value the rules above would get wrong."""
    if flow.updates:
        return
    graph = flow.graph
    for each, output in zip(graph.inputs, roles.next_output, strict=False):
        operand = None if output is None else graph.outputs[output]
        if operand in flow.of_batch - flow.extremes:
            raise ValueError(
                f"Independent microbatches need gradients that jax.grad (or vjp) made, "
                f"to tell the update from what is averaged, but {each.path} is updated "
                f"without any; compute them with jax.value_and_grad, or leave "
                f"num_microbatches at 1."
            )
