"""Run a graph's operators on one microbatch, while a new function is traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from ..graph.blocks import as_array
from ..graph.op_graph import Block, Constant, Operand, Operator
from ..jax_compat import equation_context, user_context
from ..rules.base import Shard, bind_shard
from ..sharding.spec import MAX, MIN, REPLICATED, SUM
from .joined_batches import JOINED, Part, bind_joint
from .microbatch_flow import Flow
from .retracing import RetracingRunner


@dataclass(frozen=True)
class _MicrobatchShard(Shard):
    """The shard of one microbatch: its index is the loop counter."""

    counter: jax.Array

    def block_index(self, axes: Sequence[int]) -> jax.Array:
        return self.counter if axes else jnp.uint32(0)

    def offset(self, spec: Any, dim: int, local_size: int) -> jax.Array:
        raise AssertionError("a positional factor cannot cut a microbatch")


class MicrobatchRunner(RetracingRunner):
    """Runs blocks on one microbatch; whole values are cut where a reader needs it."""

    def __init__(
        self,
        split: Flow,
        num_microbatches: int,
        whole: Mapping[int, Any],
        counter: jax.Array,
    ) -> None:
        super().__init__(split.graph)
        self.split, self.num_microbatches = split, num_microbatches
        self.whole, self.counter = whole, counter
        self.cut: dict[tuple[int, Part], Any] = {}

    def write(self, tensor: int, value: Any) -> None:
        super().write(tensor, value)
        for key in [key for key in self.cut if key[0] == tensor]:
            del self.cut[key]  # a body runs again: its copies are of another trace

    def read(self, tensor: int, part: Part) -> Any:
        """The tensor as it is, or cut or masked from the whole."""
        is_made_here = tensor in self.values
        has = self.split.state_of(tensor) if is_made_here else REPLICATED
        value = self.values[tensor] if is_made_here else self.whole[tensor]
        state, number = part
        if state == has or state in (MAX, MIN):
            return value
        if (tensor, part) not in self.cut:
            if state == SUM:
                zeros = jnp.zeros_like(value)
                found = jnp.where(self.counter == 0, value, zeros)
            else:
                grain = value.shape[state] // number
                asked = state, self.counter, self.num_microbatches, grain
                found = part_of(value, *asked)
            self.cut[tensor, part] = found
        return self.cut[tensor, part]

    def operands(self, op: Operator) -> list[Any]:
        with user_context(op.eqn):
            return self.read_at("operand", op.index, op.operands)

    def outputs(self, block: Block) -> list[Any]:
        return [*map(as_array, self.read_at("output", block.index, block.outputs))]

    def read_at(
        self, side: Literal["operand", "output"], index: int, read: Sequence[Operand]
    ) -> list[Any]:
        """Operands, or what a block returns, in the parts that the flow says."""
        parts = self.split.read
        return [
            operand.value
            if isinstance(operand, Constant)
            else self.read(operand, parts[side, index, position])
            for position, operand in enumerate(read)
        ]

    def bind(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        factor, number = self.split.factor[op.index], self.num_microbatches
        with equation_context(op.eqn), user_context(op.eqn):
            if factor.name == JOINED:
                return bind_joint(op, operands, factor.operands[0], number)
            shard = _MicrobatchShard.of([factor], [number], self.counter)
            return bind_shard(op, operands, shard)


def part_of(
    whole: jax.Array, dim: int, counter: jax.Array, num_parts: int, grain: int
) -> jax.Array:
    """Microbatch `counter` of an array whose `dim` has `grain` values an example."""
    size = whole.shape[dim] // num_parts
    before, after = whole.shape[:dim], whole.shape[dim + 1 :]
    spread = whole.reshape(*before, size // grain, num_parts, grain, *after)
    part = lax.dynamic_index_in_dim(spread, counter, dim + 1, keepdims=False)
    return part.reshape(*before, size, *after)


def join_parts(parts: jax.Array, dim: int, grain: int) -> jax.Array:
    """The whole of stacked microbatches [M, ...] along `dim` of one of them."""
    num_parts, *shape = parts.shape
    before, size, after = shape[:dim], shape[dim], shape[dim + 1 :]
    spread = parts.reshape(num_parts, *before, size // grain, grain, *after)
    moved = jnp.moveaxis(spread, 0, dim + 1)
    return moved.reshape(*before, size * num_parts, *after)
