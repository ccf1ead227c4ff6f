"""Make started actors the process groups of a cluster, connected to each other."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import jax

from autopar.clusters.cluster import Cluster

from .ray_actors import START_SECONDS
from .ray_channel import dial
from .ray_crossing import meet
from .ray_job import HostFacts, check_alike

_log = logging.getLogger("autopar")
_CONFIG = (
    "jax_enable_x64",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


class Starting(Protocol):
    """The workers of a cluster while they start."""

    cluster: Cluster
    num_hosts: tuple[int, ...]
    facts: tuple[HostFacts, ...]

    def ranks_of(self, group: int) -> range: ...
    def group_of(self, rank: int) -> int: ...
    def name(self, rank: int) -> str: ...
    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        seconds: float | None = None,
        silent_seconds: float | None = None,
    ) -> list[Any]: ...


def join_hosts(workers: Starting, actors: Sequence[Any]) -> dict[int, Connection]:
    """Start JAX on every host, and connect them; the driver's connection to each.

    There is none to any host where one can be reached by Ray only.

    Raises:
      HostLostError: a host did not start.
      WorkerError: an exception on a host, or versions differ.
    """
    workers.facts = tuple(_call(workers, "facts", dict.fromkeys(_ranks(workers), ())))
    check_alike(workers.facts)
    config = {name: getattr(jax.config, name) for name in _CONFIG}
    arguments = {}
    for group, num_hosts in enumerate(workers.num_hosts):
        first = workers.ranks_of(group)[0]
        (port,) = _call(workers, "free_port", {first: ()})
        coordinator = f"{workers.facts[first].address}:{port}"
        for i, rank in enumerate(workers.ranks_of(group)):
            sizes = num_hosts, i, workers.cluster.devices_per_host
            arguments[rank] = (config, coordinator, *sizes)
    _call(workers, "join", arguments)
    if len(workers.num_hosts) > 1:
        _connect(workers, actors)
    return _dialled(workers)


def _connect(workers: Starting, actors: Sequence[Any]) -> None:
    """Hosts that hold the same share of two groups are connected."""
    addresses = _call(workers, "listen", _with_secret(workers, secrets.token_bytes(32)))
    arguments = {
        rank: (rank, {p: (addresses[p], actors[p]) for p in _peers(workers, rank)})
        for rank in _ranks(workers)
    }
    problems: list[dict[int, str]] = _call(workers, "connect", arguments)
    for rank, each in enumerate(problems):
        for peer, problem in each.items():
            _log.warning(
                "what %s reads of %s goes through Ray's object store, which takes "
                "longer: %s",
                *(workers.name(rank), workers.name(peer), problem),
            )


def _peers(workers: Starting, rank: int) -> list[int]:
    own = workers.group_of(rank)
    others = [i for i, _ in enumerate(workers.num_hosts) if i != own]
    return [
        peer
        for group in others
        for peer in workers.ranks_of(group)
        if meet(rank, workers.ranks_of(own), peer, workers.ranks_of(group))
    ]


def _dialled(workers: Starting) -> dict[int, Connection]:
    """A connection to each host, or none to any."""
    secret = secrets.token_bytes(32)
    addresses = _call(workers, "take_calls", _with_secret(workers, secret))
    try:
        return {rank: dial(addresses[rank], secret) for rank in _ranks(workers)}
    except OSError as error:
        _log.warning(
            "calls go through Ray, which takes longer, as a host cannot be reached by "
            "a connection: %s",
            error,
        )
        return {}


def _with_secret(workers: Starting, secret: bytes) -> dict[int, tuple[str, bytes]]:
    """The address of each host, and what only they and the driver know."""
    return {rank: (workers.facts[rank].address, secret) for rank in _ranks(workers)}


def _ranks(workers: Starting) -> range:
    return range(workers.cluster.num_hosts)


def _call(
    workers: Starting, method: str, arguments: Mapping[int, tuple[Any, ...]]
) -> list[Any]:
    """A call to hosts that may still be starting, and give no sign of life."""
    return workers.call(method, arguments, START_SECONDS, START_SECONDS)
