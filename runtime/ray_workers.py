"""The driver's side of a Ray cluster: groups of workers, and calls to them.

After any fault all workers are killed: they wait for each other.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.clusters.ray_discovery import import_ray
from autopar.clusters.ray_hosts import HostGroups
from autopar.errors import HostLostError, WorkerError
from autopar.lowering.exported_program import ShardedType
from autopar.state.examples import HostSource

from .ray_actors import START_SECONDS, start_actors
from .ray_arrays import PendingStep, RemoteArray
from .ray_channel import Address, Calls, dial
from .ray_job import Block, HostFacts, check_alike, join_blocks, meet
from .ray_watch import Heartbeat, Watch
from .stored_arrays import Digest, Writing

_log = logging.getLogger("autopar")
# Calls that a host answers in their order; the others may be made beside them.
_IN_ORDER = frozenset({"load", "open_source", "step", "fetch", "copy_out"})
_START_TRIES = 3  # joining fails by death of the process: a port taken, for one
_CONFIG = (
    "jax_enable_x64",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


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
    lost: str | None = None
    lost_rank: int | None = None
    facts: tuple[HostFacts, ...] = ()

    def __post_init__(self) -> None:
        assert self.cluster.ray_hosts is not None, "the cluster is one of Ray"
        self._hosts = self.cluster.ray_hosts
        groups = HostGroups(self.num_hosts, ())
        self.num_groups = len(self.num_hosts)
        self._ranks = [groups.ranks_of(group) for group in range(self.num_groups)]
        self._numbers = itertools.count()
        # Arrays that are free; the garbage collector adds some, so without a lock.
        self._dropped: deque[tuple[int, int]] = deque()
        # Hosts of a group must start their steps in one order, or wait for each other.
        self.one_step = threading.Lock()
        self._one_call = threading.Lock()
        self._direct: dict[int, Calls] = {}
        self._heartbeat: Heartbeat | None = None
        self._under_way: deque[PendingStep] = deque()
        # Under which number each group of hosts has a source of data.
        self.sources = weakref.WeakKeyDictionary[HostSource, dict[int, int]]()
        for tries_left in reversed(range(_START_TRIES)):
            self._actors, self._close = start_actors(self.cluster, self)
            try:
                self._join()
                break
            except HostLostError:
                self._close()
                if not tries_left:
                    raise
                self.lost = self.lost_rank = None
        hosts = len(self._actors)
        self._heartbeat = Heartbeat(self, hosts, self._hosts.silent_seconds)
        self._stop_heartbeat = weakref.finalize(self, self._heartbeat.stop)

    def _join(self) -> None:
        """Start JAX on every host, and connect them to each other and to the driver.

        Calls go through Ray where some host cannot be reached by a connection.
        """
        self.facts = tuple(self._start("facts"))
        check_alike(self.facts)
        config = {name: getattr(jax.config, name) for name in _CONFIG}
        arguments = {}
        for ranks in self._ranks:
            first = self.facts[ranks[0]]
            coordinator = f"{first.address}:{first.free_port}"
            for i, rank in enumerate(ranks):
                sizes = len(ranks), i, self.cluster.devices_per_host
                arguments[rank] = config, coordinator, *sizes
        self._start("join", arguments)
        secret = secrets.token_bytes(32)
        known = {i: (facts.address, secret) for i, facts in enumerate(self.facts)}
        addresses: list[Address] = self._start("listen", known)
        if self.num_groups > 1:
            self._connect(addresses)
        self._start("take_calls")
        try:
            connections = [dial(address, secret) for address in addresses]
        except OSError as error:
            _log.warning(
                "calls go through Ray, which takes longer, as a host cannot be reached "
                "by a connection: %s",
                error,
            )
            return
        self._direct = dict(enumerate(map(Calls, connections)))

    def _connect(self, addresses: Sequence[Address]) -> None:
        """Hosts that hold the same share of two groups are connected."""

        def peers(rank: int, own: range) -> list[int]:
            groups = [ranks for ranks in self._ranks if ranks != own]
            return [p for g in groups for p in g if meet(rank, own, p, g)]

        arguments = {
            rank: (rank, {p: (addresses[p], self._actors[p]) for p in peers(rank, own)})
            for own in self._ranks
            for rank in own
        }
        problems: list[dict[int, str]] = self._start("connect", arguments)
        for rank, each in enumerate(problems):
            for peer, problem in each.items():
                _log.warning(
                    "what %s reads of %s goes through Ray's object store, which takes "
                    "longer: %s",
                    *(self.name(rank), self.name(peer), problem),
                )

    def _start(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]] | None = None
    ) -> list[Any]:
        """A call to hosts that may still be starting, all without arguments."""
        given = arguments or {rank: () for ranks in self._ranks for rank in ranks}
        return self.call(method, given, START_SECONDS)

    def close(self, reason: str = "they were closed.") -> None:
        """End the workers and forget their arrays; does nothing the second time."""
        self.lost = self.lost or reason
        if self._heartbeat is not None:
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
        steps_ahead = self._hosts.steps_ahead if self._direct else 0
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

    def new_number(self) -> int:
        """One never given out before: for a job, or an array that workers keep."""
        return next(self._numbers)

    def forget(self, number: int, group: int) -> None:
        """Free an array with the next call to its group."""
        self._dropped.append((number, group))

    def freed_by_rank(self, groups: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """For each host of some groups, the numbers to free; each is told once."""
        taken = [self._dropped.popleft() for _ in range(len(self._dropped))]
        self._dropped.extend(each for each in taken if each[1] not in groups)
        freed = {g: tuple(n for n, group in taken if group == g) for g in groups}
        return {rank: freed[group] for group in groups for rank in self.ranks_of(group)}

    def source_number(self, source: HostSource, group: int) -> int:
        """The number under which a group has a source, which is sent if it is new.

        The group forgets it when it is collected here.
        """
        numbers = self.sources.setdefault(source, {})
        if group not in numbers:
            number = self.new_number()
            given = number, source.packed, source.num_ahead, source.end
            self.call("open_source", dict.fromkeys(self.ranks_of(group), given))
            numbers[group] = number
            weakref.finalize(source, self._dropped.append, (number, group))
            name = type(source.examples.source).__name__
            what = f"a {name} of {len(source.packed)} bytes"
            _log.info("hosts of group %d read examples from %s", group, what)
        return numbers[group]

    def fetch(self, number: int, group: int, type_: ShardedType) -> np.ndarray:
        """The array that a group keeps under a number."""
        freed = self.freed_by_rank([group])
        calls = {rank: (number, freed[rank]) for rank in self.ranks_of(group)}
        parts: list[tuple[Block, ...]] = self.call("fetch", calls)
        return join_blocks(
            type_.shape, type_.dtype, [b for part in parts for b in part]
        )

    def copy_out(self, arrays: Sequence[RemoteArray]) -> int:
        """Have every host copy its shards of some arrays; the ticket to write them."""
        for array in arrays:
            array.check()
        ticket = self.new_number()
        self.call(
            "copy_out",
            {
                rank: (ticket, [a.number for a in arrays if a.group == group])
                for group in sorted({array.group for array in arrays})
                for rank in self.ranks_of(group)
            },
        )
        return ticket

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

    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        seconds: float | None = None,
    ) -> list[Any]:
        """Call a method on some hosts at once; what it returned, by ascending rank.

        By default a call may take as long as a step.

        Raises:
          HostLostError: a host died, fell silent, or took longer than `seconds`.
          WorkerError: an exception on a host.
          RuntimeError: the workers are gone already.
        """
        return self.begin(method, arguments, seconds)()

    def begin(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        seconds: float | None = None,
    ) -> Callable[[], list[Any]]:
        """Tell some hosts to do something; gives what waits for it, as `call` does.

        Raises:
          HostLostError, RuntimeError: the workers are gone already.
        """
        answers: dict[Future[Any], int] = {}
        with self._one_call:
            self._check()
            with self._ending_workers():
                for rank, given in sorted(arguments.items()):
                    answers[self._begun(method, rank, given)] = rank
        watch = Watch(
            method,
            seconds or self._hosts.step_seconds,
            self._hosts.silent_seconds,
            self._silent_seconds,
            self.ping,
            self.name,
        )

        def finish() -> list[Any]:
            self._check()  # another call may have ended them meanwhile
            with self._ending_workers():
                replies = watch.gather(answers)
            return [replies[rank] for rank in sorted(replies)]

        return finish

    def _begun(self, method: str, rank: int, given: tuple[Any, ...]) -> Future[Any]:
        """A call to a host under way, over a connection of our own or through Ray."""
        if self._direct and method in _IN_ORDER:
            return self._direct[rank].begin(method, given)
        return getattr(self._actors[rank], method).remote(*given).future()

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

    def _check(self) -> None:
        if self.lost is None:
            return
        text = f"The workers of this step are gone: {self.lost}"
        if self.lost_rank is None:
            raise RuntimeError(text)
        raise HostLostError(text, self.lost_rank)

    def ping(self, rank: int) -> Future[Any]:
        """Ask a host for a sign of life."""
        return self._actors[rank].ping.remote().future()

    def _silent_seconds(self, rank: int) -> float:
        """For how long a host has given no sign of life, as far as is known."""
        heartbeat = self._heartbeat
        return 0.0 if heartbeat is None else heartbeat.silent_seconds(rank)

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
