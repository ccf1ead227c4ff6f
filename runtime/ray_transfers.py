"""A host's part of a transfer between two groups of hosts.

Where both sides have as many devices, each device sends to its like: a host offers one
array to the host in its own place. Else the value is cut into equal flat parts, as many
as both numbers of devices divide, and a host offers each host of the other side the
parts of its devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from autopar.lowering.exported_program import ShardedType

from .ray_job import Crossing
from .ray_programs import sharding_of
from .transfers import Transfer, devices, plan_between_hosts, plan_in_parts


class HostTransfer(Protocol):
    """What one host sends or reads of a value.

    `tiles` say in words what crosses, and are equal on both sides; `landings` what
    arrives from each host, by its rank, in the order of its offer.
    """

    tiles: str

    @property
    def landings(self) -> Mapping[int, list[jax.ShapeDtypeStruct]]: ...
    def offers(self, array: jax.Array) -> dict[int, list[jax.Array]]:
        """What each host is offered of an array, by its rank."""
        ...

    def receive(self, landed: Mapping[int, Sequence[jax.Array]]) -> jax.Array:
        """The value, of what arrived from each host."""
        ...


def host_transfer(crossing: Crossing, rank: int) -> HostTransfer:
    """The part of the host of this rank in what crosses."""
    if crossing.source.memory or crossing.target.memory:
        return _OfHostMemory(crossing, rank)
    if crossing.source.num_devices == crossing.target.num_devices:
        return _ToItsLike(crossing, rank)
    return _InParts(crossing, rank)


class _ToItsLike:
    """One array goes from a host to the host in its own place on the other side."""

    def __init__(self, crossing: Crossing, rank: int) -> None:
        type_, own, others = _sides(crossing, rank)
        self._peer = others[own.index(rank)]
        # Devices of this group stand for their like on the other side.
        first = type_.first_device
        types = crossing.source.at(first), crossing.target.at(first)
        dtype = np.dtype(type_.dtype)
        plan = plan_between_hosts(type_.shape, dtype, *map(sharding_of, types))
        self._transfer = Transfer(plan)
        landing = self._transfer.landing()
        assert isinstance(landing.sharding, jax.sharding.NamedSharding)
        self.landings = {self._peer: [landing]}
        self.tiles = str(ShardedType.of(landing.shape, landing.dtype, landing.sharding))

    def offers(self, array: jax.Array) -> dict[int, list[jax.Array]]:
        packed = self._transfer.pack(array)
        return {self._peer: packed if isinstance(packed, list) else [packed]}

    def receive(self, landed: Mapping[int, Sequence[jax.Array]]) -> jax.Array:
        (array,) = landed[self._peer]
        is_flat = self._transfer.plan.num_parts
        return self._transfer.receive([array] if is_flat else array)


class _InParts:
    """Parts go from hosts to others; each is one array on one device."""

    def __init__(self, crossing: Crossing, rank: int) -> None:
        type_, own, others = _sides(crossing, rank)
        number = math.lcm(crossing.source.num_devices, crossing.target.num_devices)
        sharding, dtype = sharding_of(type_), np.dtype(type_.dtype)
        plan = plan_in_parts(type_.shape, dtype, sharding, number)
        self._transfer = Transfer(plan)
        self._on_device = number // type_.num_devices
        here = _share(own, rank, number)
        met = {peer: _both(here, _share(others, peer, number)) for peer in others}
        self._parts = {peer: parts for peer, parts in met.items() if parts}
        self.tiles = f"{number} parts of {type_.dtype}[{plan.part_length}]"
        on, shape = devices(sharding), (1, plan.part_length)

        def landing(part: int) -> jax.ShapeDtypeStruct:
            device = SingleDeviceSharding(on[part // self._on_device])
            return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

        parts = self._parts.items()
        self.landings = {peer: [landing(i) for i in own] for peer, own in parts}

    def offers(self, array: jax.Array) -> dict[int, list[jax.Array]]:
        cut: list[jax.Array] = self._transfer.pack(array)
        data = {
            (shard.index[0].start or 0) * self._on_device + i: shard.data
            for i, each in enumerate(cut)
            for shard in each.addressable_shards
        }
        return {p: [data[i] for i in parts] for p, parts in self._parts.items()}

    def receive(self, landed: Mapping[int, Sequence[jax.Array]]) -> jax.Array:
        by_part: dict[int, Any] = {}
        for peer, parts in self._parts.items():
            by_part |= dict(zip(parts, landed[peer], strict=True))
        return self._transfer.receive_parts([by_part[part] for part in sorted(by_part)])


class _OfHostMemory:
    """What lies in the memory of hosts goes through that of their devices.

    There it is for the time of the transfer only.
    """

    def __init__(self, crossing: Crossing, rank: int) -> None:
        source, target = crossing.source, crossing.target
        on_devices = replace(
            crossing,
            source=replace(source, memory=""),
            target=replace(target, memory=""),
        )
        self._transfer = host_transfer(on_devices, rank)
        self.landings, self.tiles = self._transfer.landings, self._transfer.tiles
        type_, _, _ = _sides(on_devices, rank)
        home, _, _ = _sides(crossing, rank)
        self._fetch = jax.jit(jnp.copy, out_shardings=sharding_of(type_))
        self._put_away = jax.jit(jnp.copy, out_shardings=sharding_of(home))

    def offers(self, array: jax.Array) -> dict[int, list[jax.Array]]:
        return self._transfer.offers(self._fetch(array))

    def receive(self, landed: Mapping[int, Sequence[jax.Array]]) -> jax.Array:
        return self._put_away(self._transfer.receive(landed))


def _sides(
    crossing: Crossing, rank: int
) -> tuple[ShardedType, tuple[int, ...], tuple[int, ...]]:
    """The type on a host's own side, the hosts of that side, and those of the other."""
    if rank in crossing.source_ranks:
        return crossing.source, crossing.source_ranks, crossing.target_ranks
    return crossing.target, crossing.target_ranks, crossing.source_ranks


def _share(ranks: Sequence[int], rank: int, number: int) -> range:
    """The parts of one host of a side."""
    share = number // len(ranks)
    first = ranks.index(rank) * share
    return range(first, first + share)


def _both(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
