"""Where each operator of a graph runs: devices of their own, one operator at a time.

An operator takes `seconds[op, device]`, inf where it cannot run, and keeps `bytes[op]`
on its device for the whole step. A value goes from its producer to another device once,
in `latency + bytes * seconds_per_byte`; sending occupies no device. Operators that must
stay together are groups. A placement's step time is that of its timeline: every device
runs its operators in one order, those with most work behind them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import exp, inf

import networkx as nx
import numpy as np
import pulp

HEURISTICS = ("topological", "list", "small_communication")
MOST_EXACT = 14  # operators that `best_placement` places exactly
_MOST_NODES, _LAST_RESORT_SECONDS = 20_000, 600.0
_START, _END = 0.1, 1e-3  # temperatures, as parts of the first step time


class NoPlacement(ValueError):
    """Operators that no devices have room for."""


@dataclass(frozen=True, eq=False)
class PlacementProblem:
    """Operators 0..n-1, each a name, and devices 0..d-1.

    `edges` are (producer, reader, bytes). `seconds` has shape [n, d], `bytes` [n],
    `capacity` [d], `latency` and `seconds_per_byte` [d, d]; all times are in seconds.

    Raises:
      NoPlacement: a group whose operators share no device.
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
        for group in self.groups:
            if np.isinf(self.work(group)).all():
                names = ", ".join(self.names[op] for op in group)
                raise NoPlacement(
                    f"operators that stay together share a device, but {names} are "
                    f"allowed on none in common; pin them alike."
                )

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Operators and edges between them."""
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
        return tuple(nx.lexicographical_topological_sort(self.graph))

    @cached_property
    def urgent_first(self) -> tuple[int, ...]:
        """Producers before readers, those with the longest path behind them first."""
        fastest = self.seconds.min(axis=1)
        behind = np.zeros(self.num_operators)
        for op in reversed(self.order):
            later = (behind[reader] for reader in self.graph.successors(op))
            behind[op] = fastest[op] + max(later, default=0.0)
        return tuple(sorted(self.order, key=lambda op: -behind[op]))

    @cached_property
    def inputs(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Producers of each operator, with the bytes that it reads of them."""
        found: list[list[tuple[int, float]]] = [[] for _ in self.names]
        for producer, reader, size in self.edges:
            found[reader].append((producer, size))
        return tuple(map(tuple, found))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Every operator in one group, alone or with those it stays together with."""
        joined = nx.utils.UnionFind(range(self.num_operators))
        for group in self.together:
            joined.union(*group)
        return tuple(sorted(tuple(sorted(group)) for group in joined.to_sets()))

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The number of each operator's group."""
        return {op: i for i, group in enumerate(self.groups) for op in group}

    def work(self, group: Sequence[int]) -> np.ndarray:
        """[devices] seconds of a group's operators, inf where one cannot run."""
        return self.seconds[list(group)].sum(axis=0)

    def transfer_seconds(self, size: float, source: int, target: int) -> float:
        """Of a value from one device to another."""
        if source == target:
            return 0.0
        return float(
            self.latency[source, target] + size * self.seconds_per_byte[source, target]
        )

    def is_allowed(self, devices: Sequence[int]) -> bool:
        """Whether operators run there, groups are together, and memory is enough."""
        at = np.asarray(devices)
        held = np.bincount(at, weights=self.bytes, minlength=self.num_devices)
        return (
            not np.isinf(self.seconds[np.arange(self.num_operators), at]).any()
            and all(len(set(at[list(group)])) == 1 for group in self.groups)
            and bool((held <= self.capacity).all())
        )


@dataclass(frozen=True)
class Placed:
    """A placement: devices and starts by operator."""

    devices: tuple[int, ...]
    starts: tuple[float, ...]
    step_seconds: float


