"""Seconds and bytes of an iteration: units dealt out to stages, microbatches, updates.

Stages run 1F1B. Stage i of p holds at most p - i microbatches, so besides its own work
a microbatch waits for the round trip to the last stage and back:

    period = max over i of  busy_i,  (sum over j >= i of busy_j + 2 sent_j) / (p - i)
    seconds = sum of (busy + 2 sent) + (M - 1) period + the slowest update

which a search can afford: exact for equal stages, too much by up to a sixth where they
are unequal and microbatches few. `simulated_seconds` runs the schedule itself
(`runtime/simulate.py`) and is what tables print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.planner.memory_budget import RESERVED_FRACTION
from autopar.runtime.instructions import Send
from autopar.runtime.schedule import Task, one_f_one_b
from autopar.runtime.simulate import simulate_schedule
from benchmarks.published.constants import Constants
from benchmarks.published.table import Row
from benchmarks.published.unit_costs import ONCE, Layout, UnitCosts, unit_costs
from benchmarks.published.unit_model import UnitModel

UPDATE_BYTES = 28  # of Adam for a parameter: read gradient, read and write the rest
_HALVINGS = 10  # of the interval that holds the slowest stage's seconds
_SIMULATED_ROUNDS = 2  # of the pipeline; the rest repeats the same period


@dataclass(frozen=True)
class System:
    """How a system runs what it is given.

    Attributes:
      splits_state: the optimizer's state is split over `data` too (ZeRO).
      reduces_always: gradients are reduced after every microbatch (ZeRO-2 that frees
        them), not once a step.
      has_equal_stages: stages have equally many layers, not equal seconds.
      has_one_group: experts route all examples that a device has at once, so that the
        masks of tokens by slots grow with their square.
      has_largest_microbatch: it runs the largest microbatches that fit.
    """

    splits_state: bool = True
    reduces_always: bool = False
    has_equal_stages: bool = False
    has_one_group: bool = False
    has_largest_microbatch: bool = False


@dataclass(frozen=True)
class Plan:
    """Layouts of the stages, in order, and the number of microbatches."""

    layouts: tuple[Layout, ...]
    num_microbatches: int
    system: System = System()
    remat: bool = True

    def __str__(self) -> str:
        kinds: list[list[object]] = []
        for layout in self.layouts:
            if kinds and kinds[-1][1] == layout:
                kinds[-1][0] = int(str(kinds[-1][0])) + 1
            else:
                kinds.append([1, layout])
        stages = " + ".join(f"{count}x{layout}" for count, layout in kinds)
        remat = "" if self.remat else ", nothing recomputed"
        return f"{stages}, {self.num_microbatches} microbatches{remat}"


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a plan takes: seconds of an iteration, and of its stages.

    `forward`, `backward`, `sent` and `update` are seconds by stage, of one microbatch
    but for the update; `peak_bytes` is the fullest device's.
    """

    plan: Plan
    forward: np.ndarray
    backward: np.ndarray
    sent: np.ndarray
    update: np.ndarray
    peak_bytes: float
    budget_bytes: float
    bounds: tuple[int, ...]

    @property
    def is_feasible(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    @cached_property
    def period(self) -> float:
        """Seconds from one microbatch to the next, once the pipeline is full."""
        busy, stages = self.forward + self.backward, len(self.forward)
        behind = np.cumsum((busy + 2 * self.sent)[::-1])[::-1]
        ahead = np.minimum(np.arange(stages, 0, -1), self.plan.num_microbatches)
        return max(float(busy.max()), float((behind / ahead).max()))

    @cached_property
    def seconds(self) -> float:
        """By the formula."""
        total = float((self.forward + self.backward + 2 * self.sent).sum())
        more = (self.plan.num_microbatches - 1) * self.period
        return total + more + float(self.update.max())

    @cached_property
    def simulated_seconds(self) -> float:
        """By the schedule: two rounds of the pipeline, and the rest at its period."""
        stages, number = len(self.forward), self.plan.num_microbatches
        first = min(number, _SIMULATED_ROUNDS * stages)
        return self._simulated(first) + (number - first) * self.period

    def _simulated(self, number: int) -> float:
        seconds_by_kind = {
            "forward": self.forward,
            "backward": self.backward,
            "apply": self.update,
        }

        def task_seconds(task: Task) -> float:
            return float(seconds_by_kind[task.kind][task.stage])

        def transfer_seconds(send: Send) -> float:
            return float(self.sent[min(send.source, send.target)])

        schedule = one_f_one_b(len(self.forward), number)
        found = simulate_schedule(schedule, task_seconds, transfer_seconds)
        return found.timeline.makespan_seconds


class Simulator:
    """Predicts plans of one model on one kind of machine; layouts are planned once."""

    def __init__(self, row: Row, planned_with: Constants) -> None:
        self._row = row
        self.model, self.batch_size = row.model, row.batch_size
        self.kind = row.setting.kind
        self.devices_per_host = row.setting.devices_per_host
        self.budget_bytes = row.setting.memory_bytes * (1 - RESERVED_FRACTION)
        self._planned_with = planned_with
        self._costs: dict[Layout, UnitCosts] = {}
        self._seconds: dict[object, np.ndarray] = {}
        self._regrouped: dict[int, Simulator] = {}

    def costs(self, layout: Layout) -> UnitCosts:
        if layout not in self._costs:
            cluster = cluster_of(layout, self.kind, self._planned_with)
            self._costs[layout] = unit_costs(self.model, layout, cluster)
        return self._costs[layout]

    def run(self, plan: Plan, constants: Constants) -> Outcome | None:
        """What a plan takes; None if it cannot be: microbatches too small, too deep."""
        size = self.batch_size // plan.num_microbatches
        if plan.system.has_one_group and self.model.regrouped is not None:
            return self._run_in_one_group(plan, size, constants)
        at_once = self.model.examples_at_once
        if self.batch_size % plan.num_microbatches or any(
            size % (layout.data * at_once) for layout in plan.layouts
        ):
            return None
        if len(plan.layouts) > len(self.model.sequence):
            return None
        return self._run(plan, size, constants)

    def _run_in_one_group(
        self, plan: Plan, size: int, constants: Constants
    ) -> Outcome | None:
        """As `run`, a device's examples routed at once; None if masks are too big."""
        here, left = divmod(size, plan.layouts[0].data)
        row, regrouped = self._row, self.model.regrouped
        mask = (here * row.setting.seq_len) ** 2 * 2 * self.model.itemsize
        if left or not here or regrouped is None or mask > self.budget_bytes:
            return None
        if here not in self._regrouped:
            model = replace(regrouped(here), regrouped=None)
            self._regrouped[here] = Simulator(
                replace(row, model=model), self._planned_with
            )
        return self._regrouped[here].run(plan, constants)

    def _run(self, plan: Plan, size: int, constants: Constants) -> Outcome | None:
        sequence = np.array(self.model.sequence)
        found = [self._unit_seconds(each, size, constants) for each in plan.layouts]
        if not plan.remat:
            found = [_without_recompute(each) for each in found]
        busy = [each[:, :ONCE].sum(axis=1)[sequence] for each in found]
        bounds = (
            _equal_bounds(self.model, len(plan.layouts))
            if plan.system.has_equal_stages
            else _balanced_bounds(
                busy,
                [self._state_bytes(plan.system, each) for each in plan.layouts],
                self.budget_bytes,
            )
        )
        if bounds is None:
            return None
        stages = [sequence[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        forward = [s[units, 0].sum() for s, units in zip(found, stages, strict=True)]
        backward = [s[units, 1:3].sum() for s, units in zip(found, stages, strict=True)]
        update = []
        for layout, s, units in zip(plan.layouts, found, stages, strict=True):
            rounds = (
                (plan.num_microbatches + 1) / 2 if plan.system.reduces_always else 1
            )
            update.append(s[units, ONCE].sum() * rounds)
            state = self._state_params(plan.system, layout, units)
            device = cluster_of(layout, self.kind, constants).device
            update[-1] += state * UPDATE_BYTES / device.bytes_per_second
        sent = [
            self._sent_seconds(plan, index, int(units[-1]), size, constants)
            for index, units in enumerate(stages[:-1])
        ]
        peaks = [
            self._peak_bytes(plan, index, units, size)
            for index, units in enumerate(stages)
        ]
        return Outcome(
            *(plan, np.array(forward), np.array(backward), np.array([*sent, 0.0])),
            *(np.array(update), max(peaks), self.budget_bytes, tuple(bounds)),
        )

    def _unit_seconds(
        self, layout: Layout, size: int, constants: Constants
    ) -> np.ndarray:
        key = layout, size, constants
        if key not in self._seconds:
            cluster = cluster_of(layout, self.kind, constants)
            units = self.model.units
            unfused = [i for i, unit in enumerate(units) if not unit.is_fused]
            found = self.costs(layout).seconds(
                cluster, size, constants.fused_fraction, unfused
            )
            self._seconds[key] = found.total
        return self._seconds[key]

    def _state_params(self, system: System, layout: Layout, units: np.ndarray) -> float:
        """Parameters whose optimizer state one device holds."""
        whole = np.array(self.model.num_params, float)[units].sum()
        held = self.costs(layout).param_bytes[units].sum()
        local = held / self.model.itemsize
        return min(whole / layout.size, local) if system.splits_state else local

    def _state_bytes(self, system: System, layout: Layout) -> np.ndarray:
        """Parameters, gradients and optimizer state of each unit in the sequence."""
        key = "state", system, layout
        if key not in self._seconds:
            costs, units = self.costs(layout), range(len(self.model.units))
            state = [self._state_params(system, layout, np.array([u])) for u in units]
            held = costs.param_bytes + costs.gradient_bytes
            held = held + self.model.state_bytes * np.array(state)
            self._seconds[key] = held[np.array(self.model.sequence)]
        return self._seconds[key]

    def _peak_bytes(
        self, plan: Plan, index: int, units: np.ndarray, size: int
    ) -> float:
        layout = plan.layouts[index]
        costs = self.costs(layout)
        ahead = min(plan.num_microbatches, len(plan.layouts) - index)
        kept = costs.kept_bytes[0] + size * costs.kept_bytes[1]
        temp = costs.temp_bytes[0] + size * costs.temp_bytes[1]
        fixed = (costs.param_bytes + costs.gradient_bytes)[units].sum()
        fixed += self.model.state_bytes * self._state_params(plan.system, layout, units)
        if plan.remat:
            return fixed + ahead * kept[units].sum() + temp[np.unique(units)].max()
        return fixed + ahead * np.maximum(temp, kept)[units].sum()

    def _sent_seconds(
        self, plan: Plan, index: int, unit: int, size: int, constants: Constants
    ) -> float:
        """Of one microbatch from a stage to the next: every tile is sent once."""
        here, there = plan.layouts[index : index + 2]
        per_host = self.devices_per_host
        first = sum(layout.size for layout in plan.layouts[: index + 1])
        crosses = first % per_host == 0
        host = cluster_of(Layout(2, per_host, 1, 2 * per_host), self.kind, constants)
        amount = size * self.model.border_bytes[unit]
        link = host.network_link if crosses else host.host_link
        lanes = min(per_host if crosses else here.size, there.size, here.size)
        per_byte = link.seconds_per_byte / (per_host if crosses else lanes)
        return link.alpha_seconds + amount * per_byte


@lru_cache(maxsize=4096)
def cluster_of(layout: Layout, kind: str, constants: Constants) -> Cluster:
    """The devices of a layout as a cluster."""
    return constants.applied(_preset(f"{layout.hosts}x{layout.devices}x{kind}"))


@lru_cache
def _preset(name: str) -> Cluster:
    return Cluster.preset(name)


def best_plan(
    simulator: Simulator, plans: Sequence[Plan], constants: Constants
) -> Outcome | None:
    """What one system would run, of plans that fit; None if none does.

    The fastest; or the first, if it takes the largest microbatches: plans come with the
    fewest microbatches first.
    """
    found = (simulator.run(plan, constants) for plan in plans)
    feasible = (each for each in found if each is not None and each.is_feasible)
    if plans and plans[0].system.has_largest_microbatch:
        return next(feasible, None)
    return min(feasible, key=lambda each: each.seconds, default=None)


def _without_recompute(seconds: np.ndarray) -> np.ndarray:
    found = seconds.copy()
    found[:, 1] = 0.0
    return found


def _equal_bounds(model: UnitModel, stages: int) -> tuple[int, ...] | None:
    """As many layers in each stage; None if they do not divide."""
    repeated = max(model.groups, key=lambda group: group.count)
    layers, left = divmod(repeated.count * len(repeated.units), model.units_a_layer)
    if layers % stages or left:
        return None
    start = model.sequence.index(model.counts.index(repeated.count))
    share = layers // stages * model.units_a_layer
    inner = [start + share * stage for stage in range(1, stages)]
    return (0, *inner, len(model.sequence))


def _balanced_bounds(
    busy: Sequence[np.ndarray],
    held: Sequence[np.ndarray] | None = None,
    capacity: float = 0.0,
) -> tuple[int, ...] | None:
    """Contiguous units for each stage, so that the slowest is as fast as can be.

    `held` [units] by stage are bytes of state, of which no stage has above `capacity`.
    """
    number = len(busy[0])
    sums = [np.concatenate([[0.0], np.cumsum(each)]) for each in busy]
    states = [np.concatenate([[0.0], np.cumsum(each)]) for each in held or ()]

    def deal(limit: float) -> tuple[int, ...] | None:
        bounds, start = [0], 0
        for index, total in enumerate(sums):
            left = len(sums) - index - 1
            end = int(
                np.searchsorted(total, total[start] + limit * (1 + 1e-9), "right")
            )
            end = min(end - 1, number - left)
            if states:
                most = states[index][start] + capacity
                end = min(end, int(np.searchsorted(states[index], most, "right")) - 1)
            if end <= start:
                return None
            bounds.append(end)
            start = end
        return tuple(bounds) if start == number else None

    slowest = np.max(busy, axis=0)
    fastest = np.min(busy, axis=0)
    low = max(float(fastest.sum()) / len(busy), float(fastest.max()))
    high = float(slowest.sum()) / len(busy) + float(slowest.max())
    best = deal(high)
    if best is None:
        high = float(slowest.sum())
        best = deal(high)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        found = deal(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best
