"""The driver's side of a Ray cluster: groups of workers, and calls to them.

After any fault all workers are killed: they wait for each other.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.errors import HostLostError, WorkerError
from autopar.lowering.exported_program import ShardedType

from .ray_actors import START_SECONDS, start_actors
from .ray_arrays import Block, Numbers, RemoteArray, cut_for_hosts, join_blocks
from .ray_heartbeat import start_heartbeat
from .ray_hosts import import_ray
from .ray_job import HostFacts, own_versions
from .ray_watch import Watch
from .stored_arrays import Digest, Writing

_log = logging.getLogger("autopar")
_START_TRIES = 3  # joining fails by death of the process: a port taken, for one
_CONFIG = (
    "jax_enable_x64",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@dataclass
class Traffic:
    """Bytes of arrays that passed through the driver, and the largest of them."""

    to_hosts: int = 0
    from_hosts: int = 0
    largest_array: int = 0

    def count(self, argument: Any, is_sent: bool) -> None:
        """Add the arrays in the arguments of a call, or in what it returned."""
        for nbytes in _array_bytes(argument):
            self.largest_array = max(self.largest_array, nbytes)
            self.to_hosts += nbytes if is_sent else 0
            self.from_hosts += 0 if is_sent else nbytes


@dataclass(eq=False)
class Workers:
    """One actor on each host of a cluster, in `num_groups` groups of equal size.

    The hosts of a group are one JAX process group; ranks count host by host, group by
    group. Closed by `close`, when it is collected, and when the process ends.

    Raises:
      HostLostError: a host did not start.
      WorkerError: an exception on a host, or versions differ.
    """

    cluster: Cluster
    num_groups: int
    traffic: Traffic = field(default_factory=Traffic)
    lost: str | None = None
    lost_rank: int | None = None
    facts: tuple[HostFacts, ...] = ()

    def __post_init__(self) -> None:
        assert self.cluster.ray_hosts is not None, "the cluster is one of Ray"
        self._hosts = self.cluster.ray_hosts
        self._numbers = Numbers()
        # Hosts of a group must start their steps in one order, or wait for each other.
        self.one_step = threading.Lock()
        self._jobs = 0
        self._tickets = 0
        for tries_left in reversed(range(_START_TRIES)):
            self._actors, self._close = start_actors(self.cluster, self)
            try:
                self._join()
                start_heartbeat(self, self._actors, self._hosts.silent_seconds)
                return
            except HostLostError:
                self._close()
                if not tries_left:
                    raise
                self.lost = self.lost_rank = None

    @property
    def hosts_per_group(self) -> int:
        """Number of hosts of each group."""
        return self.cluster.num_hosts // self.num_groups

    @property
    def devices_per_group(self) -> int:
        """Number of devices of each group."""
        return self.hosts_per_group * self.cluster.devices_per_host

    def close(self, reason: str = "they were closed.") -> None:
        """End the workers and forget their arrays; does nothing the second time."""
        self.lost = self.lost or reason
        self._close()

    def lose(self, rank: int, reason: str) -> None:
        """Note that a host was lost, and end all workers."""
        if self.lost is None:
            _log.warning("%s All workers are ended.", reason)
            self.lost_rank = rank
            self.close(reason)

    def ranks_of(self, group: int) -> range:
        """The ranks of a group's hosts."""
        return range(group * self.hosts_per_group, (group + 1) * self.hosts_per_group)

    def group_of(self, rank: int) -> int:
        """The group of a host."""
        return rank // self.hosts_per_group

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
            cut_for_hosts(array, type_, self.hosts_per_group)
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
        self._check()
        ray = import_ray()
        refs = {}
        for rank, given in sorted(arguments.items()):
            self.traffic.count(given, is_sent=True)
            refs[getattr(self._actors[rank], method).remote(*given)] = rank
        try:
            limit = seconds or self._hosts.step_seconds
            silent = silent_seconds or self._hosts.silent_seconds
            watch = Watch(ray, method, limit, silent, self._ping, self.name)
            replies = watch.gather(refs)
        except BaseException as error:
            self._check()  # another call may know better what ended them
            is_host = isinstance(error, HostLostError)
            if is_host or (isinstance(error, WorkerError) and error.is_echo):
                self.lost_rank = error.rank
            self.close(f"{type(error).__name__}: {error}".splitlines()[0])
            raise
        for reply in replies.values():
            self.traffic.count(reply, is_sent=False)
        return [replies[rank] for rank in sorted(replies)]

    def _check(self) -> None:
        if self.lost is None:
            return
        text = f"The workers of this step are gone: {self.lost}"
        if self.lost_rank is None:
            raise RuntimeError(text)
        raise HostLostError(text, self.lost_rank)

    def _call_at_start(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]]
    ) -> list[Any]:
        """A call to hosts that may still be starting, and give no sign of life."""
        return self.call(method, arguments, START_SECONDS, START_SECONDS)

    def _ping(self, ranks: Sequence[int]) -> dict[Any, int]:
        """Ask hosts for a sign of life: the answers to come, and whose they are."""
        return {self._actors[rank].ping.remote(): rank for rank in ranks}

    def name(self, rank: int) -> str:
        """A host in words."""
        where = f" at {self.facts[rank].address}" if self.facts else ""
        group = f" (stage {self.group_of(rank)})" if self.num_groups > 1 else ""
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

    def _join(self) -> None:
        everyone = range(self.cluster.num_hosts)
        nothing = {rank: () for rank in everyone}
        self.facts = tuple(self._call_at_start("facts", nothing))
        check_alike(self.facts)
        config = {name: getattr(jax.config, name) for name in _CONFIG}
        members = self.hosts_per_group
        arguments = {}
        for group in range(self.num_groups):
            first = self.ranks_of(group)[0]
            (port,) = self._call_at_start("free_port", {first: ()})
            coordinator = f"{self.facts[first].address}:{port}"
            for i, rank in enumerate(self.ranks_of(group)):
                devices = self.cluster.devices_per_host
                arguments[rank] = (config, coordinator, members, i, devices)
        self._call_at_start("join", arguments)
        if self.num_groups > 1:
            self._connect(everyone)

    def _connect(self, everyone: Sequence[int]) -> None:
        """Rank i of a group is connected to rank i of every other group."""
        secret = secrets.token_bytes(32)
        listening = {rank: (self.facts[rank].address, secret) for rank in everyone}
        addresses = self._call_at_start("listen", listening)
        arguments = {}
        for rank in everyone:
            own = self.group_of(rank)
            index = rank - self.ranks_of(own)[0]
            peers = {
                group: addresses[self.ranks_of(group)[index]]
                for group in range(self.num_groups)
                if group != own
            }
            arguments[rank] = (own, peers)
        self._call_at_start("connect", arguments)


_live: weakref.WeakValueDictionary[tuple[Cluster, int], Workers] = (
    weakref.WeakValueDictionary()
)


def workers_of(cluster: Cluster, num_groups: int) -> Workers:
    """The workers of a cluster in so many groups: those at work, or new ones."""
    key = (cluster, num_groups)
    found = _live.get(key)
    if found is None or found.lost is not None:
        found = _live[key] = Workers(cluster, num_groups)
    return found


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


def _array_bytes(value: Any) -> list[int]:
    """The sizes of the arrays in what is sent or returned."""
    if isinstance(value, Mapping):
        return [n for each in value.values() for n in _array_bytes(each)]
    if isinstance(value, tuple | list):
        return [n for each in value for n in _array_bytes(each)]
    if hasattr(value, "nbytes") and not isinstance(value, ShardedType):
        return [value.nbytes]
    if hasattr(value, "__dataclass_fields__"):
        return [n for each in vars(value).values() for n in _array_bytes(each)]
    return []
