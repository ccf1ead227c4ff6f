"""How an array goes from one stage's sharding to another's, each byte sent once.

Either side can reshard in a compiled program; what crosses is identical tiles.
`plan_transfer` chooses them:

  1. the source's own sharding, or the target's, with axes that it leaves replicated
     put to use: a device then holds no tile that another one holds too, and a target
     that wants copies gathers them inside itself;
  2. or, where the numbers of devices differ or no dim can be cut so, equal parts of
     the array flattened and padded, as many as the larger side has devices.

The one with the fewest bytes sent is taken, then the one that moves the fewest bytes
inside the two sides.

`jax.device_put` copies identical tiles from device to device, in 0.4 to 0.7 ms. All
else that it accepts waits and goes through the host, so it is refused before the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tile = tuple[tuple[int, int], ...]  # a part of an array: start and stop in each dim


@dataclass(frozen=True)
class TransferPlan:
    """How an array goes from `source` to `target`: data only, made before any array.

    `sent` is the sharding that the source reshards to and `landed` the one the tiles
    make on the target's devices; they are None where nothing is sent, or
    `num_parts` flat parts of `part_length` elements. `sent_bytes` cross in all, padding
    included; the `resharded_bytes` inside both sides are a lower bound for tiles and an
    upper one for parts.
    """

    shape: tuple[int, ...]
    dtype: Any
    source: NamedSharding
    target: NamedSharding
    sent_bytes: int
    resharded_bytes: int
    sent: NamedSharding | None = None
    landed: NamedSharding | None = None
    num_parts: int = 0
    part_length: int = 0

    @property
    def is_local(self) -> bool:
        """Whether both sides are the same devices, so that nothing is sent."""
        return self.sent is None and not self.num_parts

    def __str__(self) -> str:
        array = f"{self.dtype}{list(self.shape)}"
        tiles = f"{self.num_parts} parts" if self.sent is None else f"{self.sent.spec}"
        return (
            f"{array} {self.source.spec} -> {self.target.spec}: {self.sent_bytes} B "
            f"sent as {tiles}, {self.resharded_bytes} B resharded"
        )


def plan_transfer(
    shape: Sequence[int], dtype: Any, source: NamedSharding, target: NamedSharding
) -> TransferPlan:
    """The cheapest way from `source` to `target` that sends no byte twice.

    Raises:
      ValueError: a sharding does not divide the shape, or the two sides hold it in
        different kinds of memory.
    """
    array = jax.ShapeDtypeStruct(tuple(shape), dtype)
    here, there = devices(source), devices(target)
    assert here == there or not {*here} & {*there}, f"{here} and {there} overlap"
    for sharding in (source, target):
        sharding.shard_shape(array.shape)
        is_own = here == there or sharding.is_fully_addressable
        assert is_own, f"{sharding} has devices of other processes"
    if source.memory_kind != target.memory_kind:
        raise ValueError(
            f"a transfer keeps the kind of memory, but goes from {source.memory_kind} "
            f"to {target.memory_kind}; move it on its own devices first."
        )
    if here == there:
        moved = moved_bytes(array, source, target)
        return TransferPlan(array.shape, array.dtype, source, target, 0, moved)
    return _cheapest(array, source, target)


def plan_between_hosts(
    shape: Sequence[int], dtype: Any, source: NamedSharding, target: NamedSharding
) -> TransferPlan:
    """The cheapest way between as many devices of two groups of hosts, for either one.

    Both shardings lie on the devices of the group that asks, which stand for those of
    the other in their order: a device of one side receives from its like. Where the
    numbers of devices differ see `plan_in_parts`.

    Raises:
      ValueError: a sharding does not divide the shape.
    """
    array = jax.ShapeDtypeStruct(tuple(shape), dtype)
    for sharding in (source, target):
        sharding.shard_shape(array.shape)
    assert devices(source) == devices(target), "see plan_in_parts"
    return _cheapest(array, source, target)


def plan_in_parts(
    shape: Sequence[int], dtype: Any, own: NamedSharding, num_parts: int
) -> TransferPlan:
    """A transfer in flat parts between groups of hosts, for either one.

    `own` is the sharding of the group that asks, whose number of devices divides that
    of the parts; it stands for that of the other one.

    Raises:
      ValueError: the sharding does not divide the shape.
    """
    array = jax.ShapeDtypeStruct(tuple(shape), dtype)
    own.shard_shape(array.shape)
    return _flat_plan(array, own, own, num_parts)


def _cheapest(
    array: jax.ShapeDtypeStruct, source: NamedSharding, target: NamedSharding
) -> TransferPlan:
    plans = []
    if len(devices(source)) == len(devices(target)):
        here, there = _cut_further(array, source), _cut_further(array, target)
        plans = [
            _tile_plan(array, source, target, source, _ondevices(source, target)),
            _tile_plan(array, source, target, _ondevices(target, source), target),
            _tile_plan(array, source, target, here, _ondevices(here, target)),
            _tile_plan(array, source, target, _ondevices(there, source), there),
        ]
    plans.append(_flat_plan(array, source, target))
    return min(plans, key=lambda plan: (plan.sent_bytes, plan.resharded_bytes))


def _tile_plan(
    array: jax.ShapeDtypeStruct,
    source: NamedSharding,
    target: NamedSharding,
    sent: NamedSharding,
    landed: NamedSharding,
) -> TransferPlan:
    # Programs made for the two sides take their own shardings without tracing again.
    if tiles(array.shape, sent) == tiles(array.shape, source):
        sent = source
    if tiles(array.shape, landed) == tiles(array.shape, target):
        landed = target
    before, after = moved_bytes(array, source, sent), moved_bytes(array, landed, target)
    num_elements = sum(map(_size, tiles(array.shape, sent)))
    num_bytes = num_elements * array.dtype.itemsize
    return TransferPlan(
        array.shape,
        array.dtype,
        source,
        target,
        num_bytes,
        before + after,
        sent,
        landed,
    )


def _flat_plan(
    array: jax.ShapeDtypeStruct,
    source: NamedSharding,
    target: NamedSharding,
    num_parts: int = 0,
) -> TransferPlan:
    num_parts = num_parts or math.lcm(len(devices(source)), len(devices(target)))
    part_length = max(1, -(-array.size // num_parts))
    whole_bytes = array.size * array.dtype.itemsize
    before = 0 if source.is_fully_replicated else whole_bytes
    after = whole_bytes * (len(devices(target)) - 1)
    return TransferPlan(
        array.shape,
        array.dtype,
        source,
        target,
        num_parts * part_length * array.dtype.itemsize,
        before + after,
        num_parts=num_parts,
        part_length=part_length,
    )


def tiles(shape: Sequence[int], sharding: NamedSharding) -> tuple[Tile, ...]:
    """The tile of each device, in the order of the mesh."""
    by_device = sharding.devices_indices_map(tuple(shape))
    return tuple(tile_at(by_device[device], shape) for device in devices(sharding))


def moved_bytes(
    array: jax.ShapeDtypeStruct, source: NamedSharding, target: NamedSharding
) -> int:
    """Bytes that the devices lack of their target tiles: the least a reshard moves."""
    pairs = zip(tiles(array.shape, source), tiles(array.shape, target), strict=True)
    lacking = (_size(wanted) - _size(_overlap(had, wanted)) for had, wanted in pairs)
    return sum(lacking) * array.dtype.itemsize


def _size(tile: Tile) -> int:
    return math.prod(max(0, stop - start) for start, stop in tile)


def _overlap(a: Tile, b: Tile) -> Tile:
    pairs = zip(a, b, strict=True)
    return tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in pairs)


def devices(sharding: NamedSharding) -> list[Any]:
    """The devices of a sharding, in the order of its mesh."""
    return list(_grid(sharding).flat)


def _grid(sharding: NamedSharding) -> np.ndarray:
    grid = sharding.mesh.devices
    assert grid is not None, "a stage's mesh has devices"
    return grid


def _ondevices(sharding: NamedSharding, other: NamedSharding) -> NamedSharding:
    """The same tiles in the same order, on the devices of `other`."""
    grid = _grid(other).reshape(_grid(sharding).shape)
    mesh = Mesh(grid, sharding.mesh.axis_names, axis_types=sharding.mesh.axis_types)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _cut_further(array: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
    """`sharding` with each axis that it leaves replicated cutting a dim where it can.

    An axis cuts a dim inside the cuts already there: the old tiles are then unions of
    new ones.
    """
    sizes = dict(sharding.mesh.shape)
    cuts = [_axes(entry) for entry in sharding.spec]
    cuts += [()] * (array.ndim - len(cuts))
    used = {axis for axes in cuts for axis in axes}
    for axis, size in sizes.items():
        if axis in used or size == 1:
            continue
        for dim, length in enumerate(array.shape):
            tile = length // math.prod(sizes[a] for a in cuts[dim])
            if tile and tile % size == 0:
                cuts[dim] = (*cuts[dim], axis)
                break
    spec = PartitionSpec(*(axes or None for axes in cuts))
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True)
class Transfer:
    """A transfer that can be made many times: compiled on first use.

    The source's thread calls `send`, the target's thread calls `receive` with what it
    returned: each side's programs are then launched in the order of its own work.
    """

    plan: TransferPlan

    def send(self, array: jax.Array) -> Any:
        """Reshard on the source, and start the copy of the tiles."""
        plan = self.plan
        packed = self.pack(array)
        if plan.is_local:
            return self._after(packed)
        if plan.num_parts:
            return self._joined(_moved_parts(packed, devices(plan.target)))
        assert plan.landed is not None, "what is sent as tiles lands as tiles"
        return move_tiles(packed, plan.landed)

    def pack(self, array: jax.Array) -> Any:
        """What crosses, on the source: tiles of one array, or a list of parts."""
        self._check(array)
        if self.plan.is_local:
            return array
        return self._cut(array) if self.plan.num_parts else self._before(array)

    def receive(self, sent: Any) -> jax.Array:
        """The array in its target sharding, from what `send` returned."""
        return sent if self.plan.is_local else self._after(sent)

    def receive_parts(self, parts: Sequence[jax.Array]) -> jax.Array:
        """The array from its parts on this host, each on its device, in their order."""
        return self.receive(self._joined(parts))

    def landing(self) -> jax.ShapeDtypeStruct:
        """What `pack` arrives as where both sides have as many devices: one array."""
        plan = self.plan
        if plan.landed is not None:
            return jax.ShapeDtypeStruct(plan.shape, plan.dtype, sharding=plan.landed)
        shape = (plan.num_parts, plan.part_length)
        return jax.ShapeDtypeStruct(shape, plan.dtype, sharding=self._flat_target)

    def __call__(self, array: jax.Array) -> jax.Array:
        """Both sides at once."""
        return self.receive(self.send(array))

    def _check(self, array: jax.Array) -> None:
        plan, given = self.plan, (array.shape, array.dtype)
        assert not array.is_deleted(), f"what goes {plan} was donated or deleted before"
        is_in_place = given == (plan.shape, plan.dtype) and (
            array.sharding.is_equivalent_to(plan.source, len(plan.shape))
        )
        assert is_in_place, f"{given} in {array.sharding} is not what goes {plan}"

    def _joined(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """Parts of the target's devices, in order, as arrays over all of these."""
        per_device = self.plan.num_parts // self._flat_target.num_devices
        shape = self._flat_target.num_devices, self.plan.part_length
        return [
            jax.make_array_from_single_device_arrays(
                shape, self._flat_target, list(parts[i::per_device])
            )
            for i in range(per_device)
        ]

    @cached_property
    def _flat_target(self) -> NamedSharding:
        mesh = Mesh(np.array(devices(self.plan.target)), ("part",))
        return NamedSharding(mesh, PartitionSpec("part"))

    @cached_property
    def _before(self) -> Any:
        """The source's program where tiles cross."""
        plan = self.plan
        assert plan.sent is not None, "parts are cut by another program"
        is_there = plan.sent.is_equivalent_to(plan.source, len(plan.shape))
        return _same if is_there else jax.jit(_same, out_shardings=plan.sent)

    @cached_property
    def _cut(self) -> Any:
        """The source's program where parts cross."""
        plan = self.plan
        mesh = Mesh(np.array(devices(plan.source)), ("part",))
        per_device = plan.num_parts // mesh.size

        def cut(x: jax.Array) -> list[jax.Array]:
            padded = jnp.resize(x, (plan.num_parts * plan.part_length,))
            parts = padded.reshape(mesh.size, per_device, plan.part_length)
            return [parts[:, i] for i in range(per_device)]

        return jax.jit(cut, out_shardings=NamedSharding(mesh, PartitionSpec("part")))

    @cached_property
    def _after(self) -> Any:
        """The target's program, or the only one where nothing crosses."""
        plan = self.plan
        if plan.is_local:
            return jax.jit(jnp.copy, out_shardings=plan.target)
        if plan.landed is not None:
            rank = len(plan.shape)
            is_there = plan.landed.is_equivalent_to(plan.target, rank)
            return _same if is_there else jax.jit(_same, out_shardings=plan.target)

        def join(parts: list[jax.Array]) -> jax.Array:
            flat = jnp.stack(parts, axis=1).reshape(-1)
            return flat[: math.prod(plan.shape)].reshape(plan.shape)

        return jax.jit(join, out_shardings=plan.target)


