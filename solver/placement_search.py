"""Better placements: seeded local search, and an exact integer linear program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from math import exp
from typing import Any

import networkx as nx
import numpy as np
import pulp

from .placement import NoPlacement, Placed, PlacementProblem, placed, refuse
from .placement_heuristics import HEURISTICS

MOST_EXACT = 14  # operators that `best_placement` places exactly
_MOVES = 2_000
_START, _END = 0.1, 1e-3  # temperatures, as parts of the first step time


def best_placement(
    problem: PlacementProblem, method: str = "auto", seed: int = 0
) -> Placed:
    """A placement by method: a heuristic's name, "search", "exact" or "auto".

    "auto" is exact for few operators, and a search for more.

    Raises:
      NoPlacement: nothing fits.
      ValueError: an unknown method.
    """
    if method == "auto":
        few = problem.num_operators <= MOST_EXACT
        method = "exact" if few else "search"
    if method == "exact":
        return exact(problem)
    if method == "search":
        return search(problem, seed)
    if method not in HEURISTICS:
        names = ", ".join(["auto", "exact", "search", *HEURISTICS])
        raise ValueError(f"a placement method is one of {names}, but got {method!r}.")
    return HEURISTICS[method](problem)


def best_heuristic(problem: PlacementProblem) -> Placed:
    """The best of all quick placements.

    Raises:
      NoPlacement: groups find no room, largest first.
    """
    found = (heuristic(problem) for heuristic in HEURISTICS.values())
    return min(found, key=lambda each: each.step_seconds)


def search(problem: PlacementProblem, seed: int = 0, moves: int = _MOVES) -> Placed:
    """Simulated annealing from the best heuristic: groups are moved or swapped.

    Never worse than where it starts; the same for the same seed.
    """
    numbers = np.random.default_rng(seed)
    best = now = best_heuristic(problem)
    scale = best.step_seconds
    for move in range(moves):
        devices = _neighbour(problem, now.devices, numbers)
        if devices is None or not problem.is_allowed(devices):
            continue
        found = placed(problem, devices, "search")
        worse = found.step_seconds - now.step_seconds
        heat = scale * _START * (_END / _START) ** (move / moves)
        if worse <= 0 or numbers.random() < exp(-worse / heat):
            now = found
        if now.step_seconds < best.step_seconds:
            best = now
    return Placed(best.devices, best.starts, best.step_seconds, best.bound, "search")


def _neighbour(
    problem: PlacementProblem, devices: Sequence[int], numbers: np.random.Generator
) -> list[int] | None:
    """One group elsewhere, or two groups in each other's place."""
    found, groups = list(devices), problem.groups
    first = groups[int(numbers.integers(len(groups)))]
    if numbers.random() < 0.5 or len(groups) < 2:
        target = int(numbers.integers(problem.num_devices))
        if target == found[first[0]]:
            return None
        moved = {first: target}
    else:
        second = groups[int(numbers.integers(len(groups)))]
        if found[first[0]] == found[second[0]]:
            return None
        moved = {first: found[second[0]], second: found[first[0]]}
    for group, target in moved.items():
        for op in group:
            found[op] = target
    return found


def exact(
    problem: PlacementProblem,
    gap: float = 1e-6,
    *,
    most_nodes: int = 20_000,
    time_limit_seconds: float = 600.0,
) -> Placed:
    """The placement and order with the least step time, by integer programming.

    x[g, d] in {0, 1} puts a group on a device; s[i] is when operator i starts, T the
    step time; o[i, j] in {0, 1} says which of two operators without a path between them
    goes first if they share a device:

        minimise    T
        subject to  sum_d x[g, d] = 1;  sum_g bytes_g x[g, d] <= capacity[d]
                    T >= s[i] + t[i];  s[j] >= s[i] + t[i] + c[i, j] along edges
                    c[i, j] >= transfer(d, e) (x[i, d] + x[j, e] - 1)
                    s[j] >= s[i] + t[i] - M (3 - o[i, j] - x[i, d] - x[j, d])

    It stops after `most_nodes` of branch and bound. `time_limit_seconds` is the last
    resort: what was found then depends on the machine.

    Raises:
      NoPlacement: nothing fits.
    """
    try:
        start = best_heuristic(problem)
        horizon = start.step_seconds * (1 + 1e-6)
    except NoPlacement:
        start, horizon = None, _one_after_the_other(problem)
    model = _Model(problem, horizon)
    solver = pulp.HiGHS(
        msg=False,
        gapRel=gap,
        timeLimit=time_limit_seconds,
        threads=1,
        mip_max_nodes=most_nodes,
    )
    model.program.solve(solver)
    devices = model.devices()
    if devices is None or not problem.is_allowed(devices):
        if start is not None:
            return start
        raise refuse(
            problem, max(problem.groups, key=lambda g: problem.bytes[list(g)].sum())
        )
    starts = model.starts()
    step_seconds = max(
        s + float(problem.seconds[op, devices[op]]) for op, s in enumerate(starts)
    )
    bound = step_seconds if model.is_optimal else problem.lower_bound()
    if start is not None and start.step_seconds < step_seconds:
        return start
    return Placed(tuple(devices), starts, step_seconds, bound, "exact")


