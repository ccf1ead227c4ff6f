"""Cut a traced step into microbatches: the same function, with a loop over them.

The loop is an ordinary scan of the new trace, so planning and lowering need to know
nothing of it: a gradient is a carry that stays pending until the loop ends and is
reduced once a step; what is sliced from the batch was split over devices before it was
cut, and stays where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .build_graph import STRUCTURED
from .graph import Block, Constant, Operand, Operator, OpGraph
from .jax_compat import equation_context, user_context
from .lowering.blocks import BlockRunner, as_array
from .mesh import MeshShape
from .microbatches import MicrobatchSplit, split_microbatches
from .ports import Site
from .rules.base import Shard, bind_params, bind_unchanged, rule_of
from .spec import REPLICATED, SUM, State
from .tracing import TracedFunction

_AXIS = "microbatch"


def cut_into_microbatches(
    traced: TracedFunction, graph: OpGraph, batch: Sequence[int], num_microbatches: int
) -> TracedFunction:
    """`traced` with a loop over `num_microbatches` parts of the `batch` tensors' dim 0.

    `graph` is that of `traced`. Results equal those of the whole batch up to rounding.

    Raises:
      ValueError: the batch size is not divisible.
      BatchCoupledError: cutting the batch would change values.
    """
    split = split_microbatches(graph, batch, num_microbatches)
    if not split.phases.loop:
        return traced

    def step(*leaves: Any) -> list[Any]:
        runner, outermost = WholeRunner(graph), graph.blocks[0]
        runner.values.update(zip(outermost.inputs, leaves, strict=True))
        runner.run_operators(split.phases.before)
        _run_loop(graph, split, runner.values)
        runner.run_operators(split.phases.behind)
        return runner.outputs(outermost)

    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in traced.jaxpr.jaxpr.invars
    ]
    constants = [as_array(value) for value in traced.jaxpr.consts]
    closed = jax.make_jaxpr(lambda *leaves: step(*leaves, *constants))(*types)
    return replace(traced, jaxpr=closed)


class RetracingRunner(BlockRunner):
    """What is traced again keeps its source lines and name scopes."""

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph)
        self.values: dict[int, Any] = {}

    def scope(self, op: Operator) -> str:
        return op.name.rpartition("/")[0]

    def write(self, tensor: int, value: Any) -> None:
        self.values[tensor] = value


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


def leaving_tensors(graph: OpGraph, split: MicrobatchSplit) -> list[int]:
    """What the loop makes that is read behind it, or returned."""
    made = {t for op in split.phases.loop for t in op.results}
    read = [o for op in split.phases.behind for o in op.operands]
    read.extend(graph.blocks[0].outputs)
    return [o for o in dict.fromkeys(read) if isinstance(o, int) and o in made]


def _run_loop(graph: OpGraph, split: MicrobatchSplit, values: dict[int, Any]) -> None:
    """Scan over the microbatches; sums are carried, parts of outputs stacked."""
    leaving = leaving_tensors(graph, split)
    summed = [t for t in leaving if split.state[t] == SUM]
    stacked = [t for t in leaving if split.state[t] != SUM]

    def body(sums: list[Any], counter: Any) -> tuple[list[Any], list[Any]]:
        runner = MicrobatchRunner(graph, split, values, counter)
        runner.run_operators(split.phases.loop)
        added = [
            total + runner.values[tensor]
            for total, tensor in zip(sums, summed, strict=True)
        ]
        return added, [runner.values[tensor] for tensor in stacked]

    types = [graph.tensors[tensor].type for tensor in summed]
    zeros = [jnp.zeros(kind.shape, kind.dtype) for kind in types]
    counters = jnp.arange(split.num_microbatches, dtype=jnp.uint32)
    sums, parts = lax.scan(body, zeros, counters)
    values.update(zip(summed, sums, strict=True))
    for tensor, part in zip(stacked, parts, strict=True):
        values[tensor] = _join(split, part, split.state[tensor])


class _MicrobatchShard(Shard):
    """The shard of one microbatch: its index is the loop counter."""

    counter: Any

    def block_index(self, axes: Sequence[int]) -> jax.Array:
        return self.counter if axes else jnp.uint32(0)

    def offset(self, spec: Any, dim: int, local_size: int) -> jax.Array:
        raise AssertionError("a positional factor cannot cut a microbatch")


class MicrobatchRunner(RetracingRunner):
    """Runs blocks on one microbatch; whole values are cut where a reader needs it."""

    def __init__(
        self,
        graph: OpGraph,
        split: MicrobatchSplit,
        whole: dict[int, Any],
        counter: jax.Array,
    ) -> None:
        super().__init__(graph)
        self.split, self.whole, self.counter = split, whole, counter
        self.mesh = MeshShape((_AXIS,), (split.num_microbatches,))
        self.cut: dict[tuple[int, State], Any] = {}
        self.port_states: dict[Site, State] = {}

    def write(self, tensor: int, value: Any) -> None:
        super().write(tensor, value)
        for key in [key for key in self.cut if key[0] == tensor]:
            del self.cut[key]  # a body runs again: its copies are of another trace

    def read(self, tensor: int, state: State) -> Any:
        """The tensor in `state`: as it is, or cut or masked from the whole."""
        is_made_here = tensor in self.values
        has = self.split.state[tensor] if is_made_here else REPLICATED
        value = self.values[tensor] if is_made_here else self.whole[tensor]
        if state == has:
            return value
        key = (tensor, state)
        if key not in self.cut:
            if state == SUM:
                self.cut[key] = jnp.where(
                    self.counter == 0, value, jnp.zeros_like(value)
                )
            else:
                self.cut[key] = _part(self.split, value, state, self.counter)
        return self.cut[key]

    def operands(self, op: Operator) -> list[Any]:
        if op.kind in STRUCTURED:
            self.port_states.update(self.split.read_states(self.graph, op))
            states = [
                self.port_states.get(("operand", op.index, position), REPLICATED)
                for position in range(len(op.operands))
            ]
        else:
            states = list(self.split.factor[op.index].operands)
        return [
            o.value if isinstance(o, Constant) else self.read(o, state)
            for o, state in zip(op.operands, states, strict=True)
        ]

    def outputs(self, block: Block) -> list[Any]:
        return [
            as_array(o.value)
            if isinstance(o, Constant)
            else self.read(o, self.port_states["output", block.index, position])
            for position, o in enumerate(block.outputs)
        ]

    def bind(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        factor = self.split.factor[op.index]
        shard = _MicrobatchShard(
            self.mesh,
            (factor,),
            tuple((state,) for state in factor.operands),
            tuple((state,) for state in factor.results),
        )
        object.__setattr__(shard, "counter", self.counter)
        rule = rule_of(op)
        bind = rule.bind if rule is not None else bind_unchanged
        with equation_context(op.eqn), user_context(op.eqn):
            return bind(op, operands, shard)


def _grain(split: MicrobatchSplit, size: int) -> tuple[int, int, int]:
    """A cut dim of `size` as [examples of a microbatch, microbatches, values]."""
    examples = split.batch_size // split.num_microbatches
    return examples, split.num_microbatches, size // split.batch_size


def _part(
    split: MicrobatchSplit, whole: jax.Array, dim: int, counter: jax.Array
) -> jax.Array:
    """Microbatch `counter` of an array along `dim`."""
    examples, parts, values = _grain(split, whole.shape[dim])
    before, after = whole.shape[:dim], whole.shape[dim + 1 :]
    spread = whole.reshape(*before, examples, parts, values, *after)
    part = lax.dynamic_index_in_dim(spread, counter, dim + 1, keepdims=False)
    return part.reshape(*before, examples * values, *after)


def _join(split: MicrobatchSplit, parts: jax.Array, dim: int) -> jax.Array:
    """The whole of stacked microbatches [M, ...] along `dim` of one of them."""
    size = parts.shape[dim + 1] * split.num_microbatches
    examples, num_parts, values = _grain(split, size)
    before, after = parts.shape[1 : dim + 1], parts.shape[dim + 2 :]
    spread = parts.reshape(num_parts, *before, examples, values, *after)
    moved = jnp.moveaxis(spread, 0, dim + 1)
    return moved.reshape(*before, size, *after)
