"""Lower a sharding plan to one explicit SPMD function over local shards.

Every operator binds its own primitive on the shards its strategy names; a tensor that
is needed in another spec is converted once, at its first reader, by the planned
collectives. Nothing is left for a partitioner to decide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from ..graph import Block, Constant, Operand, Operator, OpGraph
from ..plan import ShardingPlan
from ..resharding import Resharder
from ..rules.base import Shard, bind_unchanged, factors_of, rule_of
from ..spec import Spec, to_partition_spec
from .collectives import apply_step


def input_shardings(plan: ShardingPlan, mesh: Mesh) -> tuple[NamedSharding, ...]:
    """The home of every graph input."""
    names = plan.mesh.axis_names
    return tuple(
        NamedSharding(mesh, to_partition_spec(i.spec, len(i.shape), names))
        for i in plan.inputs
    )


def output_shardings(
    graph: OpGraph, plan: ShardingPlan, mesh: Mesh
) -> tuple[NamedSharding, ...]:
    """Where every output of the function lies."""
    names = plan.mesh.axis_names
    return tuple(
        NamedSharding(mesh, to_partition_spec(spec, _rank(graph, operand), names))
        for spec, operand in zip(plan.outputs[0], graph.outputs, strict=True)
    )


def spmd_function(
    graph: OpGraph, plan: ShardingPlan, mesh: Mesh, resharder: Resharder
) -> Callable[..., list[Any]]:
    """A traceable function of all graph inputs (global arrays) that runs the plan."""

    def body(*shards: Any) -> tuple[Any, ...]:
        return tuple(_Interpreter(graph, plan, resharder).run(shards))

    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in input_shardings(plan, mesh)),
        out_specs=tuple(s.spec for s in output_shardings(graph, plan, mesh)),
        check_vma=False,
    )


class _Interpreter:
    """Evaluates blocks on local shards; `copies` holds every tensor by spec."""

    def __init__(
        self, graph: OpGraph, plan: ShardingPlan, resharder: Resharder
    ) -> None:
        self.graph, self.plan, self.resharder = graph, plan, resharder
        self.position = {op.index: i for i, op in enumerate(graph.operators())}
        self.copies: dict[int, dict[Spec, Any]] = {}

    def run(self, shards: Sequence[Any]) -> list[Any]:
        return self.run_block(self.graph.blocks[0], shards)

    def run_block(self, block: Block, shards: Sequence[Any]) -> list[Any]:
        for tensor, shard in zip(block.inputs, shards, strict=True):
            self.write(tensor, shard)
        for op in block.operators:
            operands = self.operands(op)
            with jax.named_scope(op.name):
                results = self.execute(op, operands)
            for tensor, result in zip(op.results, results, strict=True):
                self.write(tensor, result)
        specs = self.plan.outputs[block.index]
        return [
            self.read(o, spec) for o, spec in zip(block.outputs, specs, strict=True)
        ]

    def write(self, tensor: int, shard: Any) -> None:
        self.copies[tensor] = {self.plan.tensors[tensor].spec: shard}

    def read(self, operand: Operand, spec: Spec) -> Any:
        if isinstance(operand, Constant):
            return jnp.asarray(operand.value, operand.type.dtype)
        return self.copy(operand, spec)

    def copy(self, tensor: int, spec: Spec) -> Any:
        """The tensor in `spec`, made by its planned conversion if it is not there."""
        copies = self.copies[tensor]
        if spec not in copies:
            plan = self.plan.tensors[tensor]
            source = next(c.source for c in plan.conversions if c.target == spec)
            shard = self.copy(tensor, source)
            with jax.named_scope(f"reshard/{plan.name}"):
                for step in self.resharder.steps(source, spec):
                    shard = apply_step(shard, step, self.plan.mesh)
            copies[spec] = shard
        return copies[spec]

    def operands(self, op: Operator) -> list[Any]:
        specs = self.plan.operators[self.position[op.index]].operand_specs
        return [
            o.value if isinstance(o, Constant) else self.copy(o, spec)
            for o, spec in zip(op.operands, specs, strict=True)
        ]

    def execute(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        match op.kind:
            case "scan":
                return self.scan(op, operands)
            case "while":
                return self.while_loop(op, operands)
            case "cond":
                return self.cond(op, operands)
            case "optimization_barrier":
                return lax.optimization_barrier(tuple(operands))
        plan = self.plan.operators[self.position[op.index]]
        by_name = {factor.name: factor for factor in factors_of(op)}
        shard = Shard(
            self.plan.mesh,
            tuple(by_name[name] for name in plan.factors),
            plan.operand_specs,
            plan.result_specs,
        )
        rule = rule_of(op.kind)
        bind = rule.bind if rule is not None else bind_unchanged
        with op.eqn.ctx.manager:
            return bind(op, operands, shard)

    def scan(self, op: Operator, operands: Sequence[Any]) -> list[Any]:
        body = self.graph.blocks[op.bodies[0]]
        num_consts, num_carry = op.params["num_consts"], op.params["num_carry"]
        arrays = [_as_array(x) for x in operands]
        consts = arrays[:num_consts]
        init = arrays[num_consts : num_consts + num_carry]
        slices = arrays[num_consts + num_carry :]

        def step(carry: list[Any], sliced: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = self.run_block(body, [*consts, *carry, *sliced])
            return outputs[:num_carry], outputs[num_carry:]

        carry, stacked = lax.scan(
            step,
            init,
            slices,
            length=op.params["length"],
            reverse=op.params["reverse"],
            unroll=op.params["unroll"],
        )
        return [*carry, *stacked]

    def while_loop(self, op: Operator, operands: Sequence[Any]) -> list[Any]:
        condition, body = (self.graph.blocks[index] for index in op.bodies)
        num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        arrays = [_as_array(x) for x in operands]
        cond_consts = arrays[:num_cond]
        body_consts = arrays[num_cond : num_cond + num_body]
        return lax.while_loop(
            lambda carry: self.run_block(condition, [*cond_consts, *carry])[0],
            lambda carry: self.run_block(body, [*body_consts, *carry]),
            arrays[num_cond + num_body :],
        )

    def cond(self, op: Operator, operands: Sequence[Any]) -> list[Any]:
        blocks = [self.graph.blocks[index] for index in op.bodies]
        index, *arrays = (_as_array(x) for x in operands)
        branches = [functools.partial(self.run_branch, block) for block in blocks]
        return lax.switch(index, branches, *arrays)

    def run_branch(self, block: Block, *shards: Any) -> list[Any]:
        return self.run_block(block, shards)


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def _rank(graph: OpGraph, operand: Operand) -> int:
    if isinstance(operand, Constant):
        return operand.type.rank
    return graph.tensors[operand].type.rank
