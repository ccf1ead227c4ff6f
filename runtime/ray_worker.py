"""The actor of one host: keeps arrays, and runs its instruction lists.

jax finds its devices when the driver says so, after the settings that it reads once.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

from .instructions import Held
from .ray_job import (
    Block,
    Blocks,
    Crossing,
    Failure,
    HostFacts,
    HostJob,
    StepReply,
    StepRequest,
    own_versions,
)
from .ray_programs import (
    blocks_of,
    brought,
    copied,
    copied_blocks,
    load_job,
    place,
    sharding_of,
)
from .ray_sources import SourceOnHost, taken
from .ray_transport import Address, PeerLost, Transport, answer_calls
from .stored_arrays import Digest, Writing, moved, read_onto, write_tile
from .timeline import Event
from .transfers import Transfer, plan_transfer
from .worker import Lane, Step


class CompiledJob:
    """A job of this host, compiled."""

    def __init__(self, data: HostJob) -> None:
        crossing = data.crossing.items()
        self.data, self._program = data, load_job(data)
        # Between submeshes of this host, or stages of one submesh, which get a copy.
        self._transfers = {k: _transfer(each) for k, each in crossing if each.is_inside}
        self._unfinished = tuple(deque[Any]() for _ in data.lists)
        self._threads = ThreadPoolExecutor(len(data.lists) or 1, "autopar-submesh")

    def run(
        self, transport: Transport, is_recorded: bool, inputs: Mapping[Held, Any]
    ) -> tuple[dict[Held, Any], tuple[Event, ...]]:
        """What the submeshes hold in the end, and what was recorded.

        Raises:
          Exception: the first one of any lane. Others may still wait for other hosts:
            this process can only be ended then.
        """
        lists, submesh_of = self.data.lists, self.data.submesh_of_stage
        here = {list_.submesh for list_ in lists}
        elsewhere = {stage for stage, on in submesh_of.items() if on not in here}
        # Events are in seconds of the host's own clock.
        shared = self._program, self._transfers, is_recorded
        step = Step(*shared, 0.0, transport, elsewhere)
        lanes = [
            Lane(
                step,
                list_,
                unfinished,
                {k: x for k, x in inputs.items() if submesh_of[k[0]] == list_.submesh},
            )
            for list_, unfinished in zip(lists, self._unfinished, strict=True)
        ]
        if len(lanes) == 1:
            lanes[0].run()
        else:
            running = {self._threads.submit(lane.run) for lane in lanes}
            while running and step.error is None:
                _, running = wait(running, return_when=FIRST_COMPLETED)
        if step.error is not None:
            raise step.error
        transport.wait_for_readers()
        held = {key: array for lane in lanes for key, array in lane.held.items()}
        return held, tuple(event for lane in lanes for event in lane.events)


def _transfer(crossing: Crossing) -> Transfer:
    source, target = crossing.source, crossing.target
    sides = sharding_of(source), sharding_of(target)
    return Transfer(plan_transfer(source.shape, np.dtype(source.dtype), *sides))


def _reported(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose exceptions come back as `Failure`: they need not be picklable."""

    @wraps(method)
    def call(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except Exception as error:
            return _failure(method.__name__, error)

    return call


def _read(actor: Any, rank: int, number: int) -> list[Any]:
    """The parts that another host offers this one, which has a rank."""
    import ray
    from ray.exceptions import RayActorError

    try:
        return ray.get(actor.offered_parts.remote(rank, number))
    except RayActorError as error:
        raise PeerLost(f"the host that offered {number} is gone") from error


def _failure(method: str, error: BaseException) -> Failure:
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    text = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {error}{notes}"
    return Failure(method, summary, text, isinstance(error, PeerLost))


class HostWorker:
    """One host's part of a cluster; made by the driver as a Ray actor.

    Steps come one at a time; `ping` is answered meanwhile, on another thread.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        self._sources: dict[int, SourceOnHost] = {}
        self._copies: dict[int, dict[int, tuple[Block, ...]]] = {}
        self._jobs: dict[int, CompiledJob] = {}
        self._transport: Transport
        self._lock = threading.Lock()

    def ping(self) -> float:
        """The host's monotonic clock, in seconds."""
        return perf_counter()

    @_reported
    def facts(self) -> HostFacts:
        """Address, a port that nobody listens at now, and versions."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            where = ray.util.get_node_ip_address(), probe.getsockname()[1]
        return HostFacts(*where, os.getpid(), **own_versions())

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
        """Where other hosts, and the driver, connect to."""
        self._transport = Transport(address, secret)
        return self._transport.control_address

    @_reported
    def take_calls(self) -> None:
        """Answer calls over the connection that the driver makes next."""

        def answer(method: str, given: Sequence[Any]) -> Any:
            return getattr(self, method)(*given)

        answer_calls(self._transport.listener, self._transport.secret, answer)

    @_reported
    def connect(
        self, rank: int, peers: Mapping[int, tuple[Address, Any]]
    ) -> dict[int, str]:
        """Connect to hosts of other groups, given their actors; all do so at once.

        Returns why values of some of these come through Ray's object store.
        """

        def read(peer: int, number: int) -> list[Any]:
            return _read(peers[peer][1], rank, number)

        addresses = {peer: address for peer, (address, _) in peers.items()}
        return self._transport.connect(rank, addresses, read)

    def offered_parts(self, peer: int, number: int) -> list[Any]:
        """What another host reads of what this one offers it, through Ray."""
        return self._transport.offered_parts(peer, number)

    @_reported
    def load(self, number: int, job: HostJob) -> None:
        """Compile what a job needs."""
        with self._lock:
            self._transport.plan(number, job.crossing)
            self._jobs[number] = CompiledJob(job)

    @_reported
    def step(self, packed: bytes, fed: Mapping[int, Blocks]) -> StepReply:
        """Run the step of a pickled `StepRequest`; returns when all of it is there."""
        request: StepRequest = pickle.loads(packed)
        with self._lock:
            self._free(request.freed)
            job = self._jobs[request.job]
            self._transport.use(request.job)
            inputs = self._inputs(job.data, request, fed)
            held, events = job.run(self._transport, request.is_recorded, inputs)
            keys = job.data.ends
            ends = {i: held[keys[i]] for i in (*request.kept, *request.returned)}
            jax.block_until_ready(list(ends.values()))
            held_numbers = {*request.held.values()}
            donated = tuple(n for n in held_numbers if self._arrays[n].is_deleted())
            self._free(donated)
            for i, number in request.kept.items():
                self._arrays[number] = ends[i]
            returned = {i: blocks_of(ends[i]) for i in request.returned}
            return StepReply(returned, donated, events)

    @_reported
    def fetch(self, number: int, freed: Sequence[int]) -> Blocks:
        """This host's part of an array."""
        with self._lock:
            self._free(freed)
            return blocks_of(self._arrays[number])

    @_reported
    def open_source(
        self, number: int, packed: bytes, num_ahead: int, end: int | None
    ) -> None:
        """Keep a source of data under a number."""
        with self._lock:
            self._sources[number] = SourceOnHost.of(packed, num_ahead, end)

    @_reported
    def copy_out(self, ticket: int, numbers: Sequence[int]) -> None:
        """Copy this host's shards of some arrays, which may be donated then."""
        with self._lock:
            blocks = {n: copied_blocks(self._arrays[n]) for n in dict.fromkeys(numbers)}
            self._copies[ticket] = blocks

    @_reported
    def write_out(
        self, ticket: int, writings: Sequence[Writing]
    ) -> dict[str, Digest] | str:
        """Write what was copied, while steps go on; or say why it could not be."""
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

    def _free(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._arrays.pop(number, None)
            if number in self._sources:
                self._sources.pop(number).close()

    def _inputs(
        self, job: HostJob, request: StepRequest, fed: Mapping[int, Blocks]
    ) -> dict[Held, Any]:
        """What the lanes hold at first, each array where the job wants it."""
        held: dict[Held, Any] = {}
        seen: set[int] = set()
        loaded = taken(self._sources, request.loaded, job.inputs.values())
        for i, (key, type_) in enumerate(job.inputs.items()):
            if i in fed:
                held[key] = place(fed[i], type_)
            elif i in request.stored:
                stored, home = request.stored[i], sharding_of(type_)
                held[key] = read_onto(stored, home, type_.dtype)
            elif i in loaded:
                held[key] = loaded[i]
            else:
                number = request.held[i]
                array = brought(self._arrays[number], type_)
                if number in seen:  # one buffer may be donated once
                    array = copied(array, array.sharding)
                seen.add(number)
                held[key] = array
        return held
