"""What the driver tells a host: the job it runs each step, and one step of it; data."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from autopar.errors import WorkerError
from autopar.lowering.exported_program import ExportedProgram, ShardedType

from .instructions import Held, InstructionList
from .ray_arrays import Block, HostShards
from .ray_crossing import Crossing
from .stored_arrays import StoredArray
from .timeline import Event


@dataclass(frozen=True)
class StageCode:
    """A stage program as bytes; `constants` are the host's part of its constants."""

    stage: int
    code: ExportedProgram
    constants: tuple[HostShards, ...]


@dataclass(frozen=True)
class HostJob:
    """All that one host runs a step.

    `lists` has what each of its submeshes does, `programs` those it runs, by their
    number there. `inputs` are the values it holds when a step
    begins, `ends` what it may be asked for when the step is done; a step names both by
    position. `zeros` are the first values of gradients. `crossing` has each slot that
    this host sends or receives, by the stage that it is sent to.
    """

    name: str
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

    returned: Mapping[int, tuple[Block, ...]]
    donated: tuple[int, ...]
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Failure:
    """An exception on a host as text; `is_echo` if another host's is its cause."""

    summary: str
    traceback: str
    is_echo: bool = False


@dataclass(frozen=True)
class HostFacts:
    """What a worker says of itself: versions must be alike on all hosts."""

    address: str
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
