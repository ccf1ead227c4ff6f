"""Whether the quicker of two plans is predicted to be so, on published runs.

Pairs are of runs of one model on one machine, with the same batch and precision and the
same software release or the next, that differ in their plans; what a table leaves
blank is no difference. Those that differ by more than 5% in what was published count,
by the logarithm of their ratio: to confuse what is twice as quick costs more.

Runs that are told and not scored are ranked, too: their order is a plan's, whatever
their framework.

    python -m benchmarks.ranking --data DIR
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.beside_jit import MODELS
from benchmarks.compile_for import step_for
from benchmarks.published_tables import paths_of

if TYPE_CHECKING:
    from benchmarks.published.runs import Run

LEAST_RATIO = 1.05
METHODS = ("as planned", "DataParallel()", "Zero(2)", "Zero(3)", "Megatron(8)")


@dataclass(frozen=True)
class Pair:
    """Two plans: their ratio as published, or replayed, and as predicted."""

    name: str
    published_ratio: float
    predicted_ratio: float

    @property
    def weight(self) -> float:
        return abs(math.log(self.published_ratio))

    @property
    def is_right(self) -> bool:
        """Whether the same of the two is predicted to be quicker."""
        return (self.published_ratio > 1) == (self.predicted_ratio > 1)


def pairs_of(runs: Sequence[Run]) -> Iterator[Pair]:
    """The pairs of one table that count.

    What ran out of memory, was projected by its authors, or is no training that is
    simulated has none.
    """
    releases = sorted({run.release for run in runs}, key=_release)
    measured = [run for run in runs if run.published and run.simulator]
    measured = [run for run in measured if run.reason != "projected"]
    for first, second in combinations(measured, 2):
        apart = releases.index(first.release) - releases.index(second.release)
        if first.group != second.group or abs(apart) > 1 or not _differ(first, second):
            continue
        ratio = (first.published or 0.0) / (second.published or math.inf)
        if max(ratio, 1 / ratio) > LEAST_RATIO:
            told = (first.predicted or 0.0) / (second.predicted or 1e-9)
            yield Pair(f"{first.name} | {second.name}", ratio, told)


def pairs_of_methods(target: str, models: Iterable[str]) -> Iterator[Pair]:
    """The pairs of each model's programs, compiled for a target."""
    for model in models:
        for first, second in combinations(list(_programs(model, target)), 2):
            ratio = first[2] / second[2]
            if max(ratio, 1 / ratio) > LEAST_RATIO:
                yield Pair(f"{first[0]} | {second[0]}", ratio, first[1] / second[1])


def _programs(model: str, target: str) -> Iterator[tuple[str, float, float]]:
    """Name, predicted seconds and replayed seconds, by each method that takes it."""
    from benchmarks.models import build

    workload = build(model, **MODELS[model])
    for method in METHODS:
        step, arguments = step_for(workload, target, method), workload.abstract()
        try:
            compiled = step.lower(*arguments).compile()
        except (ValueError, NotImplementedError):
            continue
        predicted = compiled.plan.predicted.step_seconds
        replayed = compiled.predicted.seconds
        print(
            f"{target} {model} {method}: {predicted:.3g} s, {replayed:.3g}", flush=True
        )
        yield f"{model} {method}", predicted, replayed


def share_right(pairs: Iterable[Pair]) -> float:
    """The share of the weights that is ranked right."""
    weights = [(pair.weight, pair.weight * pair.is_right) for pair in pairs]
    return sum(right for _, right in weights) / sum(weight for weight, _ in weights)


def _differ(first: Run, second: Run) -> bool:
    return any(
        value and second.config[key] and value != second.config[key]
        for key, value in first.config.items()
    )


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".") if part.isdigit())


def print_pairs(found: Mapping[str, Sequence[Pair]]) -> None:
    """Those ranked wrong, then the number and the share of each table and of all."""
    for pairs in found.values():
        for pair in sorted(pairs, key=lambda pair: -pair.weight):
            if not pair.is_right:
                ratios = f"{pair.published_ratio:.3f} as {pair.predicted_ratio:.3f}"
                print(f"wrong: {ratios}  {pair.name}")
    everything = [pair for pairs in found.values() for pair in pairs]
    for name, pairs in {**found, "all": everything}.items():
        if pairs:
            right = sum(pair.is_right for pair in pairs)
            print(
                f"{name}: n = {len(pairs)}, {right} right, "
                f"{share_right(pairs):.1%} by weight"
            )


def main() -> None:
    from benchmarks.published.runs import read_runs

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tables", nargs="*", type=Path, help="CSV files")
    parser.add_argument("--data", type=Path, help="a folder of tables")
    parser.add_argument("--targets", nargs="+", default=[], help="such as 1x8xH100")
    parser.add_argument("--models", nargs="+", default=[*MODELS], choices=[*MODELS])
    arguments = parser.parse_args()
    paths = arguments.tables or arguments.data or not arguments.targets
    tables = {
        path.stem: list(pairs_of(read_runs(path)))
        for path in (paths_of(arguments.tables, arguments.data) if paths else ())
    }
    for target in arguments.targets:
        tables[target] = list(pairs_of_methods(target, arguments.models))
    print_pairs(tables)


if __name__ == "__main__":
    main()
