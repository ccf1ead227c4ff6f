"""Predicted beside measured step seconds, before and after calibration.

The devices of this process are measured (`autopar calibrate`), or their file is given.
Each model is planned with the preset's constants and run; the same plan is then priced
with the measured constants. The plan that calibration leads to is run too.

    python -m benchmarks.prediction --models mlp gpt --rounds 10
    python -m benchmarks.prediction --cluster my.toml
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.clusters.cluster import Cluster
    from autopar.steps.parallel_plan import Plan

    from .models import Workload


@dataclass(frozen=True)
class Measurement:
    """One plan on 8 virtual devices: seconds predicted with two sets of constants."""

    model: str
    planned_with: str  # the constants that the plan was chosen by
    mesh: str
    preset_seconds: float
    calibrated_seconds: float
    measured_seconds: float

    def error(self, predicted: float) -> float:
        """How many times off a prediction is, either way; 1 is exact."""
        ratio = predicted / self.measured_seconds
        return max(ratio, 1 / ratio)


def measure(
    workload: Workload, preset: Cluster, calibrated: Cluster, rounds: int
) -> list[Measurement]:
    """Runs the plan that each set of constants leads to."""
    import autopar

    found = []
    for name, cluster in (("preset", preset), ("calibrated", calibrated)):
        step = autopar.parallelize(workload.step, cluster=cluster)
        plan = step.plan(*workload.abstract())
        found.append(
            Measurement(
                workload.name,
                name,
                str(plan.sharding.mesh),
                predicted_seconds(workload, plan, preset),
                predicted_seconds(workload, plan, calibrated),
                measured_seconds(workload, plan, rounds),
            )
        )
    return found


def predicted_seconds(workload: Workload, plan: Plan, cluster: Cluster) -> float:
    """Seconds of a step under a plan, by a cluster's constants."""
    from autopar.frontend.tracing import trace
    from autopar.graph.build_graph import build_graph
    from autopar.planner.whole_step import roles_of
    from benchmarks.plan_price import plan_seconds

    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    return plan_seconds(graph, plan.sharding, cluster)


def measured_seconds(workload: Workload, plan: Plan, rounds: int) -> float:
    """The median step, after two that warm up."""
    import jax

    import autopar

    step = autopar.parallelize(workload.step, plan=plan)
    state, batch = workload.init(jax.random.key(0)), workload.make_batch(0)
    times = []
    for _ in range(rounds + 2):
        start = perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        times.append(perf_counter() - start)
    return statistics.median(times[2:])


def print_table(found: Sequence[Measurement]) -> None:
    """One row for each plan, with how many times off each prediction is."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="step seconds on 8 virtual devices, predicted and measured")
    for column in ("model", "planned with", "mesh"):
        table.add_column(column)
    for column in ("measured ms", "preset ms", "off", "calibrated ms", "off"):
        table.add_column(column, justify="right")
    for each in found:
        table.add_row(
            each.model,
            each.planned_with,
            each.mesh,
            f"{each.measured_seconds * 1e3:.2f}",
            f"{each.preset_seconds * 1e3:.2f}",
            f"{each.error(each.preset_seconds):.2f}x",
            f"{each.calibrated_seconds * 1e3:.2f}",
            f"{each.error(each.calibrated_seconds):.2f}x",
        )
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cluster", help="a file that autopar calibrate wrote")
    parser.add_argument("--json", help="write the measurements to this file")
    arguments = parser.parse_args()
    from autopar.clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(8)
    from autopar.clusters.cluster import Cluster
    from autopar.commands.calibrate import calibrate

    from .models import build

    path = arguments.cluster
    calibrated = Cluster.load(path) if path else calibrate(tell=print)
    found: list[Measurement] = []
    for model in arguments.models:
        workload = build(model)
        found += measure(workload, Cluster.local(), calibrated, arguments.rounds)
    print_table(found)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(e) for e in found]))


if __name__ == "__main__":
    main()