class _Timeline:
    """Operators that have run so far, on which device, and until when."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.device: dict[int, int] = {}
        self.start: dict[int, float] = {}
        self.end: dict[int, float] = {}
        self.free_at = [0.0] * problem.num_devices

    def start_on(self, op: int, device: int) -> float:
        """When an operator could begin on a device."""
        arrivals = (
            self.end[p] + self.problem.transfer_seconds(size, self.device[p], device)
            for p, size in self.problem.inputs[op]
        )
        return max(self.free_at[device], *arrivals, 0.0)

    def run(self, op: int, device: int) -> None:
        self.start[op] = self.start_on(op, device)
        self.device[op] = device
        self.end[op] = self.start[op] + float(self.problem.seconds[op, device])
        self.free_at[device] = self.end[op]


def placed(problem: PlacementProblem, devices: Sequence[int]) -> Placed:
    """A placement with its timeline."""
    line = _Timeline(problem)
    for op in problem.urgent_first:
        line.run(op, devices[op])
    starts = tuple(line.start[op] for op in range(problem.num_operators))
    return Placed(tuple(devices), starts, max(line.free_at))


def best_placement(
    problem: PlacementProblem, method: str = "auto", seed: int = 0
) -> Placed:
    """A placement by method: a heuristic's name, "search", "exact" or "auto".

    "auto" is exact for few operators, and a search for more.

    Raises:
      NoPlacement: nothing fits.
    """
    if method == "auto":
        few = problem.num_operators <= MOST_EXACT
        method = "exact" if few else "search"
    if method == "exact":
        return exact(problem)
    return search(problem, seed) if method == "search" else heuristic(problem, method)


def heuristic(problem: PlacementProblem, method: str) -> Placed:
    """Groups in the order of their first operator, each where a rule likes it best.

    "topological" fills device after device, each with work as it is fast; "list" takes
    the device that is done earliest (HEFT, Topcuoglu 2002); "small_communication" the
    one to which least is moved, unless it is done a whole group later than the earliest
    (after Baechi, Jeon et al. 2020). Where memory runs out, groups are placed by size.

    Raises:
      NoPlacement: a group finds no room.
    """
    is_fill = method == "topological"
    fastest, can_run = problem.seconds.min(axis=1), np.isfinite(problem.seconds)
    taken = np.where(can_run, problem.seconds, 0.0).sum(axis=0)
    speed = (fastest[:, None] * can_run).sum(axis=0) / np.maximum(taken, 1e-30)
    share = fastest.sum() / max(speed.sum(), 1e-30)  # seconds, alike on all devices
    line, room = _Timeline(problem), _Room(problem)
    for op in problem.order if is_fill else problem.urgent_first:
        group = problem.groups[problem.group_of[op]]
        if op not in room.device:
            work, fitting = problem.work(group), room.fitting(group)
            if not fitting:
                return placed(problem, _by_size(problem))
            ends = {d: line.start_on(op, d) + float(work[d]) for d in fitting}
            moved = {
                d: sum(
                    problem.transfer_seconds(size, line.device[p], d)
                    for p, size in problem.inputs[op]
                )
                for d in fitting
            }
            latest = min(ends.values()) + work
            if is_fill:
                ranks = [(room.work[d] >= share * (1 - 1e-9), d) for d in fitting]
            elif method == "list":
                ranks = [(ends[d], d) for d in fitting]
            else:
                ranks = [(ends[d] > latest[d], moved[d], ends[d], d) for d in fitting]
            room.take(group, min(ranks)[-1])
        line.run(op, room.device[op])
    return placed(problem, room.devices)


class _Room:
    """Devices of the groups placed so far, and what room they leave."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.left = problem.capacity.astype(float).copy()
        self.work = np.zeros(problem.num_devices)
        self.device: dict[int, int] = {}

    def fitting(self, group: Sequence[int]) -> list[int]:
        size = self.problem.bytes[list(group)].sum()
        fits = (size <= self.left) & np.isfinite(self.problem.work(group))
        return np.flatnonzero(fits).tolist()

    def take(self, group: Sequence[int], device: int) -> None:
        self.left[device] -= self.problem.bytes[list(group)].sum()
        self.work[device] += self.problem.work(group)[device]
        self.device.update(dict.fromkeys(group, device))

    @property
    def devices(self) -> list[int]:
        return [self.device[op] for op in range(self.problem.num_operators)]


def _by_size(problem: PlacementProblem) -> list[int]:
    """Largest groups first, each where most room is left: for memory that is scarce.

    Raises:
      NoPlacement: a group finds no room; names the largest operator.
    """
    room = _Room(problem)
    sizes = {group: problem.bytes[list(group)].sum() for group in problem.groups}
    for group in sorted(problem.groups, key=lambda g: (-sizes[g], g)):
        fitting = room.fitting(group)
        if not fitting:
            raise _refusal(problem, group)
        room.take(group, max(fitting, key=lambda d: room.left[d]))
    return room.devices


def _refusal(problem: PlacementProblem, group: Sequence[int]) -> NoPlacement:
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


def _best_heuristic(problem: PlacementProblem) -> Placed:
    found = (heuristic(problem, method) for method in HEURISTICS)
    return min(found, key=lambda each: each.step_seconds)


def search(problem: PlacementProblem, seed: int = 0, moves: int = 2_000) -> Placed:
    """Simulated annealing from the best heuristic: groups are moved or swapped.

    Never worse than where it starts; the same for the same seed.

    Raises:
      NoPlacement: groups find no room, largest first.
    """
    numbers = np.random.default_rng(seed)
    best = now = _best_heuristic(problem)
    scale, groups = best.step_seconds, problem.groups
    for move in range(moves):
        first, second = numbers.integers(len(groups), size=2).tolist()
        target = int(numbers.integers(problem.num_devices))
        devices = list(now.devices)
        if numbers.random() < 0.5:  # in each other's place
            target = devices[groups[second][0]]
            for op in groups[second]:
                devices[op] = now.devices[groups[first][0]]
        for op in groups[first]:
            devices[op] = target
        if tuple(devices) == now.devices or not problem.is_allowed(devices):
            continue
        found = placed(problem, devices)
        worse = found.step_seconds - now.step_seconds
        heat = scale * _START * (_END / _START) ** (move / moves)
        if worse <= 0 or numbers.random() < exp(-worse / heat):
            now = found
        if now.step_seconds < best.step_seconds:
            best = now
    return best


