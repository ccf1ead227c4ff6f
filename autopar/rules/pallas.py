"""Kernels of Pallas that nobody has a rule for, split along axes of their grid.

A grid axis is a dim that may be split where the kernel does not ask which of its steps
it is in, every result has a block of its own for each step, and an operand has that, or
is the same in all steps. These are the axes of examples and heads in JAX's kernels of
attention, and those that `jax.vmap` adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from ..graph.op_graph import Operator
from ..jax_compat import inner_jaxprs
from ..sharding.spec import REPLICATED, State
from .base import Factor, Shard, bind_params, register


def _factors(op: Operator) -> list[Factor]:
    mapping = op.params["grid_mapping"]
    num_index = mapping.num_index_operands  # which index maps and the kernel read
    if len(op.operands) != num_index + mapping.num_inputs:
        return []  # some of them are bounds of the grid
    own = [i for i in range(len(mapping.grid)) if i not in mapping.vmapped_dims]
    asked = {own[axis] for axis in _asked(op.params["jaxpr"])}
    found: list[Factor] = []
    for axis, size in enumerate(mapping.grid):
        dims = [_dim(block, axis, size) for block in mapping.block_mappings]
        if axis in asked or None in dims:
            continue
        states: list[State] = [dim for dim in dims if dim is not None]
        operands = (*(REPLICATED,) * num_index, *states[: mapping.num_inputs])
        results = tuple(states[mapping.num_inputs :])
        reused = [operands[index] for index, _ in op.params["input_output_aliases"]]
        if REPLICATED not in (*results, *reused):
            found.append(Factor(f"grid{axis}", operands, results, size))
    return found


def _asked(jaxpr: Any) -> Iterator[int]:
    """The axes, of those that are no examples of `vmap`, that a kernel asks about."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield eqn.params["axis"]
        for inner in inner_jaxprs(eqn):
            yield from _asked(inner)


def _dim(block: Any, axis: int, size: int) -> State | None:
    """The dim whose blocks follow a grid axis, REPLICATED if none does.

    None where they follow it in another way, or not to the end.
    """
    index_map = block.index_map_jaxpr.jaxpr
    step = index_map.invars[axis]
    if any(step is each for eqn in index_map.eqns for each in eqn.invars):
        return None
    dims = [dim for dim, index in enumerate(index_map.outvars) if index is step]
    if not dims:
        return REPLICATED
    shape = block.block_shape[dims[0]]
    is_single = type(shape).__name__ == "Squeezed"
    length = 1 if is_single else getattr(shape, "block_size", 0)
    is_blocked = is_single or type(shape).__name__ == "Blocked"
    is_all = is_blocked and length * size == block.array_aval.shape[dims[0]]
    return dims[0] if is_all and len(dims) == 1 else None


def _bind(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    mapping = op.params["grid_mapping"]
    grid = tuple(
        size // prod(shard.mesh.axis_sizes[i] for i in shard.axes_with(f"grid{axis}"))
        for axis, size in enumerate(mapping.grid)
    )
    inputs = range(mapping.num_index_operands, len(op.operands))
    outputs = [shard.result_shape(op, each) for each in range(len(op.results))]
    shapes = [*(shard.operand_shape(op, each) for each in inputs), *outputs]
    blocks = tuple(
        block.replace(array_aval=block.array_aval.update(shape=shape))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    types = zip(op.params["out_avals"], outputs, strict=True)
    return bind_params(
        op,
        operands,
        grid_mapping=mapping.replace(grid=grid, block_mappings=blocks),
        out_avals=tuple(kind.update(shape=shape) for kind, shape in types),
    )


register("pallas_call", bind=_bind)(_factors)
