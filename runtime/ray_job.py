"""What the driver tells a host: the job it runs each step, and one step of it; data.

The driver cuts an array so that each host gets its own shards, a shard that several of
its devices hold once; a host sends back each shard that no other host sends.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

import numpy as np

from autopar.errors import WorkerError
from autopar.lowering.exported_program import ExportedProgram, ShardedType

from .instructions import Held, InstructionList
from .stored_arrays import StoredArray
from .timeline import Event
from .transfers import Tile, tile_at


@dataclass(frozen=True, eq=False)
class Block:
    """One tile of an array and where it belongs."""

    tile: Tile
    data: np.ndarray


Blocks = tuple[Block, ...]  # what a host holds, or sends, of an array


@dataclass(frozen=True)
class Crossing:
    """A value on the submesh that sends it and on the one that reads it.

    Each has its type there, and the ranks of its hosts, which hold equal shares of the
    submesh in their order.
    """

    source: ShardedType
    target: ShardedType
    source_ranks: tuple[int, ...]
    target_ranks: tuple[int, ...]

    @property
    def is_inside(self) -> bool:
        """Whether it stays on the same hosts."""
        return self.source_ranks == self.target_ranks

    def is_of(self, rank: int) -> bool:
        """Whether a host sends or reads a part of it."""
        return rank in self.source_ranks or rank in self.target_ranks


@dataclass(frozen=True)
class StageCode:
    """A stage program as bytes; `constants` are the host's part of its constants."""

    stage: int
    code: ExportedProgram
    constants: tuple[Blocks, ...]


@dataclass(frozen=True)
class HostJob:
    """All that one host runs a step.

    `lists` has what each of its submeshes does, `programs` those it runs, by their
    number there. `inputs` are the values it holds when a step
    begins, `ends` what it may be asked for when the step is done; a step names both by
    position. `zeros` are the first values of gradients. `crossing` has each slot that
    this host sends or receives, by the stage that it is sent to.
    """

    lists: tuple[InstructionList, ...]
    programs: Mapping[int, StageCode]
    inputs: Mapping[Held, ShardedType]
    ends: tuple[Held, ...]
    zeros: Mapping[str, ShardedType]
    crossing: Mapping[tuple[str, int], Crossing]
    submesh_of_stage: Mapping[int, int]


@dataclass(frozen=True)
class LoadedPart:
    """Rows of a leaf of a batch, which hosts read from the source of this number.

    Of the batch from example `first` on, row `start` and every `stride`-th after it.
    """

    source: int
    first: int
    leaf: int
    start: int
    stride: int


@dataclass(frozen=True)
class StepRequest:
    """One step of a job, as all hosts of a group are told it.

    Of the inputs, `held` are arrays that the hosts keep under numbers, `stored` are
    read from a checkpoint, `loaded` from a source of data, and the rest comes from the
    driver, each host its part. Of the ends, `kept` stay under the numbers given, and
    `returned` go to the driver. `freed` are numbers nobody needs any more.
    """

    job: int
    held: Mapping[int, int]
    stored: Mapping[int, StoredArray]
    loaded: Mapping[int, LoadedPart]
    kept: Mapping[int, int]
    returned: tuple[int, ...]
    freed: tuple[int, ...]
    is_recorded: bool = False


@dataclass(frozen=True)
class StepReply:
    """What a host has to say of a step; `donated` are numbers that exist no more.

    Events are in seconds of the host's own monotonic clock.
    """

    returned: Mapping[int, Blocks]
    donated: tuple[int, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Failure:
    """An exception in a method of a host as text.

    `is_echo` if another host's is its cause.
    """

    method: str
    summary: str
    traceback: str
    is_echo: bool = False


@dataclass(frozen=True)
class HostFacts:
    """What a worker says of itself: versions must be alike on all hosts."""

    address: str
    free_port: int
    process_id: int
    python: str
    jax: str
    autopar: str


def own_versions() -> dict[str, str]:
    """The versions of this process, as `HostFacts` names them."""
    return {
        "python": platform.python_version(),
        "jax": f"{metadata.version('jax')} with jaxlib {metadata.version('jaxlib')}",
        "autopar": metadata.version("autopar"),
    }


def check_alike(facts: Sequence[HostFacts]) -> None:
    """Does nothing if all hosts run the driver's versions.

    Raises:
      WorkerError: one runs another; says which.
    """
    here = own_versions()
    for rank, host in enumerate(facts):
        for package, version in here.items():
            there = getattr(host, package)
            if there != version:
                raise WorkerError(
                    f"All hosts must run the driver's versions, but host {rank} at "
                    f"{host.address} has {package} {there} and the driver {version}; "
                    f"install the same there.",
                    rank,
                )


def cut_for_hosts(
    array: np.ndarray, type_: ShardedType, num_hosts: int
) -> list[Blocks]:
    """The tiles of each host, each once; devices are numbered host by host."""
    return [
        tuple(Block(tile, _cut(array, tile)) for tile in tiles)
        for tiles in _tiles_of_hosts(type_, num_hosts)
    ]


def _cut(array: np.ndarray, tile: Tile) -> np.ndarray:
    part = array[tuple(slice(*ends) for ends in tile)]
    shape = tuple(stop - start for start, stop in tile)
    return np.ascontiguousarray(part).reshape(shape)  # it makes scalars vectors


@lru_cache(maxsize=1024)
def _tiles_of_hosts(type_: ShardedType, num_hosts: int) -> list[dict[Tile, None]]:
    """The tiles of each host."""
    per_host = type_.num_devices // num_hosts
    devices = (range(i * per_host, (i + 1) * per_host) for i in range(num_hosts))
    tiles = ([tile_at(type_.tile(d), type_.shape) for d in own] for own in devices)
    return [dict.fromkeys(own) for own in tiles]


def join_blocks(type_: ShardedType, blocks: Iterable[Block]) -> np.ndarray:
    """The array that blocks make together.

    Raises:
      AssertionError: they do not cover it.
    """
    whole = np.empty(type_.shape, np.dtype(type_.dtype))
    covered = 0
    for block in blocks:
        whole[tuple(slice(*part) for part in block.tile)] = block.data
        covered += block.data.size
    assert covered == whole.size, f"blocks cover {covered} of {whole.size} elements"
    return whole


def meet(rank: int, own: Sequence[int], peer: int, others: Sequence[int]) -> bool:
    """Whether two hosts of different groups hold some same part of all that crosses.

    Each holds an equal share of it, in the order of the hosts of its group.
    """
    here, there = own.index(rank), others.index(peer)
    starts_before = here * len(others) < (there + 1) * len(own)
    return starts_before and there * len(own) < (here + 1) * len(others)
