"""Arrays that live on the workers of a Ray cluster, and pieces of arrays on their way.

The driver cuts an array so that each host gets its own shards, a shard that several of
its devices hold once; a host sends back each shard that no other host sends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from autopar.errors import HostLostError
from autopar.lowering.exported_program import ShardedType
from autopar.state.distributed_array import DistributedArray

from .ray_pending import PendingStep
from .stored_arrays import Digest, Writing
from .tile import Tile


@dataclass(frozen=True, eq=False)
class HostShards:
    """What one host holds of an array: its tiles, and the tile of each device."""

    type: ShardedType
    tiles: tuple[np.ndarray, ...]
    tile_of_device: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the way."""
        return sum(tile.nbytes for tile in self.tiles)


@dataclass(frozen=True, eq=False)
class Block:
    """One tile of an array and where it belongs."""

    tile: Tile
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes on the way."""
        return self.data.nbytes


def cut_for_hosts(
    array: np.ndarray, type_: ShardedType, num_hosts: int
) -> list[HostShards]:
    """The shards of each host; devices are numbered host by host."""
    return [
        HostShards(type_, tuple(_cut(array, tile) for tile in tiles), tile_of_device)
        for tiles, tile_of_device in _tiles_of_hosts(type_, num_hosts)
    ]


def _cut(array: np.ndarray, tile: Tile) -> np.ndarray:
    part = array[tuple(slice(*ends) for ends in tile)]
    shape = tuple(stop - start for start, stop in tile)
    return np.ascontiguousarray(part).reshape(shape)  # it makes scalars vectors


@lru_cache(maxsize=1024)
def _tiles_of_hosts(
    type_: ShardedType, num_hosts: int
) -> tuple[tuple[tuple[Tile, ...], tuple[int, ...]], ...]:
    """The tiles of each host, and which of them each of its devices has."""
    per_host = type_.num_devices // num_hosts
    hosts = []
    for host in range(num_hosts):
        tiles = [
            tuple((part.start, part.stop) for part in type_.tile(device))
            for device in range(host * per_host, (host + 1) * per_host)
        ]
        order = {tile: position for position, tile in enumerate(dict.fromkeys(tiles))}
        hosts.append((tuple(order), tuple(order[tile] for tile in tiles)))
    return tuple(hosts)


def join_blocks(
    shape: Sequence[int], dtype: str, blocks: Iterable[Block]
) -> np.ndarray:
    """The array that blocks make together.

    Raises:
      AssertionError: they do not cover it.
    """
    whole = np.empty(tuple(shape), np.dtype(dtype))
    covered = 0
    for block in blocks:
        whole[tuple(slice(*part) for part in block.tile)] = block.data
        covered += block.data.size
    assert covered == whole.size, f"blocks cover {covered} of {whole.size} elements"
    return whole


class Keeper(Protocol):
    """The workers that keep arrays, as their handles see them."""

    lost: str | None
    lost_rank: int | None

    def fetch(self, number: int, group: int, type_: ShardedType) -> np.ndarray: ...
    def forget(self, number: int, group: int) -> None: ...
    def copy_out(self, arrays: Sequence[RemoteArray]) -> int: ...
    def write_out(
        self, ticket: int, writings: Sequence[tuple[int, Writing]]
    ) -> dict[str, Digest]: ...


class RemoteArray:
    """A handle to an array that one group of workers keeps under a number.

    Its memory there is freed when the handle is collected, with the next call that
    goes to the workers. `made_by` is the step that makes it.
    """

    def __init__(
        self,
        keeper: Keeper,
        group: int,
        number: int,
        type_: ShardedType,
        made_by: PendingStep | None = None,
    ) -> None:
        self.keeper, self.group, self.number, self.type = keeper, group, number, type_
        self._made_by = made_by
        self._taken_by: PendingStep | None = None
        self._is_deleted = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return self.type.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype."""
        return np.dtype(self.type.dtype)

    @property
    def sharding(self) -> str:
        """How it lies on which hosts, in words."""
        return f"{self.type}, group {self.group}"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.check()
        whole = self.keeper.fetch(self.number, self.group, self.type)
        return whole if dtype is None else whole.astype(dtype)

    def block_until_ready(self) -> RemoteArray:
        """Wait for the step that makes it."""
        if self._made_by is not None:
            self._made_by.wait()
        return self

    def is_deleted(self) -> bool:
        """Whether it was donated, deleted, or lost with its hosts."""
        self._wait_for_taker()
        return self._is_deleted or self.keeper.lost is not None

    def delete(self) -> None:
        """Free its memory on the workers."""
        if not self._is_deleted:
            self._is_deleted = True
            self.keeper.forget(self.number, self.group)

    def __del__(self) -> None:
        self.delete()

    def may_be_taken_by(self, step: PendingStep) -> None:
        """Note a step that was told to take its memory if it can."""
        self._taken_by = step

    def _wait_for_taker(self) -> None:
        if self._taken_by is not None and self.keeper.lost is None:
            self._taken_by.wait()
            self._taken_by = None

    def mark_donated(self) -> None:
        """Note that a step has taken its memory."""
        self._is_deleted = True

    def check(self) -> None:
        """Does nothing if it is there.

        Raises:
          HostLostError: it was lost with a host.
          RuntimeError: it was donated, or its workers were closed.
        """
        if self.keeper.lost is not None:
            text = (
                f"Array {self.type} lived on workers that are gone: "
                f"{self.keeper.lost} Restore it from a checkpoint, or make it anew."
            )
            if self.keeper.lost_rank is None:
                raise RuntimeError(text)
            raise HostLostError(text, self.keeper.lost_rank)
        self._wait_for_taker()
        if self._is_deleted:
            raise RuntimeError(
                f"Array {self.type} has been deleted: each array may be donated once, "
                f"and this one's memory now holds the next state. Pass the state that "
                f"the last call returned, or pass donate_argnums=() to "
                f"autopar.parallelize to keep both."
            )


def is_on_workers(leaf: Any) -> bool:
    """Whether all of a leaf is kept by workers."""
    return isinstance(leaf, DistributedArray) and all(
        isinstance(piece, RemoteArray) for piece in leaf.pieces
    )


class Numbers:
    """Numbers for arrays, and those that nobody refers to any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._dropped: deque[tuple[int, int]] = deque()

    def fresh(self, count: int) -> range:
        """As many numbers as are asked for, never given out before."""
        with self._lock:
            first, self._next = self._next, self._next + count
        return range(first, first + count)

    def drop(self, number: int, group: int) -> None:
        """Note a number that is free; called by the garbage collector, so lock-free."""
        self._dropped.append((number, group))

    def take_dropped(self, group: int) -> tuple[int, ...]:
        """The numbers dropped in a group since they were last taken."""
        taken = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._dropped.extend(each for each in taken if each[1] != group)
        return tuple(number for number, where in taken if where == group)