def exact(problem: PlacementProblem, gap: float = 1e-6) -> Placed:
    """The placement and order with the least step time, by integer programming.

    x[g, d] in {0, 1} puts a group on a device; s[i] is when operator i starts, t[i]
    what it takes there, T the step time; o[i, j] in {0, 1} says which of two operators
    without a path between them goes first if they share a device. In units of a time
    M = 1 in which any placement is done,

        minimise    T
        subject to  sum_d x[g, d] = 1;  sum_g bytes_g x[g, d] <= capacity[d]
                    T >= s[i] + t[i]
                    s[j] >= s[i] + t[i] + sum_e transfer(d, e) x[j, e]
                            - max_e transfer(d, e) (1 - x[i, d])      along edges
                    s[j] >= s[i] + t[i] - M (3 - o[i, j] - x[i, d] - x[j, d])

    It stops after a number of nodes of branch and bound, or as a last resort of
    seconds: what was found then depends on the machine.

    Raises:
      NoPlacement: nothing fits.
    """
    known: Placed | None = None
    try:
        known = _best_heuristic(problem)
        unit = known.step_seconds * (1 + 1e-6)
    except NoPlacement:
        finite = np.where(np.isfinite(problem.seconds), problem.seconds, 0.0)
        moves = [
            problem.latency.max() + size * problem.seconds_per_byte.max()
            for _, _, size in problem.edges
        ]
        unit = float(finite.max(axis=1).sum() + sum(moves))
    unit = max(unit, 1e-30)
    ops, devices = range(problem.num_operators), range(problem.num_devices)
    of_group = [
        [
            pulp.LpVariable(f"x_{i}_{d}", 0, int(work[d] < inf), pulp.LpInteger)
            for d in devices
        ]
        for i, work in enumerate(map(problem.work, problem.groups))
    ]
    x = [of_group[problem.group_of[op]] for op in ops]
    start = [pulp.LpVariable(f"s_{op}", 0, 1) for op in ops]
    seconds = np.where(np.isfinite(problem.seconds), problem.seconds, 0.0) / unit
    done = [start[op] + pulp.lpDot(seconds[op].tolist(), x[op]) for op in ops]
    program, end = pulp.LpProblem("placement", pulp.LpMinimize), pulp.LpVariable("T")
    program += end
    for row in of_group:
        program += pulp.lpSum(row) == 1
    for op in ops:
        program += done[op] <= end
    scale = max(float(problem.bytes.max(initial=0.0)), 1.0)
    for d in devices:
        if np.isfinite(problem.capacity[d]):
            held = pulp.lpDot(
                (problem.bytes / scale).tolist(), [x[op][d] for op in ops]
            )
            program += held <= float(problem.capacity[d] / scale)
    for i, j, size in problem.edges:
        for d in devices:
            moved = [problem.transfer_seconds(size, d, e) / unit for e in devices]
            later = pulp.lpDot(moved, x[j]) - max(moved) * (1 - x[i][d])
            program += start[j] >= done[i] + later
    paths = nx.transitive_closure_dag(problem.graph)
    for i, j in combinations(ops, 2):
        if not (paths.has_edge(i, j) or paths.has_edge(j, i)):
            first = pulp.LpVariable(f"o_{i}_{j}", 0, 1, pulp.LpInteger)
            for d in devices:
                apart = 2 - x[i][d] - x[j][d]
                program += start[j] >= done[i] - (1 - first) - apart
                program += start[i] >= done[j] - first - apart
    solver = pulp.HiGHS(
        msg=False,
        gapRel=gap,
        timeLimit=_LAST_RESORT_SECONDS,
        threads=1,
        mip_max_nodes=_MOST_NODES,
    )
    program.solve(solver)
    at = [int(np.argmax([each.value() or 0.0 for each in row])) for row in x]
    is_found = program.sol_status in (
        pulp.LpSolutionOptimal,
        pulp.LpSolutionIntegerFeasible,
    )
    if not is_found or not problem.is_allowed(at):
        if known is not None:
            return known
        raise _refusal(
            problem, max(problem.groups, key=lambda g: problem.bytes[list(g)].sum())
        )
    starts = [float(each.value() or 0.0) * unit for each in start]
    ends = [s + float(problem.seconds[op, at[op]]) for op, s in enumerate(starts)]
    if known is not None and known.step_seconds < max(ends):
        return known
    return Placed(tuple(at), tuple(starts), max(ends))
