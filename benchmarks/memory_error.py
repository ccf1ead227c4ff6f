"""Predicted memory of a device beside that of the compiled program.

For every model and mesh: what the model of memory says of the plan (`costs/memory.py`),
what the compiled program holds (argument + output + temp - alias), and their ratio;
with `--budgets` the same for plans within these fractions of the free plan's figure.
There `corrected` is the ratio once the model is corrected by its error on the free
plan, whose program is another one, and `told` that of what the plan says of itself:
corrected by what was compiled on the way to it. Programs are compiled for 8 virtual
CPU devices, or for `--target`; models are those of `benchmarks.against_methods`, or
`gpt, sized` and others of `benchmarks.on_device`. What is refused is compared with the
cheapest plans of named methods, compiled: `refused, METHOD fits` where one does. Exits
with 1 if a program is above its budget.

    python -m benchmarks.memory_error
    python -m benchmarks.memory_error --models gpt --meshes "x:8" --budgets 0.9 0.8
    python -m benchmarks.memory_error --target 1x8xH100 --models mlp --budgets 0.8
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .against_methods import MODELS
from .on_device import CASES

MESHES = ("x:8", "x:2;y:4")
CPU = "cpu"
SIZED = {f"{name}, sized": case for name, case in CASES.items()}
NAMED = ("DataParallel()", "Zero(1)", "Zero(2)", "Zero(3)", "Megatron(2)")


@dataclass(frozen=True)
class Measurement:
    """Bytes of one device; `budget_bytes` is 0 without a budget of the user's.

    `correction` is what another program of the step holds over what was predicted of
    it, 0 if none was compiled before. `told_bytes` are those of the plan itself.
    """

    model: str
    mesh: str
    budget_bytes: int
    predicted_bytes: int
    told_bytes: int
    compiled_bytes: int
    state_bytes: int
    gap: float
    correction: float = 0.0
    note: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over compiled."""
        return self.predicted_bytes / self.compiled_bytes if self.compiled_bytes else 0

    @property
    def corrected_ratio(self) -> float:
        """The same with the error seen on the other program taken off."""
        return self.ratio * self.correction

    @property
    def is_above(self) -> bool:
        """Whether the program holds more than its budget."""
        return 0 < self.budget_bytes < self.compiled_bytes

    @property
    def end(self) -> str:
        """How planning within the budget ended."""
        if self.is_above:
            return "above the budget"
        if not self.note:
            return "planned"
        return "refused though a method fits" if " fits" in self.note else "refused"

    def __str__(self) -> str:
        budget = f"{self.budget_bytes:,}" if self.budget_bytes else "-"
        corrected = f"{self.corrected_ratio:.3f}" if self.correction else "-"
        told = self.told_bytes / self.compiled_bytes if self.compiled_bytes else 0
        note = "above the budget" if self.is_above else self.note
        return (
            f"| {self.model} | {self.mesh} | {budget} | {self.predicted_bytes:,} | "
            f"{self.compiled_bytes:,} | {self.ratio:.3f} | {corrected} | {told:.3f} | "
            f"{self.state_bytes:,} | {self.gap:.2%} | {note} |"
        )


def measure(
    model: str, mesh: str, budgets: Sequence[float], target: str = CPU
) -> Iterator[Measurement]:
    """The free plan, and one for each fraction of its program's bytes as a budget."""
    from autopar.errors import InfeasiblePlanError

    free = _measure(model, mesh, None, target)
    yield free
    least: dict[str, int] = {}  # of named methods, as compiled
    for fraction in budgets:
        budget = int(free.compiled_bytes * fraction)
        try:
            found = _measure(model, mesh, budget, target)
            yield replace(found, correction=1 / free.ratio)
        except InfeasiblePlanError as error:
            least = least or dict(_named_bytes(model, mesh, target))
            fits = [name for name, held in least.items() if held <= budget]
            note = f"refused, {fits[0]} fits" if fits else "refused"
            note += f", least {error.least_budget_bytes or 0:,}"
            yield Measurement(model, mesh, budget, 0, 0, 0, 0, 0.0, note=note)


def _named_bytes(model: str, mesh: str, target: str) -> Iterator[tuple[str, int]]:
    """What the compiled programs of named methods hold, where they take the model."""
    for name in NAMED:
        try:
            found = _measure(model, mesh, None, target, name)
        except (ValueError, NotImplementedError):
            continue
        yield name, found.compiled_bytes


def _measure(
    model: str, mesh: str, budget: int | None, target: str, method: str | None = None
) -> Measurement:
    import autopar
    from autopar.commands.plan_targets import parse_method
    from autopar.lowering.memory_use import MemoryUse

    from .models import build

    name, options = {**MODELS, **SIZED}[model]
    workload = build(name, **options)
    step = autopar.parallelize(
        workload.step,
        mesh=None if method and method.startswith("Megatron") else mesh,
        memory_budget=budget,
        cluster=None if target == CPU else autopar.Cluster.preset(target),
        method=parse_method(method) if method else None,
    )
    step.plan(*workload.abstract(), compile=target != CPU)
    compiled = step.lower(*workload.abstract()).compile()
    plan = compiled.plan
    seen = MemoryUse.of(compiled.compiled).device_bytes
    predicted = plan.predicted
    own = round(predicted.peak_bytes / predicted.memory_correction)
    return Measurement(
        *(model, mesh, budget or 0, own, predicted.peak_bytes, seen),
        *(plan.sharding.state_bytes(), predicted.optimality_gap),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--budgets", nargs="*", type=float, default=[])
    parser.add_argument("--target", default=CPU, help="such as 1x8xH100 or v5e:2x4")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )
    columns = (
        "model mesh budget predicted compiled ratio corrected told state gap".split()
    )
    print("|", " | ".join(columns), "| |")
    print("|---" * (len(columns) + 1) + "|")
    ended: Counter[str] = Counter()
    for model in arguments.models:
        for mesh in arguments.meshes:
            for each in measure(model, mesh, arguments.budgets, arguments.target):
                print(each, flush=True)
                if each.budget_bytes:
                    ended[each.end] += 1
    print(", ".join(f"{number} {how}" for how, number in ended.items()))
    return int("above the budget" in ended)


if __name__ == "__main__":
    sys.exit(main())
