"""What a plan takes: units dealt out to stages, a schedule run, memory summed up.

`Outcome.seconds` is a formula of 1F1B with unequal stages: a step takes as long as its
stages one after the other, and then a *period* for each further microbatch, the longest
that any stage makes the others wait,

    period = max over stages k of (sum over i >= k of busy_i + 2 sent_i)
                                  / min(stages - k, microbatches)

and at least the busiest stage's. `simulated_seconds` runs the schedule itself
(`schedules.py`) and is what tables print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from autopar.clusters.cluster import Cluster
from autopar.planner.memory_budget import RESERVED_FRACTION
from benchmarks.published.schedules import (
    ONE_F_ONE_B,
    StageSeconds,
    held_at_most,
    makespan,
)
from benchmarks.published.seconds import (
    BACKWARD,
    FORWARD,
    ONCE,
    RECOMPUTE,
    WEIGHT,
    System,
    exposed,
    unit_seconds,
)
from benchmarks.published.stage_bounds import balanced_bounds, equal_bounds, is_cut
from benchmarks.published.work import Execution, Layout, Units

UPDATE_BYTES = 28  # of Adam for a parameter: read gradient, read and write the rest


class Model(Protocol):
    """What is simulated: `work.Transformer`, `wide_resnet.WideResnet`."""

    layers: int
    dtype: str
    itemsize: int
    state_bytes: int

    @property
    def sequence(self) -> tuple[int, ...]: ...
    @property
    def units_a_layer(self) -> int: ...
    @property
    def examples_at_once(self) -> int: ...
    def units(self, layout: Layout, size: float, how: Execution) -> Units: ...


@dataclass(frozen=True)
class Machine:
    """Hosts of equally many devices; `cluster` is one of any size.

    `steady`: what kernels of a whole step reach of their speed alone.
    """

    cluster: Cluster
    memory_bytes: float
    devices_per_host: int
    steady: float = 1.0

    def of(self, layout: Layout) -> Cluster:
        """The devices of a layout."""
        return replace(
            self.cluster, num_hosts=layout.hosts, devices_per_host=layout.devices
        )


@dataclass(frozen=True)
class Plan:
    """Layouts of the submeshes, in order, and the number of microbatches.

    A submesh has one stage, or `num_chunks` of an interleaved schedule.
    """

    layouts: tuple[Layout, ...]
    num_microbatches: int
    system: System = field(default_factory=System)
    schedule: str = ONE_F_ONE_B
    num_chunks: int = 1
    dtype: str = ""

    @property
    def stages(self) -> tuple[Layout, ...]:
        """The layout of each stage."""
        return self.layouts * self.num_chunks

    def __str__(self) -> str:
        kinds: list[list[object]] = []
        for layout in self.layouts:
            if kinds and kinds[-1][1] == layout:
                kinds[-1][0] = int(str(kinds[-1][0])) + 1
            else:
                kinds.append([1, layout])
        stages = " + ".join(f"{count}x{layout}" for count, layout in kinds)
        chunks = f" of {self.num_chunks} stages each" if self.num_chunks > 1 else ""
        schedule = "" if self.schedule == ONE_F_ONE_B else f", {self.schedule}{chunks}"
        remat = "" if self.system.remat == "full" else f", remat {self.system.remat}"
        return f"{stages}, {self.num_microbatches} microbatches{schedule}{remat}"


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
    """Predicts plans of one model and batch on one machine."""

    def __init__(self, model: Model, batch_size: int, machine: Machine) -> None:
        self.model, self.batch_size, self.machine = model, batch_size, machine
        self.budget_bytes = machine.memory_bytes * (1 - RESERVED_FRACTION)
        self._priced: dict[object, tuple[Units, np.ndarray, np.ndarray]] = {}

    def run(self, plan: Plan) -> Outcome | None:
        """What a plan takes; None if it cannot be: microbatches too small, too deep."""
        size, left = divmod(self.batch_size, plan.num_microbatches)
        at_once = 1 if plan.system.how.one_group else self.model.examples_at_once
        if left or any(size % (each.data * at_once) for each in plan.layouts):
            return None
        bounds = self._bounds(plan, size)
        if bounds is None:
            return None
        sequence = np.array(self.model.sequence)
        stages = [sequence[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        rows = [
            self._stage_seconds(plan, layout, units, size)
            for layout, units in zip(plan.stages, stages, strict=True)
        ]
        forward, backward, weight, update = np.array(rows).T
        sent = [
            self._sent_seconds(plan, index, int(units[-1]), size)
            for index, units in enumerate(stages[:-1])
        ]
        seconds = StageSeconds(forward, backward, weight, np.array([*sent, 0.0]), update)
        peak = max(self._peak_bytes(plan, stages, size))
        return Outcome(plan, seconds, peak, self.budget_bytes, bounds)

    def _unit_costs(
        self, plan: Plan, layout: Layout, size: int
    ) -> tuple[Units, np.ndarray, np.ndarray]:
        """Units, and [units, phases] of what is waited for and what is ahead."""
        key = layout, size, plan.system, plan.dtype
        if key not in self._priced:
            units = self.model.units(layout, size, plan.system.how)
            cluster, dtype = self.machine.of(layout), plan.dtype or self.model.dtype
            found = [unit_seconds(u, layout, cluster, plan.system, dtype) for u in units]
            waited, ahead = (
                np.array([getattr(each, name) for each in found])
                for name in ("waited", "ahead")
            )
            self._priced[key] = units, waited, ahead
        return self._priced[key]

    def _bounds(self, plan: Plan, size: int) -> tuple[int, ...] | None:
        """Where stages begin and end; None if there are too few units."""
        number = len(plan.stages)
        if number > len(self.model.sequence):
            return None
        if number == 1:
            return 0, len(self.model.sequence)
        if plan.system.has_equal_stages:
            return equal_bounds(self.model, number)
        sequence, work, held = np.array(self.model.sequence), [], []
        borders = np.zeros(len(sequence))
        for layout in plan.stages:
            units, waited, _ = self._unit_costs(plan, layout, size)
            flops = np.array([sum(p.flops for p in u.products) for u in units])
            busy = flops if plan.system.balances_flops else waited[:, :ONCE].sum(axis=1)
            work.append(busy[sequence])
            held.append(self._state_bytes(plan.system, layout, units)[sequence])
            borders = np.array([u.border_bytes for u in units])[sequence]
        share = self.budget_bytes / plan.num_chunks
        return balanced_bounds(work, is_cut(borders), held, share)

    def _stage_seconds(
        self, plan: Plan, layout: Layout, units: np.ndarray, size: int
    ) -> tuple[float, float, float, float]:
        """Forward, backward, the weights' part of it, and once a step."""
        known, waited, ahead = self._unit_costs(plan, layout, size)
        waits, beside = waited[units].sum(axis=0), ahead[units].sum(axis=0)
        waits = waits / self.machine.steady
        cluster, system = self.machine.of(layout), plan.system
        visible = cluster.visible_fraction
        forward = waits[FORWARD] + exposed(beside[FORWARD], waits[FORWARD], visible)
        behind = float(waits[RECOMPUTE : WEIGHT + 1].sum())
        sent = float(beside[RECOMPUTE : WEIGHT + 1].sum())
        backward = behind + exposed(sent, behind, visible)
        params = sum(self._state_params(system, layout, known)[units])
        update = params * UPDATE_BYTES / cluster.device.bytes_per_second
        return (
            forward,
            backward,
            float(waits[WEIGHT]),
            update + exposed(float(beside[ONCE]), behind, visible),
        )

    def _state_params(
        self, system: System, layout: Layout, units: Units
    ) -> np.ndarray:
        """[units] parameters whose optimizer state one device holds."""
        parts = layout.data * layout.context
        if system.gathers:
            parts = (layout.inner or layout.data) * layout.context
        elif not system.splits_state:
            parts = 1
        copies = layout.data // (layout.inner or layout.data)
        spread = copies if system.splits_state and not system.gathers else 1
        return np.array([u.params / parts + u.experts / spread for u in units])

    def _state_bytes(
        self, system: System, layout: Layout, units: Units
    ) -> np.ndarray:
        """[units] parameters, gradients and optimizer state."""
        local = self._state_params(system, layout, units)
        whole = np.array([u.params + u.experts for u in units])
        size = self.model.itemsize
        params = local * (0 if size == 2 else size) if system.gathers else whole * size
        gradients = local if system.gathers or system.reduces_always else whole
        kept = self.model.state_bytes + system.kept_bytes
        gradient_size = max(size, system.gradient_bytes)
        return params + gradients * gradient_size + kept * local

    def _peak_bytes(
        self, plan: Plan, stages: Sequence[np.ndarray], size: int
    ) -> list[float]:
        """By submesh: state, what microbatches in flight keep, and temporaries."""
        number = len(plan.layouts)
        fixed, most, held = [0.0] * number, [0.0] * number, list[float]()
        made = [0.0] * number
        for index, (layout, units) in enumerate(zip(plan.stages, stages, strict=True)):
            known, _, _ = self._unit_costs(plan, layout, size)
            submesh, system = index % number, plan.system
            fixed[submesh] += self._state_bytes(system, layout, known)[units].sum()
            state = self._state_params(system, layout, known)[units].sum()
            made[submesh] += system.update_bytes * state
            here = [known[unit] for unit in units]
            kept = (u.held_bytes(system.remat, self.model.itemsize) for u in here)
            held.append(sum(kept))
            temporary = max(2 * u.kept_bytes for u in here)
            gate = plan.system.gate_bytes * (size / layout.data) ** 2
            temporary += gate * getattr(self.model, "seq_len", 0) ** 2 * 2
            most[submesh] = max(most[submesh], temporary)
        flying = held_at_most(plan.schedule, held, number, plan.num_microbatches)
        return [
            state + max(temporary + kept, update)
            for state, temporary, kept, update in zip(
                fixed, most, flying, made, strict=True
            )
        ]

    def _sent_seconds(self, plan: Plan, index: int, unit: int, size: int) -> float:
        """Of one microbatch from a stage to the next: every tile is sent once."""
        per_host, number = self.machine.devices_per_host, len(plan.layouts)
        here, there = (plan.layouts[i % number] for i in (index, index + 1))
        ends = np.cumsum([layout.size for layout in plan.layouts])
        from_host = int(ends[index % number] - 1) // per_host
        to_host = int(ends[(index + 1) % number] - there.size) // per_host
        crosses = from_host != to_host
        cluster = self.machine.cluster
        known, _, _ = self._unit_costs(plan, here, size)
        link = cluster.network_link if crosses else cluster.host_link
        lanes = min(per_host if crosses else here.size, there.size, here.size)
        per_byte = link.seconds_per_byte / (per_host if crosses else lanes)
        return link.alpha_seconds + known[unit].border_bytes * per_byte


def best_plan(simulator: Simulator, plans: Sequence[Plan]) -> Outcome | None:
    """What one system would run, of plans that fit; None if none does.

    The fastest; of each layout only the first that fits, if the system takes the
    largest microbatches: plans come with the fewest microbatches first.
    """
    fitting: dict[object, Outcome] = {}
    for plan in plans:
        key = plan.layouts if plan.system.has_largest_microbatch else plan
        if key in fitting:
            continue
        found = simulator.run(plan)
        if found is not None and found.is_feasible:
            fitting[key] = found
    best: Outcome | None = None
    for found in sorted(fitting.values(), key=lambda each: each.least_seconds):
        if best is not None and found.least_seconds >= best.seconds:
            break
        if best is None or found.seconds < best.seconds:
            best = found
    return best
