"""Run a graph's operators while a new function is traced: whole, or on a microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..frontend.dead_code import dead_code_eliminated
from ..graph.blocks import BlockRunner, as_array
from ..graph.build_graph import PINS, STRUCTURED
from ..graph.op_graph import Block, Constant, Operand, Operator, OpGraph
from ..graph.traced_function import TracedFunction
from ..jax_compat import abstract_value, equation_context, user_context
from ..rules.base import Shard, bind_params, bind_unchanged, rule_of
from ..sharding.mesh import MeshShape
from ..sharding.ports import Site
from ..sharding.spec import MAX, MIN, REPLICATED, SUM, State
from .joined_batches import bind_joint
from .microbatch_flow import Flow, Grain

_AXIS = "microbatch"


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
        split: Flow,
        whole: dict[int, Any],
        counter: jax.Array,
    ) -> None:
        super().__init__(graph)
        self.split, self.whole, self.counter = split, whole, counter
        self.mesh = MeshShape((_AXIS,), (split.num_microbatches,))
        self.cut: dict[tuple[int, State, int], Any] = {}
        self.ports: dict[Site, tuple[State, int]] = {}

    def write(self, tensor: int, value: Any) -> None:
        super().write(tensor, value)
        for key in [key for key in self.cut if key[0] == tensor]:
            del self.cut[key]  # a body runs again: its copies are of another trace

    def read(self, tensor: int, state: State, copies: int = 1) -> Any:
        """The tensor in `state`: as it is, or cut or masked from the whole.

        What is cut holds `copies` of the batch.
        """
        is_made_here = tensor in self.values
        has = self.split.state[tensor] if is_made_here else REPLICATED
        value = self.values[tensor] if is_made_here else self.whole[tensor]
        if state == has:
            return value
        key = (tensor, state, copies)
        if key not in self.cut:
            if state in (MAX, MIN):
                self.cut[key] = value
            elif state == SUM:
                self.cut[key] = jnp.where(
                    self.counter == 0, value, jnp.zeros_like(value)
                )
            else:
                grain = self.split.grain(value.shape[state], copies)
                self.cut[key] = part_of(value, state, self.counter, grain)
        return self.cut[key]

    def operands(self, op: Operator) -> list[Any]:
        if op.kind in STRUCTURED:
            self.ports.update(self.split.read_ports(op))
            sites: list[Site] = [
                ("operand", op.index, i) for i in range(len(op.operands))
            ]
            asked = [self.ports.get(site, (REPLICATED, 1)) for site in sites]
        else:
            states = self.split.factor[op.index].operands
            copies = self.split.copies_read.get(op.index, (1,) * len(states))
            asked = list(zip(states, copies, strict=True))
        with user_context(op.eqn):
            return [
                o.value if isinstance(o, Constant) else self.read(o, *each)
                for o, each in zip(op.operands, asked, strict=True)
            ]

    def outputs(self, block: Block) -> list[Any]:
        return [
            as_array(o.value)
            if isinstance(o, Constant)
            else self.read_at(("output", block.index, position), o)
            for position, o in enumerate(block.outputs)
        ]

    def read_at(self, site: Site, tensor: int) -> Any:
        """The tensor as a port reads it."""
        return self.read(tensor, *self.ports[site])

    def bind(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        factor = self.split.factor[op.index]
        if op.index in self.split.joints:
            with equation_context(op.eqn), user_context(op.eqn):
                return bind_joint(op, operands, factor, self.split.num_microbatches)
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


def part_of(whole: jax.Array, dim: int, counter: jax.Array, grain: Grain) -> jax.Array:
    """Microbatch `counter` of an array along `dim`, which `grain` takes apart."""
    copies, examples, number, values = grain
    before, after = whole.shape[:dim], whole.shape[dim + 1 :]
    spread = whole.reshape(*before, copies * examples, number, values, *after)
    part = lax.dynamic_index_in_dim(spread, counter, dim + 1, keepdims=False)
    return part.reshape(*before, copies * examples * values, *after)


def join_parts(parts: jax.Array, dim: int, grain: Grain) -> jax.Array:
    """The whole of stacked microbatches [M, ...] along `dim` of one of them."""
    copies, examples, num_parts, values = grain
    before, after = parts.shape[1 : dim + 1], parts.shape[dim + 2 :]
    spread = parts.reshape(num_parts, *before, copies * examples, values, *after)
    moved = jnp.moveaxis(spread, 0, dim + 1)
    return moved.reshape(*before, copies * examples * num_parts * values, *after)