def move_tiles(array: jax.Array, landed: NamedSharding) -> jax.Array:
    """Copy each tile of an array to the device that holds the same tile of `landed`.

    Other tiles would go through the host.
    """
    sharding = array.sharding
    are_whole = sharding.num_devices == landed.num_devices == 1
    are_identical = are_whole or (
        isinstance(sharding, NamedSharding)
        and tiles(array.shape, sharding) == tiles(array.shape, landed)
    )
    assert are_identical, f"{sharding} cuts {array.shape} otherwise than {landed}"
    return jax.device_put(array, landed)


def _same(x: jax.Array) -> jax.Array:
    return x


def _moved_parts(
    arrays: Sequence[jax.Array], targets: Sequence[Any]
) -> list[jax.Array]:
    """Parts of the source's devices, in order, each on its target device."""
    shards = [
        sorted(array.addressable_shards, key=lambda s: s.index[0].start or 0)
        for array in arrays
    ]
    parts = [s.data for on_device in zip(*shards, strict=True) for s in on_device]
    per_device = len(parts) // len(targets)
    return jax.device_put(parts, [d for d in targets for _ in range(per_device)])


def tile_at(index: Sequence[slice], shape: Sequence[int]) -> Tile:
    """The tile of an index, with a slice for each dim, into an array of this shape."""
    return tuple(
        part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
    )
