"""Lower a sharding plan to one explicit SPMD function over local shards.

Every operator binds its own primitive on the shards its strategy names; a tensor that
is needed in another spec is converted once, at its first reader, by the planned
collectives. Nothing is left for a partitioner to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh

from ..costs.resharding import Resharder
from ..graph.blocks import BlockRunner
from ..graph.op_graph import Block, Constant, Operand, Operator, OpGraph
from ..graph.paired_operators import companions
from ..jax_compat import NO_MESH, equation_context
from ..plans.plan import ShardingPlan
from ..rules.base import Shard, bind_shard, factors_of
from ..rules.host_calls import HostCalls
from ..sharding.spec import Spec
from .collectives import apply_step
from .partial_sums import as_held, held_spec, part_of


def input_shardings(
    plan: ShardingPlan, mesh: Mesh | AbstractMesh
) -> tuple[NamedSharding, ...]:
    """The home of every graph input."""
    names = plan.mesh.axis_names
    return tuple(
        NamedSharding(mesh, held_spec(i.spec, len(i.shape), names)) for i in plan.inputs
    )


def output_shardings(
    graph: OpGraph, plan: ShardingPlan, mesh: Mesh | AbstractMesh
) -> tuple[NamedSharding, ...]:
    """Where every output of the function lies."""
    names = plan.mesh.axis_names
    return tuple(
        NamedSharding(mesh, held_spec(spec, _rank(graph, operand), names))
        for spec, operand in zip(plan.outputs[0], graph.outputs, strict=True)
    )


def spmd_function(
    graph: OpGraph,
    plan: ShardingPlan,
    mesh: Mesh | AbstractMesh,
    resharder: Resharder,
    host_calls: HostCalls | None = None,
) -> Callable[..., list[Any]]:
    """A traceable function of all graph inputs (global arrays) that runs the plan."""

    def body(*shards: Any) -> tuple[Any, ...]:
        runner = _ShardRunner(graph, plan, resharder, host_calls)
        given = zip(shards, plan.inputs, strict=True)
        parts = [part_of(shard, each.spec) for shard, each in given]
        made = runner.run_block(graph.blocks[0], parts)
        return tuple(map(as_held, made, plan.outputs[0]))

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in input_shardings(plan, mesh)),
        out_specs=tuple(s.spec for s in output_shardings(graph, plan, mesh)),
        check_vma=False,
    )

    def run(*arrays: Any) -> list[Any]:
        with use_abstract_mesh(NO_MESH):  # a caller's jax.set_mesh is not ours
            return list(mapped(*arrays))

    return run


class _ShardRunner(BlockRunner):
    """Runs blocks on local shards; `copies` holds every tensor by spec."""

    def __init__(
        self,
        graph: OpGraph,
        plan: ShardingPlan,
        resharder: Resharder,
        host_calls: HostCalls | None,
    ) -> None:
        super().__init__(graph)
        self.plan, self.resharder, self.host_calls = plan, resharder, host_calls
        self.position = {op.index: i for i, op in enumerate(graph.operators())}
        self.copies: dict[int, dict[Spec, Any]] = {}
        found, operators = companions(graph.columns), graph.columns.operators
        self.companions = {operators[row].index: each for row, each in found.items()}

    def write(self, tensor: int, value: Any) -> None:
        self.copies[tensor] = {self.plan.tensors[tensor].spec: value}

    def operands(self, op: Operator) -> list[Any]:
        specs = self.plan.operators[self.position[op.index]].operand_specs
        return [
            o.value if isinstance(o, Constant) else self.copy(o, spec)
            for o, spec in zip(op.operands, specs, strict=True)
        ]

    def outputs(self, block: Block) -> list[Any]:
        specs = self.plan.outputs[block.index]
        return [
            jnp.asarray(o.value, o.type.dtype)
            if isinstance(o, Constant)
            else self.copy(o, spec)
            for o, spec in zip(block.outputs, specs, strict=True)
        ]

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

    def execute(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        """As ever; what is gathered again is not before what it is read with."""
        if op.index not in self.companions:
            return super().execute(op, operands)
        copies = self.copies[self.companions[op.index]]
        companion = next(iter(copies.values()))
        return lax.optimization_barrier((operands[0], companion))[:1]

    def bind(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        plan = self.plan.operators[self.position[op.index]]
        by_name = {factor.name: factor for factor in factors_of(op)}
        shard = Shard(
            self.plan.mesh,
            tuple(by_name[name] for name in plan.factors),
            plan.operand_specs,
            plan.result_specs,
            host_calls=self.host_calls,
            is_of_program=True,
        )
        with equation_context(op.eqn):
            return bind_shard(op, operands, shard)


def _rank(graph: OpGraph, operand: Operand) -> int:
    if isinstance(operand, Constant):
        return operand.type.rank
    return graph.tensors[operand].type.rank