def _one_after_the_other(problem: PlacementProblem) -> float:
    """Seconds in which any placement is surely done."""
    finite = np.where(np.isfinite(problem.seconds), problem.seconds, 0.0)
    moves = sum(
        problem.latency.max() + size * problem.seconds_per_byte.max()
        for _, _, size in problem.edges
    )
    return float(finite.max(axis=1).sum() + moves)


class _Model:
    """The program of `exact`, in units of the horizon, so that numbers are near one."""

    def __init__(self, problem: PlacementProblem, horizon: float) -> None:
        self.problem, self.unit = problem, max(horizon, 1e-30)
        self.program = pulp.LpProblem("placement", pulp.LpMinimize)
        self.group_of = {
            op: number for number, group in enumerate(problem.groups) for op in group
        }
        self.on = self._choices()
        ops = range(problem.num_operators)
        self.start = [pulp.LpVariable(f"s_{op}", 0, 1) for op in ops]
        self.end = pulp.LpVariable("T", 0, 1)
        self.program += self.end
        for op in ops:
            self.program += self.start[op] + self._seconds(op) <= self.end
        self._add_memory()
        self._add_edges()
        self._add_orders()

    def _choices(self) -> list[list[Any]]:
        """x[g, d]; a device where some operator of the group cannot run is left out."""
        problem, found = self.problem, []
        for number, group in enumerate(problem.groups):
            row = []
            for device in range(problem.num_devices):
                can_run = np.isfinite(problem.seconds[list(group), device]).all()
                row.append(
                    pulp.LpVariable(
                        f"x_{number}_{device}", 0, int(can_run), pulp.LpInteger
                    )
                )
            self.program += pulp.lpSum(row) == 1
            found.append(row)
        return found

    def _at(self, op: int, device: int) -> Any:
        return self.on[self.group_of[op]][device]

    def _seconds(self, op: int) -> Any:
        seconds = self.problem.seconds[op] / self.unit
        return pulp.lpSum(
            float(seconds[device]) * self._at(op, device)
            for device in range(self.problem.num_devices)
            if np.isfinite(seconds[device])
        )

    def _add_memory(self) -> None:
        problem = self.problem
        scale = max(float(problem.bytes.max(initial=0.0)), 1.0)
        for device in range(problem.num_devices):
            if np.isinf(problem.capacity[device]):
                continue
            used = pulp.lpSum(
                float(problem.bytes[list(group)].sum() / scale) * row[device]
                for group, row in zip(problem.groups, self.on, strict=True)
            )
            self.program += used <= float(problem.capacity[device] / scale)

    def _add_edges(self) -> None:
        problem = self.problem
        devices = range(problem.num_devices)
        sizes: dict[tuple[int, int], float] = defaultdict(float)
        for producer, reader, size in problem.edges:
            sizes[producer, reader] = max(sizes[producer, reader], size)
        for (producer, reader), size in sizes.items():
            done = self.start[producer] + self._seconds(producer)
            if self.group_of[producer] == self.group_of[reader]:
                self.program += self.start[reader] >= done
                continue
            # For each source: 0 if not from there, else what the target costs.
            for source in devices:
                moved = pulp.lpSum(
                    problem.transfer_seconds(size, source, target)
                    / self.unit
                    * self._at(reader, target)
                    for target in devices
                )
                most = max(
                    problem.transfer_seconds(size, source, target) / self.unit
                    for target in devices
                )
                is_from = self._at(producer, source)
                self.program += self.start[reader] >= done + moved - most * (
                    1 - is_from
                )

    def _add_orders(self) -> None:
        problem = self.problem
        graph = nx.DiGraph()
        graph.add_nodes_from(range(problem.num_operators))
        graph.add_edges_from((a, b) for a, b, _ in problem.edges)
        closure = nx.transitive_closure_dag(graph)
        for i, j in combinations(range(problem.num_operators), 2):
            if closure.has_edge(i, j) or closure.has_edge(j, i):
                continue
            first = pulp.LpVariable(f"o_{i}_{j}", 0, 1, pulp.LpInteger)
            for device in range(problem.num_devices):
                apart = 2 - self._at(i, device) - self._at(j, device)
                # No end is behind the horizon, so M = 1 frees a pair that is apart.
                self.program += self.start[j] >= (
                    self.start[i] + self._seconds(i) - (1 - first) - apart
                )
                self.program += self.start[i] >= (
                    self.start[j] + self._seconds(j) - first - apart
                )

    @property
    def is_optimal(self) -> bool:
        return self.program.sol_status == pulp.LpSolutionOptimal

    def devices(self) -> list[int] | None:
        """The device of each operator, or None if there is no solution."""
        if self.program.sol_status not in (
            pulp.LpSolutionOptimal,
            pulp.LpSolutionIntegerFeasible,
        ):
            return None
        chosen = [int(np.argmax([x.value() or 0.0 for x in row])) for row in self.on]
        ops = range(self.problem.num_operators)
        return [chosen[self.group_of[op]] for op in ops]

    def starts(self) -> tuple[float, ...]:
        return tuple(float(s.value() or 0.0) * self.unit for s in self.start)
