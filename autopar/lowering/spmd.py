"""Lower a sharding plan to one explicit SPMD function over local shards.

Every operator binds its own primitive on the shards its strategy names; a tensor that
is needed in another spec is converted once, at its first reader, by the planned
collectives. Nothing is left for a partitioner to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh

from ..costs.resharding import Resharder, wire_dtype
from ..graph.blocks import BlockRunner
from ..graph.op_graph import Block, Constant, Operand, Operator, OpGraph
from ..graph.paired_operators import companions
from ..jax_compat import NO_MESH, equation_context
from ..plans.plan import ShardingPlan
from ..rules.base import Shard, bind_shard, factors_of
from ..rules.host_calls import HostCalls
from ..sharding.mesh import MeshShape
from ..sharding.placement import Step
from ..sharding.spec import MAX, MIN, SUM, Spec
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


_REDUCERS: dict[int, Callable[..., Any]] = {
    SUM: lax.psum,
    MAX: lax.pmax,
    MIN: lax.pmin,
}


def apply_step(x: jax.Array, step: Step, mesh: MeshShape) -> jax.Array:
    """The shard after `step`; one collective of the step's kind, or none."""
    names = tuple(mesh.axis_names[axis] for axis in step.axes)
    groups = None
    if step.groups:  # they number all devices
        names, groups = mesh.axis_names, step.groups
    if x.size == 0 and step.is_collective:  # StableHLO has none that move nothing
        return lax.reshape(x, _shape_after(x.shape, step, mesh))
    match step.kind:
        case "all_reduce":
            return _all_reduce(x, step, names)
        case "reduce_scatter":
            return lax.psum_scatter(
                _unknown(x), names, scatter_dimension=step.dim, tiled=True
            )
        case "all_gather":
            return lax.all_gather(
                x, names, axis_index_groups=groups, axis=step.dim, tiled=True
            )
        case "all_to_all":
            # XLA's CPU compiler sends the parts of a concatenation as they are, and
            # refuses them if their layouts differ.
            x = lax.optimization_barrier(x)
            return lax.all_to_all(
                x,
                names,
                split_axis=step.target_dim,
                concat_axis=step.dim,
                axis_index_groups=groups,
                tiled=True,
            )
        case "collective_permute":
            return lax.ppermute(x, names, step.groups)
        case "slice":
            (axis,) = step.axes
            index, parts = lax.axis_index(names[0]), mesh.axis_sizes[axis]
            if step.part is not None:
                stride, parts = step.part
                index = index // stride % parts
            size = x.shape[step.dim] // parts
            return lax.dynamic_slice_in_dim(x, index * size, size, axis=step.dim)
        case "mask":
            keep = lax.axis_index(names[0]) == 0
            return jnp.where(keep, x, jnp.zeros_like(x))
    raise AssertionError(f"unknown resharding step {step.kind}")


def _all_reduce(x: jax.Array, step: Step, names: tuple[str, ...]) -> jax.Array:
    reduce, sent_as = _REDUCERS[step.reduction], wire_dtype(step, x.dtype)
    if not jnp.issubdtype(x.dtype, jnp.floating) or sent_as == x.dtype:
        return reduce(_unknown(x.astype(sent_as)), names).astype(x.dtype)
    wide = x.astype(jnp.float64 if sent_as == np.int64 else jnp.float32)
    limits = jnp.iinfo(sent_as)
    last = limits.max if step.reduction == MAX else limits.min
    codes = jnp.where(
        jnp.isnan(x), sent_as.type(last), _swap_order(_bits(wide, sent_as))
    )
    closed = _swap_order(reduce(codes, names))
    return _bits(closed, wide.dtype).astype(x.dtype)


def _unknown(x: jax.Array) -> jax.Array:
    """`x`, which XLA cannot see to be constant if it is complex.

    Its simplifier ends the process at a sum over devices of a complex number repeated.
    """
    if not jnp.issubdtype(x.dtype, jnp.complexfloating):
        return x
    return lax.optimization_barrier(x)


def _bits(x: jax.Array, dtype: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)


def _swap_order(bits: jax.Array) -> jax.Array:
    """From the bits of floats to integers in their order, and back.

    Bits of negative floats grow with the magnitude, so all but the sign is flipped. The
    greatest and the least integer come back as the bits of a NaN.
    """
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _shape_after(
    shape: tuple[int, ...], step: Step, mesh: MeshShape
) -> tuple[int, ...]:
    """The shape of a shard after a collective."""
    count = prod(mesh.axis_sizes[axis] for axis in step.axes)
    if step.groups:
        count = len(step.groups[0])
    changed = list(shape)
    match step.kind:
        case "all_gather":
            changed[step.dim] *= count
        case "reduce_scatter":
            changed[step.dim] //= count
        case "all_to_all":
            changed[step.dim] *= count
            changed[step.target_dim] //= count
    return tuple(changed)
