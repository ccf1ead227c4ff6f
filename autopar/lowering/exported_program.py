"""Programs and shardings as data: what a host needs that has no trace of the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ..jax_compat import CUDNN_ATTENTION, innermost_locations
from .channels import number_channels as number_channels
from .host_memory import HOST
from .programs import SpmdProgram

# Not stable between versions of JAX, but programs are compiled by the one that is here.
_CUDNN_CALLS = tuple(map(export.DisabledSafetyCheck.custom_call, CUDNN_ATTENTION.calls))


@dataclass(frozen=True)
class ShardedType:
    """Shape, dtype and sharding of an array, without devices.

    `dims` names for every dim the mesh axes that split it, most major first; devices
    are numbered row-major over the mesh, which are those of a group of hosts from
    `first_device` on. Random keys are the `uint32` data of `key_impl`, with dims of
    their own behind those of the keys. `memory` is the kind that holds it, that of the
    device if empty.
    """

    shape: tuple[int, ...]
    dtype: str
    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    key_impl: str = ""
    first_device: int = 0
    memory: str = ""

    @staticmethod
    def of(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> ShardedType:
        """The type of an array in `sharding`, whose mesh may be abstract."""
        spec, impl = sharding.spec, ""
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            data, impl = _key_data(shape, dtype)
            shape, dtype = data.shape, data.dtype
        entries = [*spec, *[None] * (len(shape) - len(spec))]
        names = tuple(sharding.mesh.shape.keys())
        sizes = tuple(sharding.mesh.shape.values())
        dtype = np.dtype(dtype).name
        dims = tuple(map(_axes, entries))
        memory = HOST if sharding.memory_kind == HOST else ""
        return ShardedType(tuple(shape), dtype, names, sizes, dims, impl, memory=memory)

    @property
    def num_devices(self) -> int:
        """Number of devices of its mesh."""
        return math.prod(self.axis_sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the whole."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def spec(self) -> PartitionSpec:
        """The sharding's spec."""
        return PartitionSpec(*(axes or None for axes in self.dims))

    def on(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        """The sharding on a mesh of the same axes."""
        return NamedSharding(mesh, self.spec, memory_kind=self.memory or None)

    def at(self, first_device: int) -> ShardedType:
        """The same on other devices of the group."""
        return replace(self, first_device=first_device)

    def tile(self, device: int) -> tuple[slice, ...]:
        """The part of the array that the device of this number holds."""
        at = np.unravel_index(device, self.axis_sizes)
        where = dict(zip(self.axis_names, map(int, at), strict=True))
        sizes = dict(zip(self.axis_names, self.axis_sizes, strict=True))
        tile = []
        for length, axes in zip(self.shape, self.dims, strict=True):
            index, count = 0, 1
            for axis in axes:
                index, count = index * sizes[axis] + where[axis], count * sizes[axis]
            size = length // count
            tile.append(slice(index * size, (index + 1) * size))
        return tuple(tile)

    def __str__(self) -> str:
        sizes = zip(self.axis_names, self.axis_sizes, strict=True)
        mesh = ";".join(f"{name}:{size}" for name, size in sizes)
        dims = ", ".join("+".join(axes) or "-" for axes in self.dims)
        where = f" from device {self.first_device} on" if self.first_device else ""
        memory = f" in {self.memory}" if self.memory else ""
        return f"{self.dtype}{list(self.shape)} [{dims}] on {mesh}{where}{memory}"


@dataclass(frozen=True)
class ExportedProgram:
    """An `SpmdProgram` as bytes for one platform.

    Called on `constants` and, one by one, `inputs`; `donated` holds positions among
    these. Donation and `compiler_options` are not part of the bytes: whoever compiles
    them asks for both again. `digest` is their SHA-256 as they were exported.
    """

    name: str
    code: bytes
    digest: str
    donated: tuple[int, ...]
    inputs: tuple[ShardedType, ...]
    constants: tuple[ShardedType, ...]
    outputs: tuple[ShardedType, ...]
    compiler_options: Mapping[str, str]

    def checked_code(self) -> bytes:
        """The bytes, if they are those that were exported.

        Raises:
          ValueError: they are not.
        """
        found = sha256(self.code).hexdigest()
        if found != self.digest:
            raise ValueError(
                f"A program runs as it was exported, but the bytes of {self.name} have "
                f"the SHA-256 {found} and not {self.digest}; start the step again."
            )
        return self.code

    def at(self, first_device: int) -> ExportedProgram:
        """The same on the devices of a group of hosts from this one on."""
        kinds = self.inputs, self.constants, self.outputs
        moved = (tuple(each.at(first_device) for each in kind) for kind in kinds)
        inputs, constants, outputs = moved
        return replace(self, inputs=inputs, constants=constants, outputs=outputs)

    def __repr__(self) -> str:
        return f"ExportedProgram({self.name}, {len(self.code)} bytes)"


def export_program(program: SpmdProgram, platform: str) -> ExportedProgram:
    """The program as bytes; its mesh may be abstract, and none of it is compiled.

    `platform` is `cpu`, `cuda`, `rocm` or `tpu`: one alone, as a program for two asks
    in every collective which it is on. Random keys go in and out as their data.
    """
    arguments, constants = program.argument_types, program.constants
    outputs = jax.eval_shape(program.jitted, constants, *arguments)
    inputs = _types(arguments, program.shardings)
    closed_over = _types(constants, program.constant_shardings)
    results = _types(outputs, program.output_shardings)
    jitted = program.jitted
    if any(t.key_impl for t in (*inputs, *closed_over, *results)):
        jitted = _on_key_data(program, inputs, closed_over, results)
    with innermost_locations():  # the same bytes, whoever asks for them
        exported = export.export(
            jitted, platforms=[platform], disabled_checks=_CUDNN_CALLS
        )(tuple(map(_struct, closed_over)), *map(_struct, inputs))
    code = bytes(exported.serialize())
    return ExportedProgram(
        program.jitted.__name__,
        code,
        sha256(code).hexdigest(),
        program.donated,
        inputs,
        closed_over,
        results,
        program.compiler_options,
    )


def plain_array(value: Any) -> np.ndarray:
    """An array, or the data of random keys."""
    if isinstance(value, jax.Array) and _is_key(value):
        value = jax.random.key_data(value)
    return np.asarray(value)


def with_keys(value: Any, type_: ShardedType) -> jax.Array:
    """The inverse of `plain_array`."""
    array = jnp.asarray(value)
    if type_.key_impl:
        return jax.random.wrap_key_data(array, impl=type_.key_impl)
    return array


def _on_key_data(
    program: SpmdProgram,
    inputs: Sequence[ShardedType],
    constants: Sequence[ShardedType],
    outputs: Sequence[ShardedType],
) -> Any:
    """The program as a jitted function of the data of its keys."""
    mesh = program.output_shardings[0].mesh

    def on_data(closed_over: tuple[Any, ...], *leaves: Any) -> list[Any]:
        results = program.jitted(
            tuple(map(with_keys, closed_over, constants)),
            *map(with_keys, leaves, inputs),
        )
        return [jax.random.key_data(x) if _is_key(x) else x for x in results]

    return jax.jit(
        on_data,
        in_shardings=(
            tuple(t.on(mesh) for t in constants),
            *(t.on(mesh) for t in inputs),
        ),
        out_shardings=[t.on(mesh) for t in outputs],
        donate_argnums=tuple(1 + position for position in program.donated),
    )


def _struct(type_: ShardedType) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(type_.shape, type_.dtype)


def _types(
    arrays: Sequence[Any], shardings: Sequence[NamedSharding]
) -> tuple[ShardedType, ...]:
    return tuple(
        ShardedType.of(array.shape, array.dtype, sharding)
        for array, sharding in zip(arrays, shardings, strict=True)
    )


def _is_key(array: Any) -> bool:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def _key_data(shape: Sequence[int], dtype: Any) -> tuple[jax.ShapeDtypeStruct, str]:
    """The type of the data of random keys, and what makes their bits."""
    impls: list[str] = []

    def data(keys: Any) -> Any:
        impls.append(str(jax.random.key_impl(keys)))
        return jax.random.key_data(keys)

    struct = jax.eval_shape(data, jax.ShapeDtypeStruct(tuple(shape), dtype))
    return struct, impls[0]


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
