"""One leaf and its chunks along dim 0, each of which lies on a mesh of its own.

The leaf that a user holds is one `jax.Array` if a sharding can say where all its
chunks lie: equal ones, in one form, on meshes of one shape that share no device. It
has the stages as one more mesh axis then. Otherwise it is a `DistributedArray`. Both
ways no byte is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .distributed_array import DistributedArray

STAGE_AXIS = "stage"
GATHERED_BYTES = 1 << 20  # results of the step that are larger stay where they are


def split_leaf(
    leaf: Any, lengths: Sequence[int], shardings: Sequence[NamedSharding | None]
) -> list[Any]:
    """The chunks of `leaf`, `lengths[k]` rows of dim 0 in chunk k.

    A chunk that lies as `shardings[k]` says is taken from where it lies, without a
    copy; any other is cut from the leaf and left for the caller to place. None says
    that it does not matter where a chunk lies.

    Raises:
      ValueError: `lengths` do not add up to the size of dim 0, or the leaf was donated.
    """
    if sum(lengths) != leaf.shape[0]:
        raise ValueError(
            f"The lengths of a leaf's chunks must add up to its dim 0, but got "
            f"{list(lengths)} for the shape {list(leaf.shape)}."
        )
    if isinstance(leaf, jax.Array | DistributedArray) and leaf.is_deleted():
        raise ValueError(
            f"Each array may be donated once, but one of shape {list(leaf.shape)} was "
            f"given to a step before and its memory holds the next state; pass what "
            f"that returned."
        )
    if isinstance(leaf, DistributedArray):
        if [chunk.shape[0] for chunk in leaf.chunks] == list(lengths):
            return [
                chunk if isinstance(chunk, jax.Array) else DistributedArray((chunk,))
                for chunk in leaf.chunks
            ]
    chunks, first = [], 0
    for length, sharding in zip(lengths, shardings, strict=True):
        chunk = _where_it_lies(leaf, first, length, sharding)
        chunks.append(_cut(leaf, first, first + length) if chunk is None else chunk)
        first += length
    return chunks


def join_leaf(chunks: Sequence[Any]) -> Any:
    """The leaf that `chunks` are: a `jax.Array`, or a `DistributedArray`."""
    if len(chunks) == 1:
        return chunks[0]
    if all(isinstance(chunk, np.ndarray) for chunk in chunks):
        return np.concatenate(chunks)
    sharding = _union(chunks)
    if sharding is None:
        return DistributedArray(
            [
                part
                for chunk in chunks
                for part in (
                    chunk.chunks if isinstance(chunk, DistributedArray) else (chunk,)
                )
            ]
        )
    shape = (sum(chunk.shape[0] for chunk in chunks), *chunks[0].shape[1:])
    shards = [shard.data for chunk in chunks for shard in chunk.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def gather_leaf(chunks: Sequence[Any]) -> Any:
    """The leaf that `chunks` of a result are: one on the first one's mesh, if small.

    Small results are looked at, and JAX's own functions take no `DistributedArray`.
    """
    if not all(
        isinstance(chunk, jax.Array) and isinstance(chunk.sharding, NamedSharding)
        for chunk in chunks
    ) or GATHERED_BYTES < sum(chunk.nbytes for chunk in chunks):
        return join_leaf(chunks)
    home = NamedSharding(chunks[0].sharding.mesh, PartitionSpec())
    return lax.concatenate(jax.device_put(list(chunks), home), 0)


def on_auto_axes(leaf: Any) -> Any:
    """The leaf where it lies, on axes whose shardings JAX finds by itself.

    On explicit ones, the default of `jax.make_mesh`, dims that are split cannot be cut.
    """
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding):
        return leaf
    mesh, auto = sharding.mesh, AxisType.Auto
    if not isinstance(mesh, Mesh) or {*mesh.axis_types} <= {auto}:
        return leaf
    types = (auto,) * len(mesh.axis_names)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return jax.device_put(leaf, NamedSharding(mesh, sharding.spec))


def _cut(leaf: Any, first: int, end: int) -> Any:
    """Rows of a leaf; only those of several chunks go through this process."""
    if isinstance(leaf, jax.Array):
        return lax.slice_in_dim(on_auto_axes(leaf), first, end)
    if not isinstance(leaf, DistributedArray):
        return leaf[first:end]
    parts, start = [], 0
    for chunk in leaf.chunks:
        length = chunk.shape[0]
        low, high = max(first - start, 0), min(end - start, length)
        if low < high:
            local = chunk if isinstance(chunk, jax.Array) else np.asarray(chunk)
            parts.append(_cut(local, low, high))
        start += length
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _where_it_lies(
    leaf: Any, first: int, length: int, sharding: NamedSharding | None
) -> jax.Array | None:
    """The rows from `first` on as an array of `sharding`, if its shards are there."""
    if sharding is None or not isinstance(leaf, jax.Array) or not leaf.committed:
        return None
    if not leaf.is_fully_addressable:
        return None
    if leaf.sharding.memory_kind != sharding.memory_kind:
        return None
    shape = (length, *leaf.shape[1:])
    held = {shard.device: shard for shard in leaf.addressable_shards}
    data = []
    for device, index in sharding.devices_indices_map(shape).items():
        shard = held.get(device)
        if shard is None:
            return None
        (start, end), *wanted = _ranges(index, shape)
        if _ranges(shard.index, leaf.shape) != [(start + first, end + first), *wanted]:
            return None
        data.append(shard.data)
    return jax.make_array_from_single_device_arrays(shape, sharding, data)


def _ranges(index: tuple[slice, ...], shape: Sequence[int]) -> list[tuple[int, int]]:
    return [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]


def union_sharding(
    shapes: Sequence[tuple[int, ...]], shardings: Sequence[Any]
) -> NamedSharding | None:
    """The sharding of chunks of these shapes on all their meshes, if there is one."""
    if not all(isinstance(sharding, NamedSharding) for sharding in shardings):
        return None
    if not all(isinstance(sharding.mesh, Mesh) for sharding in shardings):
        return None
    first, rank = shardings[0], len(shapes[0])
    forms = {
        (
            shape,
            s.mesh.axis_names,
            s.mesh.devices.shape,
            _spec(s, rank),
            s.memory_kind,
        )
        for shape, s in zip(shapes, shardings, strict=True)
    }
    devices = [device for s in shardings for device in s.mesh.devices.flat]
    names = first.mesh.axis_names
    if len(forms) > 1 or len(set(devices)) < len(devices) or STAGE_AXIS in names:
        return None
    mesh = Mesh(
        np.stack([sharding.mesh.devices for sharding in shardings]),
        (STAGE_AXIS, *names),
        axis_types=(AxisType.Auto,) * (len(names) + 1),
    )
    rows, *others = _spec(first, rank)
    spec = PartitionSpec((STAGE_AXIS, *rows), *(entry or None for entry in others))
    return NamedSharding(mesh, spec, memory_kind=first.memory_kind)


def chunk_shardings(leaf: Any, number: int) -> list[Any]:
    """Where each of `number` chunks of a leaf lies, as a step returned it.

    A leaf that is not in as many chunks lies whole where it does; None is nowhere.
    """
    found = getattr(leaf, "sharding", None)
    if isinstance(found, tuple):
        return [*found] if len(found) == number else [None] * number
    if not isinstance(found, NamedSharding) or not isinstance(found.mesh, Mesh):
        return [found] * number
    names, rank = found.mesh.axis_names, len(leaf.shape)
    if names[0] != STAGE_AXIS or len(found.mesh.devices) != number:
        return [found] * number
    (_, *rows), *others = _spec(found, rank)
    spec = PartitionSpec(*(entry or None for entry in (tuple(rows), *others)))
    auto = (AxisType.Auto,) * (len(names) - 1)
    return [
        NamedSharding(Mesh(devices, names[1:], axis_types=auto), spec)
        for devices in found.mesh.devices
    ]


def _union(chunks: Sequence[Any]) -> NamedSharding | None:
    if not all(isinstance(chunk, jax.Array) for chunk in chunks):
        return None
    return union_sharding([p.shape for p in chunks], [p.sharding for p in chunks])


def _spec(sharding: NamedSharding, rank: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dim."""
    entries = [*sharding.spec, *(None,) * (rank - len(sharding.spec))]
    return tuple(
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in entries
    )
