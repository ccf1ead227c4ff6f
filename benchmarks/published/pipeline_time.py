"""Seconds and bytes of an iteration: units dealt out to stages, microbatches, updates.

Stages run 1F1B. Stage i of p holds at most p - i microbatches, so besides its own work
a microbatch waits for the round trip to the last stage and back:

    period = max over i of  busy_i,  (sum over j >= i of busy_j + 2 sent_j) / (p - i)
    seconds = sum of (busy + 2 sent) + (M - 1) period + the slowest update

which a search can afford: exact for equal stages, too much by up to a sixth where they
are unequal and microbatches few. `simulated_seconds` runs the schedule itself
(`schedules.py`) and is what tables print; other schedules have no such formula here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.planner.memory_budget import RESERVED_FRACTION
from benchmarks.published.constants import Constants
from benchmarks.published.schedules import (
    ONE_F_ONE_B,
    StageSeconds,
    held_at_most,
    makespan,
)
from benchmarks.published.simulated_plan import Plan, System
from benchmarks.published.stage_bounds import balanced_bounds, equal_bounds, is_cut
from benchmarks.published.table import Row
from benchmarks.published.unit_costs import (
    FORWARD,
    ONCE,
    RECOMPUTE,
    WEIGHT,
    Layout,
    UnitCosts,
    unit_costs,
)

_CHOICES = 2  # experts of a token, for each of which there is a slot
UPDATE_BYTES = 28  # of Adam for a parameter: read gradient, read and write the rest


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a plan takes; `peak_bytes` is the fullest device's.

    `bounds` are places in the sequence of units where stages begin and end.
    """

    plan: Plan
    stages: StageSeconds
    peak_bytes: float
    budget_bytes: float
    bounds: tuple[int, ...]

    @property
    def is_feasible(self) -> bool:
        return self.peak_bytes <= self.budget_bytes

    @property
    def least_seconds(self) -> float:
        """What the busiest submesh works: no schedule of these stages takes less."""
        busy = self.stages.forward + self.stages.backward
        return self.plan.num_microbatches * float(busy.max())

    @cached_property
    def period(self) -> float:
        """Seconds from a microbatch of 1F1B to the next, once the pipeline is full."""
        busy = self.stages.forward + self.stages.backward
        behind = np.cumsum((busy + 2 * self.stages.sent)[::-1])[::-1]
        ahead = np.minimum(np.arange(len(busy), 0, -1), self.plan.num_microbatches)
        return max(float(busy.max()), float((behind / ahead).max()))

    @cached_property
    def seconds(self) -> float:
        """By the formula, where the schedule is 1F1B."""
        if self.plan.schedule != ONE_F_ONE_B:
            return self.simulated_seconds
        each = self.stages
        total = float((each.forward + each.backward + 2 * each.sent).sum())
        more = (self.plan.num_microbatches - 1) * self.period
        return total + more + float(each.update.max())

    @cached_property
    def simulated_seconds(self) -> float:
        """By the schedule."""
        plan = self.plan
        sizes = len(plan.layouts), plan.num_microbatches
        return makespan(plan.schedule, self.stages, *sizes)


