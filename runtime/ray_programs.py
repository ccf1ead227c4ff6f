"""From bytes to programs that a lane runs on the devices of its host group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    Sharding,
    SingleDeviceSharding,
)

from autopar.lowering.exported_program import (
    ExportedProgram,
    ShardedType,
    number_channels,
)
from autopar.lowering.programs import PipelineProgram, StageProgram, compiled

from .ray_job import Block, Blocks, HostJob
from .transfers import Tile, devices, tile_at


def mesh_of(type_: ShardedType) -> Mesh:
    """The mesh of a type on the devices of this host group, in JAX's order."""
    own = slice(type_.first_device, type_.first_device + type_.num_devices)
    grid = np.array(jax.devices()[own]).reshape(type_.axis_sizes)
    auto = (AxisType.Auto,) * len(type_.axis_names)
    return Mesh(grid, type_.axis_names, axis_types=auto)


def sharding_of(type_: ShardedType) -> NamedSharding:
    """The sharding of a type on the devices of this host group."""
    return type_.on(mesh_of(type_))


def place(blocks: Blocks, type_: ShardedType) -> jax.Array:
    """The array of which this host was sent its tiles."""
    by_tile = {block.tile: block.data for block in blocks}

    def tile(index: Any) -> np.ndarray:
        return by_tile[tile_at(index, type_.shape)]

    return jax.make_array_from_callback(type_.shape, sharding_of(type_), tile)


def from_local_parts(
    parts: Sequence[np.ndarray], shape: Sequence[int], sharding: Any
) -> jax.Array:
    """The array of which this host has the parts of its devices, in their order."""
    kind = sharding.memory_kind
    local = [
        SingleDeviceSharding(device, memory_kind=kind)
        for device in _local_devices(sharding)
    ]
    return jax.make_array_from_single_device_arrays(
        tuple(shape), sharding, jax.device_put(list(parts), local), dtype=parts[0].dtype
    )


def local_parts(array: jax.Array) -> list[np.ndarray]:
    """The parts of this host's devices, in their order."""
    by_device = {shard.device: shard.data for shard in array.addressable_shards}
    return [np.asarray(by_device[device]) for device in _local_devices(array.sharding)]


def _local_devices(sharding: Sharding) -> list[Any]:
    """The devices of this host in the order of a sharding's mesh, or its only one."""
    here = jax.process_index()
    if not isinstance(sharding, NamedSharding):
        return [*sharding.device_set]
    return [d for d in devices(sharding) if d.process_index == here]


def blocks_of(array: jax.Array) -> Blocks:
    """The shards that this host sends of an array: no two hosts send the same."""
    return tuple(
        Block(tile, np.asarray(shard.data)) for shard, tile in _own_shards(array)
    )


def copied_blocks(array: jax.Array) -> Blocks:
    """As `blocks_of`, in memory of their own: the array may be donated."""
    copies = [
        (tile, jax.device_put(shard.data, shard.data.sharding, may_alias=False))
        for shard, tile in _own_shards(array)
    ]
    return tuple(Block(tile, np.asarray(copy)) for tile, copy in copies)


def _own_shards(array: jax.Array) -> list[tuple[Any, Tile]]:
    """The shards that this host sends of an array, each with its tile."""
    return [
        (shard, tile_at(shard.index, array.shape))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]


def load_job(job: HostJob) -> PipelineProgram:
    """The programs of a job, compiled; those of other hosts are missing."""
    programs: dict[int, StageProgram] = {}
    for number, stage_code in job.programs.items():
        code = stage_code.code
        constants = [*map(place, stage_code.constants, code.constants)]
        programs[number] = StageProgram(
            stage_code.stage,
            "apply",
            (),
            (),
            compile_code(code, constants),
            code.donated,
        )
    last = max(programs, default=-1)
    missing = StageProgram(-1, "apply", (), (), run_elsewhere)
    return PipelineProgram(
        num_stages=0,
        num_microbatches=0,
        slots={},
        programs=tuple(programs.get(i, missing) for i in range(last + 1)),
        shardings={},
        zeros={name: zeros_of(type_) for name, type_ in job.zeros.items()},
    )


def compile_code(
    code: ExportedProgram, constants: Sequence[jax.Array]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """An exported program as a function of lists of arrays, compiled at once."""
    exported = export.deserialize(bytearray(code.checked_code()))

    def call(closed_over: tuple[Any, ...], *leaves: Any) -> Any:
        return exported.call(closed_over, *leaves)

    call.__name__ = code.name
    jitted = jax.jit(
        call,
        in_shardings=(
            tuple(map(sharding_of, code.constants)),
            *map(sharding_of, code.inputs),
        ),
        out_shardings=[sharding_of(t) for t in code.outputs],
        donate_argnums=tuple(1 + position for position in code.donated),
    )
    arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    lowered = number_channels(jitted.lower(*arguments), jax.default_backend())
    program = compiled(lowered, code.compiler_options)

    def run(values: Sequence[Any]) -> Sequence[Any]:
        return program(tuple(constants), *values)

    return run


def zeros_of(type_: ShardedType) -> Callable[[], jax.Array]:
    """Makes the first value of a gradient."""
    return jax.jit(
        lambda: jnp.zeros(type_.shape, np.dtype(type_.dtype)),
        out_shardings=sharding_of(type_),
    )


def brought(array: jax.Array, type_: ShardedType) -> jax.Array:
    """The array itself if it lies as the type says, else a copy that does."""
    sharding = sharding_of(type_)
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    if array.sharding.device_set != sharding.device_set:
        return jax.device_put(array, sharding)  # another submesh of this host
    return copied(array, sharding)


def copied(array: jax.Array, sharding: Sharding) -> jax.Array:
    """A copy, made by the devices of the group together."""
    return _copying(sharding)(array)


@cache
def _copying(sharding: Sharding) -> Any:
    return jax.jit(jnp.copy, out_shardings=sharding)


def run_elsewhere(_: Sequence[Any]) -> Sequence[Any]:
    raise AssertionError("an instruction list runs the programs of its own host")
