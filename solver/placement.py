"""Where each operator of a graph runs: devices of their own, one operator at a time.

An operator takes `seconds[op, device]`, inf where it cannot run, and keeps `bytes[op]`
on its device for the whole step. A value goes from its producer to another device once,
in `latency + bytes * seconds_per_byte`; sending occupies no device. Operators that must
stay together are groups. A placement's step time is that of its timeline: every device
runs, of its operators whose inputs are there first, the one with most work behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import networkx as nx
import numpy as np


class NoPlacement(ValueError):
    """Operators that no devices have room for."""


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """Operators 0..n-1, each a name, and devices 0..d-1.

    `edges` are (producer, reader, bytes). `seconds` has shape [n, d], `bytes` [n],
    `capacity` [d], `latency` and `seconds_per_byte` [d, d]; all times are in seconds.

    Raises:
      ValueError: a cycle, or a group whose operators share no device.
    """

    names: tuple[str, ...]
    seconds: np.ndarray
    edges: tuple[tuple[int, int, float], ...]
    bytes: np.ndarray
    capacity: np.ndarray
    latency: np.ndarray
    seconds_per_byte: np.ndarray
    together: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not nx.is_directed_acyclic_graph(self._graph):
            cycle = [self.names[a] for a, _ in nx.find_cycle(self._graph)]
            raise ValueError(
                f"operators form a graph without cycles, but these wait for each "
                f"other: {', '.join(cycle)}."
            )
        for group in self.groups:
            if np.isinf(self.seconds[list(group)].sum(axis=0)).all():
                names = ", ".join(self.names[op] for op in group)
                raise NoPlacement(
                    f"operators that stay together share a device, but {names} are "
                    f"allowed on none in common; pin them alike."
                )

    @cached_property
    def _graph(self) -> nx.DiGraph:
        graph = nx.DiGraph()
        graph.add_nodes_from(range(self.num_operators))
        graph.add_edges_from((a, b) for a, b, _ in self.edges)
        return graph

    @property
    def num_operators(self) -> int:
        return len(self.names)

    @property
    def num_devices(self) -> int:
        return self.seconds.shape[1]

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Producers before readers, otherwise as given."""
        return tuple(nx.lexicographical_topological_sort(self._graph))

    @cached_property
    def inputs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Producers of each operator, with the bytes that it reads of them."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.names]
        for producer, reader, size in self.edges:
            found[reader].append((producer, size))
        return tuple(map(tuple, found))

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Who reads what each operator makes."""
        found: list[list[int]] = [[] for _ in self.names]
        for producer, reader, _ in self.edges:
            found[producer].append(reader)
        return tuple(map(tuple, found))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every operator in one group, alone or with those it stays together with."""
        joined = nx.utils.UnionFind(range(self.num_operators))
        for group in self.together:
            joined.union(*group)
        return tuple(sorted(tuple(sorted(group)) for group in joined.to_sets()))

    @cached_property
    def urgency(self) -> np.ndarray:
        """Seconds from the start of each operator to the end of the step, at least."""
        fastest = self.seconds.min(axis=1)
        behind = np.zeros(self.num_operators)
        for op in reversed(self.order):
            later = max((behind[reader] for reader in self.readers[op]), default=0.0)
            behind[op] = fastest[op] + later
        return behind

    def transfer_seconds(self, size: float, source: int, target: int) -> float:
        """Of a value from one device to another."""
        if source == target:
            return 0.0
        return float(
            self.latency[source, target] + size * self.seconds_per_byte[source, target]
        )

    def used_bytes(self, devices: Sequence[int]) -> np.ndarray:
        """What each device keeps."""
        return np.bincount(
            np.asarray(devices), weights=self.bytes, minlength=self.num_devices
        )

    def is_allowed(self, devices: Sequence[int]) -> bool:
        """Whether operators run there, groups are together, and memory is enough."""
        at = np.asarray(devices)
        return (
            not np.isinf(self.seconds[np.arange(self.num_operators), at]).any()
            and all(len(set(at[list(group)])) == 1 for group in self.groups)
            and bool((self.used_bytes(devices) <= self.capacity).all())
        )

    def lower_bound(self) -> float:
        """Below every placement's step time: the longest path, and all work shared."""
        fastest = self.seconds.min(axis=1)
        # Device d does the work of op at rate 1 / seconds[op, d]: at the best rate of
        # every device for any operator, relative to the fastest for that operator.
        rate = (fastest[:, None] / np.maximum(self.seconds, 1e-30)).max(axis=0)
        shared = fastest.sum() / max(rate.sum(), 1.0)
        return float(max(self.urgency.max(initial=0.0), shared))


@dataclass(frozen=True)
class Placed:
    """A placement and its timeline; `bound` is below every placement's step time."""

    devices: tuple[int, ...]
    starts: tuple[float, ...]
    step_seconds: float
    bound: float
    method: str = field(default="", compare=False)

    @property
    def gap(self) -> float:
        """How much of the step time might still be saved, at most."""
        return 1 - self.bound / self.step_seconds if self.step_seconds else 0.0


def timeline(
    problem: PlacementProblem, devices: Sequence[int]
) -> tuple[tuple[float, ...], float]:
    """When each operator starts, and when the last one ends."""
    free_at = [0.0] * problem.num_devices
    ends, starts = [0.0] * problem.num_operators, [0.0] * problem.num_operators
    missing = [len(set(producers)) for producers in problem.inputs]
    ready = {op: 0.0 for op, number in enumerate(missing) if number == 0}
    waits: dict[int, set[int]] = {}
    while ready:
        op = min(
            ready,
            key=lambda i: (
                max(ready[i], free_at[devices[i]]),
                -problem.urgency[i],
                i,
            ),
        )
        at = devices[op]
        starts[op] = max(ready.pop(op), free_at[at])
        ends[op] = free_at[at] = starts[op] + float(problem.seconds[op, at])
        for reader in set(problem.readers[op]):
            waits.setdefault(reader, set()).add(op)
            if len(waits[reader]) == len({p for p, _ in problem.inputs[reader]}):
                ready[reader] = max(
                    ends[p]
                    + problem.transfer_seconds(size, devices[p], devices[reader])
                    for p, size in problem.inputs[reader]
                )
    return tuple(starts), max(ends, default=0.0)


def placed(
    problem: PlacementProblem, devices: Iterable[int], method: str, bound: float = 0.0
) -> Placed:
    """A placement with its timeline."""
    chosen = tuple(int(device) for device in devices)
    starts, step_seconds = timeline(problem, chosen)
    bound = min(max(bound, problem.lower_bound()), step_seconds)
    return Placed(chosen, starts, step_seconds, bound, method)


def refuse(problem: PlacementProblem, group: Sequence[int]) -> NoPlacement:
    """Why nothing fits: the group that found no room, and the largest operator."""
    largest = int(np.argmax(problem.bytes))
    names = ", ".join(problem.names[op] for op in group)
    return NoPlacement(
        f"operators must fit into the memory of the devices, "
        f"{problem.capacity.tolist()} bytes, but {names} found no room; the largest is "
        f"{problem.names[largest]} with {problem.bytes[largest]:.0f} bytes of "
        f"{problem.bytes.sum():.0f} in all. "
        f"Use more devices or larger ones, or split that operator."
    )


def least_seconds(
    problem: PlacementProblem, group: Sequence[int], device: int
) -> float:
    """Seconds of a group's operators on a device, inf where one cannot run."""
    total = problem.seconds[list(group), device].sum()
    return float(total) if not np.isnan(total) else inf
