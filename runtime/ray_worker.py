"""The actor of one host: keeps arrays, and runs its instruction lists.

jax finds its devices when the driver says so, after the settings that it reads once.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .instructions import Held
from .ray_arrays import Block, HostShards
from .ray_channel import Address, serve
from .ray_job import (
    Failure,
    HostFacts,
    HostJob,
    StepReply,
    StepRequest,
    own_versions,
)
from .ray_trap import Trap
from .stored_arrays import Digest, Writing, moved, read_onto, write_tile

if TYPE_CHECKING:
    from .ray_host_step import LoadedHostJob
    from .ray_programs import Resharding
    from .ray_reading import SourceOnHost
    from .ray_transport import Transport


def _reported(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose exceptions come back as `Failure`: they need not be picklable."""

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            return _failure(error)

    return call


def _read(actor: Any, rank: int, number: int) -> list[Any]:
    """The parts that another host offers this one, which has a rank."""
    import ray
    from ray.exceptions import RayActorError

    from .ray_offers import PeerLost

    try:
        return ray.get(actor.offered_parts.remote(rank, number))
    except RayActorError as error:
        raise PeerLost(f"the host that offered {number} is gone") from error


def _failure(error: BaseException) -> Failure:
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    text = "".join(traceback.format_exception(error))
    is_echo = type(error).__name__ == "PeerLost"
    return Failure(f"{type(error).__name__}: {error}{notes}", text, is_echo)


