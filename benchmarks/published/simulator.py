"""What a plan takes: units dealt out to stages, a schedule run, memory summed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autopar.option_values import RESERVED_FRACTION
from benchmarks.published.machines import Machine
from benchmarks.published.pipeline import StageSeconds, balanced_bounds
from benchmarks.published.seconds import (
    BACKWARD,
    FORWARD,
    ONCE,
    RECOMPUTE,
    System,
    exposed,
    unit_seconds,
)
from benchmarks.published.wide_resnet import WideResnet
from benchmarks.published.work import Layout, Transformer, Units

UPDATE_BYTES = 28  # of Adam for a parameter: read gradient, read and write the rest


@dataclass(frozen=True)
class Plan:
    """Layouts of the submeshes, in order, and the number of microbatches.

    A submesh has one stage, or `num_chunks` of an interleaved schedule.
    """

    layouts: tuple[Layout, ...]
    num_microbatches: int
    system: System = field(default_factory=System)
    num_chunks: int = 1
    dtype: str = ""

    @property
    def stages(self) -> tuple[Layout, ...]:
        """The layout of each stage."""
        return self.layouts * self.num_chunks

    def __str__(self) -> str:
        counts: dict[Layout, int] = {}
        for layout in self.layouts:
            counts[layout] = counts.get(layout, 0) + 1
        stages = " + ".join(f"{count}x{layout}" for layout, count in counts.items())
        chunks = f", {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        remat = "" if self.system.remat == "full" else f", remat {self.system.remat}"
        return f"{stages}, {self.num_microbatches} microbatches{chunks}{remat}"


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

    @cached_property
    def bound(self) -> float:
        """Seconds by a formula."""
        return self.stages.bound(self.plan.num_microbatches)

    @cached_property
    def seconds(self) -> float:
        """By the schedule."""
        return self.stages.makespan(self.plan.num_microbatches)


class Simulator:
    """Predicts plans of one model and batch on one machine."""

    def __init__(
        self, model: Transformer | WideResnet, batch_size: int, machine: Machine
    ) -> None:
        self.model, self.batch_size, self.machine = model, batch_size, machine
        memory = machine.cluster.device.memory_bytes
        self.budget_bytes = memory * (1 - RESERVED_FRACTION)
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
        forward, backward, update = np.array(rows).T
        sent = [
            self._sent_seconds(plan, index, int(units[-1]), size)
            for index, units in enumerate(stages[:-1])
        ]
        number = len(plan.layouts)
        found = StageSeconds(number, forward, backward, np.array([*sent, 0.0]), update)
        flying = found.in_flight(plan.num_microbatches)
        peak = self._peak_bytes(plan, stages, size, flying)
        return Outcome(plan, found, peak, self.budget_bytes, bounds)

    def _costs(
        self, plan: Plan, layout: Layout, size: int
    ) -> tuple[Units, np.ndarray, np.ndarray]:
        """Units, and [units, phases] of what is waited for and what is ahead."""
        key = layout, size, plan.system, plan.dtype
        if key not in self._priced:
            units = self.model.units(layout, size, plan.system.how)
            given = self.machine.of(layout), plan.system, plan.dtype or self.model.dtype
            found = [unit_seconds(unit, layout, *given) for unit in units]
            waited, ahead = (np.array(each) for each in zip(*found, strict=True))
            self._priced[key] = units, waited, ahead
        return self._priced[key]

    def _bounds(self, plan: Plan, size: int) -> tuple[int, ...] | None:
        """Where stages begin and end; None if there are too few units.

        As many layers in each, or so that they work as long, in flops or in seconds.
        """
        sequence, number = np.array(self.model.sequence), len(plan.stages)
        share, left = divmod(self.model.layers, number)
        if number == 1 or (plan.system.has_equal_stages and not left):
            each = share * self.model.units_a_layer
            return 0, *(1 + each * n for n in range(1, number)), len(sequence)
        if plan.system.has_equal_stages or number > len(sequence):
            return None
        work, held = [], []
        for layout in plan.stages:
            units, waited, _ = self._costs(plan, layout, size)
            flops = np.array([sum(p.flops for p in u.products) for u in units])
            busy = flops if plan.system.balances_flops else waited[:, :ONCE].sum(axis=1)
            work.append(busy[sequence])
            held.append(self._state_bytes(plan.system, layout, units)[sequence])
        return balanced_bounds(work, held, self.budget_bytes / plan.num_chunks)

    def _stage_seconds(
        self, plan: Plan, layout: Layout, units: np.ndarray, size: int
    ) -> tuple[float, float, float]:
        """Forward, backward with what is recomputed, and once a step."""
        known, waited, ahead = self._costs(plan, layout, size)
        waits = waited[units].sum(axis=0) / self.machine.steady
        beside, cluster = ahead[units].sum(axis=0), self.machine.of(layout)
        behind = float(waits[RECOMPUTE] + waits[BACKWARD])
        sent = float(beside[RECOMPUTE] + beside[BACKWARD])
        params = self._state_params(plan.system, layout, known)[units].sum()
        update = params * UPDATE_BYTES / cluster.device.bytes_per_second
        return (
            waits[FORWARD] + exposed(beside[FORWARD], waits[FORWARD], cluster),
            behind + exposed(sent, behind, cluster),
            update + exposed(float(beside[ONCE]), behind, cluster),
        )

    def _state_params(self, system: System, layout: Layout, units: Units) -> np.ndarray:
        """[units] parameters whose optimizer state one device holds."""
        inner = layout.inner or layout.data
        parts = (inner if system.gathers else layout.data) * layout.context
        is_split = system.gathers or system.splits_state
        copies = 1 if system.gathers or not is_split else layout.data // inner
        return np.array(
            [u.params / (parts if is_split else 1) + u.experts / copies for u in units]
        )

    def _state_bytes(self, system: System, layout: Layout, units: Units) -> np.ndarray:
        """[units] parameters, gradients and optimizer state.

        What is gathered is kept in 32 bits, as optimizer state.
        """
        local = self._state_params(system, layout, units)
        whole = np.array([u.params + u.experts for u in units])
        size = self.model.itemsize
        params = 0.0 if system.gathers else whole * size
        gradients = local if system.gathers or system.reduces_always else whole
        kept = self.model.state_bytes + system.kept_bytes
        return params + gradients * max(size, system.gradient_bytes) + kept * local

    def _peak_bytes(
        self, plan: Plan, stages: Sequence[np.ndarray], size: int, flying: np.ndarray
    ) -> float:
        """State, what microbatches in flight keep, and temporaries; of the fullest."""
        number, system = len(plan.layouts), plan.system
        fixed, most, made = (np.zeros(number) for _ in range(3))
        for index, (layout, units) in enumerate(zip(plan.stages, stages, strict=True)):
            known, _, _ = self._costs(plan, layout, size)
            place, here = index % number, [known[unit] for unit in units]
            kept = sum(u.held_bytes(system.remat, self.model.itemsize) for u in here)
            fixed[place] += self._state_bytes(system, layout, known)[units].sum()
            made[place] += self._state_params(system, layout, known)[units].sum()
            gate = (
                2 * system.gate_bytes * (size / layout.data * self.model.seq_len) ** 2
            )
            most[place] = max(most[place], max(u.kept_bytes for u in here) + gate)
            fixed[place] += kept * flying[index]
        return float((fixed + np.maximum(most, made * system.update_bytes)).max())

    def _sent_seconds(self, plan: Plan, index: int, unit: int, size: int) -> float:
        """Of one microbatch from a stage to the next: every tile is sent once."""
        per_host, number = self.machine.devices_per_host, len(plan.layouts)
        here, there = (plan.layouts[i % number] for i in (index, index + 1))
        ends = np.cumsum([layout.size for layout in plan.layouts])
        from_host = int(ends[index % number] - 1) // per_host
        to_host = int(ends[(index + 1) % number] - there.size) // per_host
        crosses, cluster = from_host != to_host, self.machine.cluster
        known, _, _ = self._costs(plan, here, size)
        link = cluster.network_link if crosses else cluster.host_link
        lanes = per_host if crosses else min(here.size, there.size)
        return link.alpha_seconds + (
            known[unit].border_bytes * link.seconds_per_byte / lanes
        )


def best_plan(simulator: Simulator, plans: Sequence[Plan]) -> Outcome | None:
    """What one system would run, of plans that fit; None if none does.

    The fastest; of each layout only the first that fits, if the system takes the
    largest microbatches: plans come with the fewest microbatches first.
    """
    fitting: dict[object, Outcome] = {}
    for plan in plans:
        key = plan.layouts if plan.system.has_largest_microbatch else plan
        found = None if key in fitting else simulator.run(plan)
        if found is not None and found.is_feasible:
            fitting[key] = found
    return min(fitting.values(), key=lambda each: each.bound, default=None)