class Simulator:
    """Predicts plans of one model on one kind of machine; layouts are planned once."""

    def __init__(self, row: Row, planned_with: Constants) -> None:
        self._row = row
        self.model, self.batch_size = row.model, row.batch_size
        self._machine = row.setting
        self.devices_per_host = row.setting.devices_per_host
        self.budget_bytes = row.setting.memory_bytes * (1 - RESERVED_FRACTION)
        self._planned_with = planned_with
        self._costs: dict[Layout, UnitCosts] = {}
        self._seconds: dict[object, np.ndarray] = {}
        self._regrouped: dict[int, Simulator] = {}
        borders = np.array(self.model.border_bytes)[list(self.model.sequence)]
        self._borders = is_cut(borders)

    def costs(self, layout: Layout) -> UnitCosts:
        if layout not in self._costs:
            cluster = self.cluster_of(layout, self._planned_with)
            self._costs[layout] = unit_costs(self.model, layout, cluster)
        return self._costs[layout]

    def cluster_of(self, layout: Layout, constants: Constants) -> Cluster:
        """The devices of a layout, of the row's machine."""
        bandwidth = self._machine.network_bandwidth
        return cluster_of(layout, self._machine.kind, constants, bandwidth)

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
        if len(plan.stages) > len(self.model.sequence):
            return None
        return self._run(plan, size, constants)

    def _run_in_one_group(
        self, plan: Plan, size: int, constants: Constants
    ) -> Outcome | None:
        """As `run`, a device's examples routed at once; None if masks are too big.

        While a layer of experts is made again, its gate holds its masks beside what the
        layer keeps, which is that of a layer with small groups.
        """
        here, left = divmod(size, plan.layouts[0].data)
        row, regrouped = self._row, self.model.regrouped
        num_tokens = here * row.setting.seq_len
        gate_bytes = num_tokens * _CHOICES * num_tokens * plan.system.gate_bytes
        if left or not here or regrouped is None or gate_bytes > self.budget_bytes:
            return None
        if here not in self._regrouped:
            model = replace(regrouped(here), regrouped=None)
            self._regrouped[here] = Simulator(
                replace(row, model=model), self._planned_with
            )
        found = self._regrouped[here].run(plan, constants)
        in_groups = replace(plan, system=replace(plan.system, has_one_group=False))
        beside = self.run(in_groups, constants)
        if found is None or beside is None:
            return found
        peak_bytes = max(found.peak_bytes, beside.peak_bytes + gate_bytes)
        return replace(found, peak_bytes=peak_bytes)

    def _run(self, plan: Plan, size: int, constants: Constants) -> Outcome | None:
        sequence = np.array(self.model.sequence)
        found = [self._unit_seconds(each, size, constants) for each in plan.stages]
        if not plan.remat:
            found = [_without_recompute(each) for each in found]
        if plan.system.balances_flops:
            work = [self._forward_flops(each, size) for each in plan.stages]
        else:
            work = [each[:, :ONCE].sum(axis=1) for each in found]
        busy = [each[sequence] for each in work]
        bounds = (
            equal_bounds(self.model, len(plan.stages))
            if plan.system.has_equal_stages
            else balanced_bounds(
                busy,
                self._borders,
                [self._state_bytes(plan.system, each) for each in plan.stages],
                self.budget_bytes / plan.num_chunks,
            )
        )
        if bounds is None:
            return None
        stages = [sequence[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        pairs = list(zip(found, stages, strict=True))
        update = []
        for layout, s, units in zip(plan.stages, found, stages, strict=True):
            rounds = (
                (plan.num_microbatches + 1) / 2 if plan.system.reduces_always else 1
            )
            update.append(s[units, ONCE].sum() * rounds)
            state = self._state_params(plan.system, layout, units)
            device = self.cluster_of(layout, constants).device
            update[-1] += state * UPDATE_BYTES / device.bytes_per_second
        sent = [
            self._sent_seconds(plan, index, int(units[-1]), size, constants)
            for index, units in enumerate(stages[:-1])
        ]
        seconds = StageSeconds(
            np.array([s[units, FORWARD].sum() for s, units in pairs]),
            np.array([s[units, RECOMPUTE:ONCE].sum() for s, units in pairs]),
            np.array([s[units, WEIGHT].sum() for s, units in pairs]),
            np.array([*sent, 0.0]),
            np.array(update),
        )
        peak = max(self._peak_bytes(plan, stages, size))
        return Outcome(plan, seconds, peak, self.budget_bytes, tuple(bounds))

    def _unit_seconds(
        self, layout: Layout, size: int, constants: Constants
    ) -> np.ndarray:
        key = layout, size, constants
        if key not in self._seconds:
            cluster = self.cluster_of(layout, constants)
            units = self.model.units
            unfused = [i for i, unit in enumerate(units) if not unit.is_fused]
            found = self.costs(layout).seconds(
                cluster, size, constants.fused_fraction, unfused
            )
            self._seconds[key] = found.total
        return self._seconds[key]

    def _forward_flops(self, layout: Layout, size: int) -> np.ndarray:
        """[units] of products on one device, for a microbatch of `size` examples."""
        key = "flops", layout, size
        if key not in self._seconds:
            costs = self.costs(layout)
            counted = costs.is_heavy & (costs.phase == FORWARD)
            flops = (costs.flops[0] + size * costs.flops[1]) * costs.scale * counted
            number = len(self.model.units)
            self._seconds[key] = np.bincount(costs.unit, flops, number)
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
            kept = self.model.state_bytes + system.kept_bytes
            gradients = costs.gradient_bytes
            if system.reduces_always:
                gradients = self.model.itemsize * np.array(state)
            held = costs.param_bytes + gradients + kept * np.array(state)
            self._seconds[key] = held[np.array(self.model.sequence)]
        return self._seconds[key]

    def _peak_bytes(
        self, plan: Plan, stages: Sequence[np.ndarray], size: int
    ) -> list[float]:
        """By submesh: state, what microbatches in flight keep, and temporaries."""
        number = len(plan.layouts)
        fixed, most, held = [0.0] * number, [0.0] * number, list[float]()
        made, ends = [0.0] * number, np.cumsum([0, *(len(units) for units in stages)])
        for index, (layout, units) in enumerate(zip(plan.stages, stages, strict=True)):
            costs, submesh = self.costs(layout), index % number
            kept = costs.kept_bytes[0] + size * costs.kept_bytes[1]
            temp = costs.temp_bytes[0] + size * costs.temp_bytes[1]
            state = self._state_bytes(plan.system, layout)
            fixed[submesh] += state[ends[index] : ends[index + 1]].sum()
            params = self._state_params(plan.system, layout, units)
            made[submesh] += plan.system.update_bytes * params
            if plan.remat:
                held.append(kept[units].sum())
                most[submesh] = max(most[submesh], temp[np.unique(units)].max())
            else:
                held.append(np.maximum(temp, kept)[units].sum())
        flying = held_at_most(plan.schedule, held, number, plan.num_microbatches)
        return [
            state + max(temporary + kept, update)
            for state, temporary, kept, update in zip(
                fixed, most, flying, made, strict=True
            )
        ]

    def _sent_seconds(
        self, plan: Plan, index: int, unit: int, size: int, constants: Constants
    ) -> float:
        """Of one microbatch from a stage to the next: every tile is sent once."""
        per_host, number = self.devices_per_host, len(plan.layouts)
        here, there = (plan.layouts[i % number] for i in (index, index + 1))
        ends = np.cumsum([layout.size for layout in plan.layouts])
        from_host = int(ends[index % number] - 1) // per_host
        to_host = int(ends[(index + 1) % number] - there.size) // per_host
        crosses = from_host != to_host
        host = self.cluster_of(Layout(2, per_host, 1, 2 * per_host), constants)
        amount = size * self.model.border_bytes[unit]
        link = host.network_link if crosses else host.host_link
        lanes = min(per_host if crosses else here.size, there.size, here.size)
        per_byte = link.seconds_per_byte / (per_host if crosses else lanes)
        return link.alpha_seconds + amount * per_byte


@lru_cache(maxsize=4096)
def cluster_of(
    layout: Layout,
    kind: str,
    constants: Constants,
    network_bandwidth: float | None = None,
) -> Cluster:
    """The devices of a layout as a cluster.

    `network_bandwidth` is a device's share of its host's, bytes/s; None: the preset's.
    """
    cluster = _preset(f"{layout.hosts}x{layout.devices}x{kind}")
    if network_bandwidth is not None:
        link = replace(cluster.network_link, bandwidth=network_bandwidth)
        cluster = replace(cluster, network_link=link)
    return constants.applied(cluster)


@lru_cache
def _preset(name: str) -> Cluster:
    return Cluster.preset(name)


def best_plan(
    simulator: Simulator, plans: Sequence[Plan], constants: Constants
) -> Outcome | None:
    """What one system would run, of plans that fit; None if none does.

    The fastest; of each layout only the first that fits, if the system takes the
    largest microbatches: plans come with the fewest microbatches first.
    """
    fitting: dict[object, Outcome] = {}
    for plan in plans:
        key = plan.layouts if plan.system.has_largest_microbatch else plan
        if key in fitting:
            continue
        found = simulator.run(plan, constants)
        if found is not None and found.is_feasible:
            fitting[key] = found
    best: Outcome | None = None
    for found in sorted(fitting.values(), key=lambda each: each.least_seconds):
        if best is not None and found.least_seconds >= best.seconds:
            break
        if best is None or found.seconds < best.seconds:
            best = found
    return best


def _without_recompute(seconds: np.ndarray) -> np.ndarray:
    found = seconds.copy()
    found[:, RECOMPUTE] = 0.0
    return found
