"""Predicted memory of a device beside that of the compiled program.

For every model and mesh: what the plan predicts (`costs/memory.py`), what the compiled
program holds (argument + output + temp - alias), and their ratio; with `--budgets` the
same for plans within these fractions of the free plan's figure, where the prediction is
corrected by the error that compiling showed (`compiled_memory.py`).

    python -m benchmarks.memory_error
    python -m benchmarks.memory_error --models gpt --meshes "x:8" --budgets 0.9 0.8
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .against_methods import MODELS as ALL_MODELS

_SMALL = "mlp", "gpt", "gpt, scan", "gpt, scan, remat", "bert", "vit", "lstm", "resnet"
MODELS = {name: ALL_MODELS[name] for name in _SMALL}
MESHES = ("x:8", "x:2;y:4")


@dataclass(frozen=True)
class Measurement:
    """Bytes of one device; `budget_bytes` is 0 without a budget of the user's."""

    model: str
    mesh: str
    budget_bytes: int
    predicted_bytes: int
    compiled_bytes: int
    state_bytes: int
    gap: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over compiled."""
        return self.predicted_bytes / self.compiled_bytes if self.compiled_bytes else 0

    def __str__(self) -> str:
        budget = f"{self.budget_bytes:,}" if self.budget_bytes else "-"
        return (
            f"| {self.model} | {self.mesh} | {budget} | {self.predicted_bytes:,} | "
            f"{self.compiled_bytes:,} | {self.ratio:.3f} | {self.state_bytes:,} | "
            f"{self.gap:.2%} | {self.note} |"
        )


def measure(model: str, mesh: str, budgets: Sequence[float]) -> Iterator[Measurement]:
    """The free plan, and one for each fraction of its figure as a budget."""
    from autopar.errors import InfeasiblePlanError

    free = _measure(model, mesh, None)
    yield free
    for fraction in budgets:
        budget = int(free.compiled_bytes * fraction)
        try:
            yield _measure(model, mesh, budget)
        except InfeasiblePlanError as error:
            note = f"infeasible, least {error.least_budget_bytes:,}"
            yield Measurement(model, mesh, budget, 0, 0, 0, 0.0, note)


def _measure(model: str, mesh: str, budget: int | None) -> Measurement:
    import autopar
    from autopar.audit.memory_use import MemoryUse

    from .models import build

    name, options = MODELS[model]
    workload = build(name, **options)
    step = autopar.parallelize(workload.step, mesh=mesh, memory_budget=budget)
    compiled = step.lower(*workload.abstract()).compile()
    plan = compiled.plan
    seen = MemoryUse.of(compiled.compiled).device_bytes
    return Measurement(
        *(model, mesh, budget or 0, plan.predicted.peak_bytes, seen),
        *(plan.sharding.state_bytes(), plan.predicted.optimality_gap),
        "above the budget" if budget is not None and seen > budget else "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--budgets", nargs="*", type=float, default=[])
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "")
        + " --xla_force_host_platform_device_count=8"
        # The order of kernels that the model is made after; the other needs more.
        + " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    )
    print("| model | mesh | budget | predicted | compiled | ratio | state | gap | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in arguments.models:
        for mesh in arguments.meshes:
            for each in measure(model, mesh, arguments.budgets):
                print(each, flush=True)


if __name__ == "__main__":
    main()