class HostWorker:
    """One host's part of a cluster; made by the driver as a Ray actor.

    Steps come one at a time; `ping` is answered meanwhile, on another thread.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        self._sources: dict[int, SourceOnHost] = {}
        self._copies: dict[int, dict[int, tuple[Block, ...]]] = {}
        self._jobs: dict[int, LoadedHostJob] = {}
        self._transport: Transport | None = None
        self._resharding: Resharding | None = None
        self._lock = threading.Lock()
        self._trap: Trap | None = None

    def ping(self) -> float:
        """The host's monotonic clock, in seconds."""
        return perf_counter()

    def set_trap(self, trap: Trap) -> None:
        """Have this process meet a fault at some point of what it does next."""
        self._trap = trap

    def _reach(self, point: str) -> None:
        trap = self._trap
        if trap is not None and trap.point == point:
            self._trap = None
            trap.spring()

    def wait(self, seconds: float) -> None:
        """Does nothing for a while, as a worker in a hung collective."""
        time.sleep(seconds)

    @_reported
    def facts(self) -> HostFacts:
        """Address and versions."""
        import ray

        address = ray.util.get_node_ip_address()
        return HostFacts(address, os.getpid(), **own_versions())

    def free_port(self) -> int:
        """A port that nobody listens at now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    @_reported
    def join(
        self,
        config: Mapping[str, Any],
        coordinator: str | None,
        num_processes: int,
        rank: int,
        num_devices: int,
    ) -> None:
        """Start jax, as one process of a group if it has several.

        Raises:
          RuntimeError: the host has other devices than was said.
        """
        import jax

        from .ray_programs import Resharding

        self._resharding = Resharding()
        for name, value in config.items():
            jax.config.update(name, value)
        if num_processes > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
            # It takes SIGTERM, so that workers survive their Ray cluster.
            jax.config.update("jax_enable_preemption_service", False)
            jax.distributed.initialize(
                coordinator,
                num_processes,
                rank,
                cluster_detection_method="deactivate",
                heartbeat_timeout_seconds=5,
            )
        found = len(jax.local_devices())
        if found != num_devices:
            raise RuntimeError(
                f"A host has the devices that Ray says it has, but jax finds {found} "
                f"of platform {jax.default_backend()} and not {num_devices}; pass "
                f"devices_per_host={found} to Cluster.ray()."
            )

    @_reported
    def listen(self, address: str, secret: bytes) -> Address:
        """Start the transfers between groups; where other hosts connect to."""
        from .ray_transport import Transport

        self._transport = Transport(address, secret)
        return self._transport.control_address

    @_reported
    def take_calls(self, address: str, secret: bytes) -> Address:
        """Answer calls over a connection of the driver's; where it connects to."""
        return serve(address, secret, lambda name, given: getattr(self, name)(*given))

    @_reported
    def connect(
        self, rank: int, peers: Mapping[int, tuple[Address, Any]]
    ) -> dict[int, str]:
        """Connect to hosts of other groups, given their actors; all do so at once.

        Returns why values of some of these come through Ray's object store.
        """
        from .ray_transport import Peer

        assert self._transport is not None, "listen comes first"
        others = {
            peer: Peer(address, partial(_read, actor, rank))
            for peer, (address, actor) in peers.items()
        }
        return self._transport.connect(rank, others)

    def offered_parts(self, peer: int, number: int) -> list[Any]:
        """What another host reads of what this one offers it, through Ray."""
        assert self._transport is not None, "who is offered something is connected"
        return self._transport.offered_parts(peer, number)

    @_reported
    def load(self, number: int, job: HostJob) -> None:
        """Compile what a job needs."""
        from .ray_host_step import LoadedHostJob

        self._reach("load")
        with self._lock:
            if self._transport is not None:
                self._transport.plan(number, job.crossing)
            self._jobs[number] = LoadedHostJob.of(job)

    @_reported
    def step(self, packed: bytes, fed: Mapping[int, HostShards]) -> StepReply:
        """Run the step of a pickled `StepRequest`; returns when all of it is there."""
        import jax

        from .ray_host_step import HostStep
        from .ray_programs import blocks_of

        request: StepRequest = pickle.loads(packed)
        with self._lock:
            self._free(request.freed)
            job = self._jobs[request.job]
            if self._transport is not None:
                self._transport.use(request.job)
            step = HostStep(job, self._transport, request.is_recorded, self._reach)
            held, events = job.run(step, self._inputs(job.data, request, fed))
            keys = job.data.ends
            ends = {i: held[keys[i]] for i in (*request.kept, *request.returned)}
            jax.block_until_ready(list(ends.values()))
            donated = self._forget_donated(request.held.values())
            for i, number in request.kept.items():
                self._arrays[number] = ends[i]
            returned = {i: blocks_of(ends[i]) for i in request.returned}
            return StepReply(returned, donated, events)

    @_reported
    def fetch(self, number: int, freed: Sequence[int]) -> tuple[Block, ...]:
        """This host's part of an array."""
        from .ray_programs import blocks_of

        with self._lock:
            self._free(freed)
            return blocks_of(self._arrays[number])

    @_reported
    def store(self, shards: Mapping[int, HostShards], freed: Sequence[int]) -> None:
        """Keep arrays under their numbers."""
        from .ray_programs import place

        with self._lock:
            self._free(freed)
            self._arrays.update({n: place(each) for n, each in shards.items()})

    @_reported
    def open_source(
        self, number: int, packed: bytes, num_ahead: int, end: int | None
    ) -> None:
        """Keep a source of data under a number."""
        from .ray_reading import SourceOnHost

        with self._lock:
            self._sources[number] = SourceOnHost.of(packed, num_ahead, end)

    @_reported
    def copy_out(self, ticket: int, numbers: Sequence[int]) -> None:
        """Copy this host's shards of some arrays, which may be donated then."""
        from .ray_programs import copied_blocks

        with self._lock:
            blocks = {n: copied_blocks(self._arrays[n]) for n in dict.fromkeys(numbers)}
            self._copies[ticket] = blocks

    @_reported
    def write_out(
        self, ticket: int, writings: Sequence[Writing]
    ) -> dict[str, Digest] | str:
        """Write what was copied, while steps go on; or say why it could not be."""
        self._reach("save")
        copies = self._copies.pop(ticket)
        digests: dict[str, Digest] = {}
        try:
            for writing in writings:
                for block in copies[writing.number]:
                    tile = moved(block.tile, writing.first_row)
                    digests |= write_tile(Path(writing.path), tile, block.data)
        except (ImportError, OSError, ValueError) as error:  # tensorstore: the last
            return f"{type(error).__name__}: {error}"
        return digests

    @_reported
    def kept(self, freed: Sequence[int]) -> tuple[int, ...]:
        """The numbers of all arrays that are kept."""
        with self._lock:
            self._free(freed)
            return tuple(self._arrays)

    def _free(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._arrays.pop(number, None)
            if number in self._sources:
                self._sources.pop(number).close()

    def _inputs(
        self, job: HostJob, request: StepRequest, fed: Mapping[int, HostShards]
    ) -> dict[Held, Any]:
        """What the lanes hold at first, each array where the job wants it."""
        from .ray_programs import place, sharding_of
        from .ray_reading import taken

        resharding = self._resharding
        assert resharding is not None, "join comes first"
        held: dict[Held, Any] = {}
        seen: set[int] = set()
        loaded = taken(self._sources, request.loaded, job.inputs.values())
        for i, (key, type_) in enumerate(job.inputs.items()):
            if i in fed:
                held[key] = place(fed[i])
            elif i in request.stored:
                stored, home = request.stored[i], sharding_of(type_)
                held[key] = read_onto(stored, home, type_.dtype)
            elif i in loaded:
                held[key] = loaded[i]
            else:
                number = request.held[i]
                array = resharding.bring(self._arrays[number], type_)
                if number in seen:  # one buffer may be donated once
                    array = resharding.copy(array, array.sharding)
                seen.add(number)
                held[key] = array
        return held

    def _forget_donated(self, numbers: Any) -> tuple[int, ...]:
        donated = {n for n in numbers if self._arrays[n].is_deleted()}
        self._free(tuple(donated))
        return tuple(sorted(donated))
