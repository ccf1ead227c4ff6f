"""The driver's side of a Ray cluster: groups of workers, and calls to them.

After any fault all workers are killed: they wait for each other.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.clusters.ray_hosts import HostGroups
from autopar.errors import HostLostError, WorkerError
from autopar.lowering.exported_program import ShardedType

from .ray_actors import START_SECONDS, start_actors
from .ray_arrays import Block, Numbers, RemoteArray, cut_for_hosts, join_blocks
from .ray_channel import DirectAnswers
from .ray_heartbeat import start_heartbeat
from .ray_hosts import import_ray
from .ray_job import HostFacts
from .ray_pending import PendingStep
from .ray_sources import SourceNumbers
from .ray_start import join_hosts
from .ray_traffic import Traffic
from .ray_watch import HUNG_SECONDS, Watch
from .stored_arrays import Digest, Writing

_log = logging.getLogger("autopar")
# Calls that a host answers in their order; the others may be made beside them.
_IN_ORDER = frozenset(
    {"load", "open_source", "step", "fetch", "store", "copy_out", "kept"}
)
_START_TRIES = 3  # joining fails by death of the process: a port taken, for one


@dataclass(eq=False)
class Begun:
    """A call under way; `replies` are what hosts returned, once that was read."""

    watch: Watch
    refs: Mapping[Any, int]
    is_in_order: bool
    replies: dict[int, Any] | None = None


@dataclass(eq=False)
class Workers:
    """One actor on each host of a cluster, in groups of so many hosts.

    The hosts of a group are one JAX process group; ranks count host by host, group by
    group. Closed by `close`, when it is collected, and when the process ends.

    Raises:
      HostLostError: a host did not start.
      WorkerError: an exception on a host, or versions differ.
    """

    cluster: Cluster
    num_hosts: tuple[int, ...]
    traffic: Traffic = field(default_factory=Traffic)
    lost: str | None = None
    lost_rank: int | None = None
    facts: tuple[HostFacts, ...] = ()

    def __post_init__(self) -> None:
        assert self.cluster.ray_hosts is not None, "the cluster is one of Ray"
        self._hosts = self.cluster.ray_hosts
        groups = HostGroups(self.num_hosts, ())
        self._ranks = [groups.ranks_of(group) for group in range(self.num_groups)]
        self._numbers = Numbers()
        # Hosts of a group must start their steps in one order, or wait for each other.
        self.one_step = threading.Lock()
        self._one_call = threading.Lock()
        self._connections: dict[int, Connection] = {}
        self._stop_heartbeat: Callable[[], Any] | None = None
        self._in_order: deque[Begun] = deque()  # begun, and their replies not read yet
        self._under_way: deque[PendingStep] = deque()
        self.sources: SourceNumbers = weakref.WeakKeyDictionary()
        self._jobs = 0
        self._tickets = 0
        for tries_left in reversed(range(_START_TRIES)):
            self._actors, self._close = start_actors(self.cluster, self)
            try:
                self._connections = join_hosts(self, self._actors)
                silent_seconds = self._hosts.silent_seconds
                stop = start_heartbeat(self, self._actors, silent_seconds)
                self._stop_heartbeat = weakref.finalize(self, stop)
                return
            except HostLostError:
                self._close()
                if not tries_left:
                    raise
                self.lost = self.lost_rank = None

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.num_hosts)

    def close(self, reason: str = "they were closed.") -> None:
        """End the workers and forget their arrays; does nothing the second time."""
        self.lost = self.lost or reason
        if self._stop_heartbeat is not None:
            self._stop_heartbeat()
        self._close()

    def lose(self, rank: int, reason: str) -> None:
        """Note that a host was lost, and end all workers."""
        if self.lost is None:
            _log.warning("%s All workers are ended.", reason)
            self.lost_rank = rank
            self.close(reason)

    def let_run(self, step: PendingStep, may_wait: bool) -> bool:
        """Whether the driver may go on while a step runs; waits for older ones.

        It may not where `may_wait` is false, or steps go through Ray.
        """
        steps_ahead = self._hosts.steps_ahead if self._connections else 0
        if may_wait and steps_ahead:
            self._under_way.append(step)
        while len(self._under_way) > (steps_ahead if may_wait else 0):
            self._under_way.popleft().wait()
        return may_wait and steps_ahead > 0

    def ranks_of(self, group: int) -> range:
        """The ranks of a group's hosts."""
        return self._ranks[group]

    def group_of(self, rank: int) -> int:
        """The group of a host."""
        return next(i for i, ranks in enumerate(self._ranks) if rank in ranks)

    def new_job(self) -> int:
        """A number for a job."""
        self._jobs += 1
        return self._jobs

    def fresh_numbers(self, count: int) -> range:
        """Numbers for arrays that the workers are to keep."""
        return self._numbers.fresh(count)

    def forget(self, number: int, group: int) -> None:
        """Free an array with the next call to its group."""
        self._numbers.drop(number, group)

    def freed_by_rank(self, groups: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """For each host of some groups, the numbers to free; each is told once."""
        freed = {group: self._numbers.take_dropped(group) for group in groups}
        return {rank: freed[group] for group in groups for rank in self.ranks_of(group)}

    def fetch(self, number: int, group: int, type_: ShardedType) -> np.ndarray:
        """The array that a group keeps under a number."""
        freed = self.freed_by_rank([group])
        calls = {rank: (number, freed[rank]) for rank in self.ranks_of(group)}
        parts: list[tuple[Block, ...]] = self.call("fetch", calls)
        return join_blocks(
            type_.shape, type_.dtype, [b for part in parts for b in part]
        )

    def store(
        self, arrays: Sequence[np.ndarray], types: Sequence[ShardedType], group: int
    ) -> list[RemoteArray]:
        """Send arrays to a group, each host its own shards."""
        numbers = self.fresh_numbers(len(arrays))
        shards = [
            cut_for_hosts(array, type_, self.num_hosts[group])
            for array, type_ in zip(arrays, types, strict=True)
        ]
        freed = self.freed_by_rank([group])
        self.call(
            "store",
            {
                rank: (
                    {n: each[i] for n, each in zip(numbers, shards, strict=True)},
                    freed[rank],
                )
                for i, rank in enumerate(self.ranks_of(group))
            },
        )
        return [
            RemoteArray(self, group, number, type_)
            for number, type_ in zip(numbers, types, strict=True)
        ]

    def copy_out(self, arrays: Sequence[RemoteArray]) -> int:
        """Have every host copy its shards of some arrays; the ticket to write them."""
        for array in arrays:
            array.check()
        self._tickets += 1
        self.call(
            "copy_out",
            {
                rank: (self._tickets, [a.number for a in arrays if a.group == group])
                for group in sorted({array.group for array in arrays})
                for rank in self.ranks_of(group)
            },
        )
        return self._tickets

    def write_out(
        self, ticket: int, writings: Sequence[tuple[int, Writing]]
    ) -> dict[str, Digest]:
        """Have every host write what it copied; each writing is one of a group.

        Raises:
          OSError: a host could not; the workers go on.
        """
        calls = {
            rank: (ticket, [each for where, each in writings if where == group])
            for group in sorted({group for group, _ in writings})
            for rank in self.ranks_of(group)
        }
        parts: list[dict[str, Digest] | str] = self.call("write_out", calls)
        for rank, part in zip(sorted(calls), parts, strict=True):
            if isinstance(part, str):
                raise OSError(f"{self.name(rank)} could not write: {part}")
        good = (part for part in parts if isinstance(part, dict))
        return {name: each for part in good for name, each in part.items()}

    def kept(self) -> list[tuple[int, ...]]:
        """The numbers of the arrays on each host, after what is free is freed."""
        freed = self.freed_by_rank(range(self.num_groups))
        return self.call("kept", {rank: (freed[rank],) for rank in freed})

    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        seconds: float | None = None,
        silent_seconds: float | None = None,
    ) -> list[Any]:
        """Call a method on some hosts at once; what it returned, by ascending rank.

        By default a call may take as long as a step.

        Raises:
          HostLostError: a host died, fell silent, or took longer than `seconds`.
          WorkerError: an exception on a host.
          RuntimeError: the workers are gone already.
        """
        return self.finish(self.begin(method, arguments, seconds, silent_seconds))

    def begin(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        seconds: float | None = None,
        silent_seconds: float | None = None,
    ) -> Begun:
        """Tell some hosts to do something; as `call`, which waits for it besides.

        Raises:
          HostLostError, RuntimeError: the workers are gone already.
        """
        for given in arguments.values():
            self.traffic.count(given, is_sent=True)
        limits = (
            seconds or self._hosts.step_seconds,
            silent_seconds or self._hosts.silent_seconds,
        )
        is_direct = method in _IN_ORDER and bool(self._connections)
        with self._one_call if is_direct else nullcontext():
            self._check()
            make = self._call_directly if is_direct else self._call_through_ray
            with self._ending_workers():
                answers, refs = make(method, arguments)
            hung_seconds = silent_seconds or HUNG_SECONDS
            watch = Watch(answers, method, *limits, self._ping, self.name, hung_seconds)
            begun = Begun(watch, refs, is_direct)
            if is_direct:
                self._in_order.append(begun)
            return begun

    def finish(self, begun: Begun) -> list[Any]:
        """What the hosts returned, by ascending rank; see `call`."""
        with self._one_call if begun.is_in_order else nullcontext():
            while begun.replies is None:
                self._check()  # another call may have ended them meanwhile
                first = self._in_order[0] if begun.is_in_order else begun
                with self._ending_workers():
                    first.replies = first.watch.gather(first.refs)
                if begun.is_in_order:
                    self._in_order.popleft()
                for reply in first.replies.values():
                    self.traffic.count(reply, is_sent=False)
        return [begun.replies[rank] for rank in sorted(begun.replies)]

    @contextmanager
    def _ending_workers(self) -> Iterator[None]:
        """Ends all workers on an error, whose cause may be known better already."""
        try:
            yield
        except BaseException as error:
            self._check()
            is_host = isinstance(error, HostLostError)
            if is_host or (isinstance(error, WorkerError) and error.is_echo):
                self.lost_rank = error.rank
            self.close(f"{type(error).__name__}: {error}".splitlines()[0])
            raise

    def _call_through_ray(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]]
    ) -> tuple[Any, dict[Any, int]]:
        """Begin a call: where its answers come, and what stands for each host's."""
        refs = {
            getattr(self._actors[rank], method).remote(*given): rank
            for rank, given in sorted(arguments.items())
        }
        return import_ray(), refs

    def _call_directly(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]]
    ) -> tuple[Any, dict[Any, int]]:
        """As `_call_through_ray`, over connections of our own."""
        refs = {self._connections[rank]: rank for rank in sorted(arguments)}
        answers = DirectAnswers(lambda rank: self._actors[rank].ping.remote(), refs)
        for connection, rank in refs.items():
            answers.send(connection, (method, arguments[rank]))
        return answers, refs

    def _check(self) -> None:
        if self.lost is None:
            return
        text = f"The workers of this step are gone: {self.lost}"
        if self.lost_rank is None:
            raise RuntimeError(text)
        raise HostLostError(text, self.lost_rank)

    def _ping(self, ranks: Sequence[int]) -> dict[Any, int]:
        """Ask hosts for a sign of life: the answers to come, and whose they are."""
        return {self._actors[rank].ping.remote(): rank for rank in ranks}

    def name(self, rank: int) -> str:
        """A host in words."""
        where = f" at {self.facts[rank].address}" if self.facts else ""
        group = f" (group {self.group_of(rank)})" if self.num_groups > 1 else ""
        return f"host {rank}{where}{group}"

    def clock_offsets(self) -> list[float]:
        """What to add to each host's clock to get the driver's, to about 1 ms."""
        ray = import_ray()
        offsets = []
        for actor in self._actors:
            tries = []
            for _ in range(5):
                sent = time.perf_counter()
                there = ray.get(actor.ping.remote(), timeout=START_SECONDS)
                back = time.perf_counter()
                tries.append((back - sent, (sent + back) / 2 - there))
            offsets.append(min(tries)[1])
        return offsets


_live: weakref.WeakValueDictionary[tuple[Cluster, tuple[int, ...]], Workers] = (
    weakref.WeakValueDictionary()
)


def workers_of(cluster: Cluster, num_hosts: tuple[int, ...]) -> Workers:
    """The workers of a cluster in groups of so many hosts: those at work, or new ones.

    Hosts beyond those of the groups are left alone.
    """
    if sum(num_hosts) < cluster.num_hosts:
        cluster = cluster.with_hosts(sum(num_hosts))
    key = (cluster, num_hosts)
    found = _live.get(key)
    if found is None or found.lost is not None:
        found = _live[key] = Workers(cluster, num_hosts)
    return found


def end_live_workers() -> None:
    """End all workers of this process, before it leaves its Ray cluster."""
    for workers in list(_live.values()):
        workers.close()
