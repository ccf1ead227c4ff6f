"""Where the programs of a Ray cluster run, and how long its hosts are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from autopar.clusters.hardware import check_positive

_MOST = 9  # steps under way: each holds its batch on the hosts
OnFailure = Literal["replan", "wait", "raise"]


@dataclass(frozen=True)
class RayHosts:
    """Where a cluster's programs run: on the hosts of a running Ray cluster.

    Attributes:
      address: the Ray cluster's.
      platform: `cpu`, `gpu` or `tpu`.
      step_seconds: how long a step may take before its hosts are given up.
      silent_seconds: without a sign of life for so long, a host is given up.
      on_failure: what `autopar.Training` does when a host is lost.
      wait_seconds: how long it waits for hosts.
      steps_ahead: how many steps may be under way when a call returns.
      nodes: what Ray calls its hosts, with their addresses, as they were found. Plans
        do not depend on it.

    Raises:
      ValueError: a time is not above 0, `on_failure` is none of those, or `steps_ahead`
        is below 0.
    """

    address: str
    platform: str
    step_seconds: float
    silent_seconds: float = 8.0
    on_failure: OnFailure = "replan"
    wait_seconds: float = 600.0
    steps_ahead: int = 0
    nodes: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        check_positive("step_seconds", self.step_seconds)
        check_positive("silent_seconds", self.silent_seconds)
        check_positive("wait_seconds", self.wait_seconds)
        if isinstance(self.steps_ahead, bool) or self.steps_ahead not in range(_MOST):
            raise ValueError(
                f"`steps_ahead` must be a number from 0 to {_MOST - 1}, but got "
                f"{self.steps_ahead!r}."
            )
        if self.on_failure not in get_args(OnFailure):
            raise ValueError(
                f"`on_failure` must be 'replan', 'wait' or 'raise', but got "
                f"{self.on_failure!r}."
            )

    @property
    def lowering_platform(self) -> str:
        """What jax calls the platform where it lowers for it."""
        return {"gpu": "cuda"}.get(self.platform, self.platform)


@dataclass(frozen=True)
class HostGroups:
    """How submeshes lie on hosts: each is a part of one host, or several whole ones.

    A group of hosts is one JAX process group. `num_hosts` are those of each group;
    `places` is for each submesh its group, and its first device among those of the
    group. Groups follow each other on the hosts, and so do submeshes.
    """

    num_hosts: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    @staticmethod
    def of(sizes: Sequence[int], devices_per_host: int) -> HostGroups:
        """The groups of submeshes of so many devices, which follow each other.

        Raises:
          NotImplementedError: a submesh is a part of a host and of the next one.
        """
        inside = devices_per_host
        num_hosts: list[int] = []
        places: list[tuple[int, int]] = []
        end = 0
        for number, size in enumerate(sizes):
            first, end = end, end + size
            at = first % inside
            if at + size > inside and (at or size % inside):
                more = dealt_out(len(sizes), -(-sum(sizes) // inside), inside)
                raise NotImplementedError(
                    f"On a Ray cluster a submesh of a pipeline is part of one host, or "
                    f"several whole hosts, but submesh {number} of {list(sizes)} "
                    f"devices would have devices {first} to {end - 1} of hosts of "
                    f"{inside}; give other `stage_meshes`, such as "
                    f"{[f'x:{each}' for each in more]}, or another order of them."
                )
            if not at:
                num_hosts.append(max(1, size // inside))
            places.append((len(num_hosts) - 1, at))
        return HostGroups(tuple(num_hosts), tuple(places))

    def ranks_of(self, group: int) -> range:
        """The hosts of a group."""
        first = sum(self.num_hosts[:group])
        return range(first, first + self.num_hosts[group])


def dealt_out(number: int, num_hosts: int, devices_per_host: int) -> list[int]:
    """Devices for so many submeshes on all hosts, as equal as `HostGroups` takes them.

    Where several share a host they have powers of two, which divide most arrays.
    """
    if number <= num_hosts:
        share, more = divmod(num_hosts, number)
        hosts = [share] * (number - more) + [share + 1] * more
        return [each * devices_per_host for each in hosts]
    share, more = divmod(number, num_hosts)
    parts = [share] * (num_hosts - more) + [share + 1] * more
    return [size for own in parts for size in _shared(devices_per_host, own)]


def _shared(num_devices: int, number: int) -> list[int]:
    """The devices of one host for so many submeshes."""
    sizes = [1] * number
    while sum(sizes) + min(sizes) <= num_devices:
        sizes[sizes.index(min(sizes))] *= 2
    sizes[-1] += num_devices - sum(sizes)
    return sizes
