"""How long the joint search of stages takes, phase by phase, and what it finds.

Stages, submeshes, their logical shapes, the number of microbatches and the schedule are
searched for a model of the zoo on a cluster that need not be there:

  trace    the step as a jaxpr, its operator graph, and the line of its forward work
  cut      a layer of every kind cut out of it
  search   of which: dynamic programs over stages; layers traced and planned
  plan     the stages found: cut, traced and planned in full, and a step simulated

The planner is one thread, so CPU seconds are what counts on a machine that is shared.
Modelled seconds are those of the composed costs, with the bound of the search; then
comes what the plan in full says, each program of which was solved for itself.

    python -m benchmarks.stage_search
    python -m benchmarks.stage_search --model gpt-2.6b --cluster 1x8xV100 --no-plan
    python -m benchmarks.stage_search --option num_layers=8 --option remat=False
"""

from __future__ import annotations

import argparse
from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from autopar.pipelines.joint_search import FoundStages, JointSearch
    from autopar.plans.staged_plan import StagedPlan

_Result = TypeVar("_Result")


@dataclass
class Phases:
    """CPU and wall seconds by phase, in the order in which they began."""

    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)

    def timed(self, name: str, work: Callable[[], _Result]) -> _Result:
        """What `work` returns, its time noted."""
        cpu, wall = process_time(), perf_counter()
        result = work()
        self.seconds[name] = process_time() - cpu, perf_counter() - wall
        print(self.line(name), flush=True)
        return result

    def line(self, name: str) -> str:
        """A phase as one line."""
        cpu, wall = self.seconds[name]
        return f"  {name:<8}{cpu:8.2f} s CPU{wall:9.2f} s"

    def after_tracing(self) -> float:
        """CPU seconds of all phases but the first."""
        return sum(cpu for cpu, _ in list(self.seconds.values())[1:])


def measure(arguments: argparse.Namespace) -> None:
    """Search, and print the phases and the stages."""
    import autopar
    from autopar.clusters.cluster import Cluster
    from autopar.options import check_options
    from autopar.pipelines.stage_search import StageSearcher
    from autopar.steps.execution import staged_plan

    from .models import build

    config: dict[str, Any] = {"remat": True, "compute_dtype": "float16"}
    pairs = (text.partition("=") for text in arguments.option)
    config.update((name, literal_eval(value)) for name, _, value in pairs)
    workload = build(arguments.model, **config)
    method = autopar.PipelineParallel(num_microbatches=arguments.microbatches)
    options = check_options(
        method=method,
        cluster=Cluster.preset(arguments.cluster),
        memory_budget=arguments.budget,
    )
    call = workload.step, workload.abstract(), {}
    print(f"{arguments.model} {config} on {arguments.cluster}")
    phases = Phases()
    searcher = phases.timed("trace", lambda: StageSearcher(call, method, options))
    search = phases.timed("cut", searcher.search)
    capacity = searcher.capacity_bytes
    found = phases.timed("search", lambda: search.best(capacity))
    print(_sizes(searcher, search))
    if found is None:
        print("no stages fit into memory")
        return
    print(_stages(found))
    print(f"  {phases.after_tracing():.2f} s CPU from the graph to the stages")
    if not arguments.no_plan:
        plan = phases.timed("plan", lambda: staged_plan(searcher.plan(found)))
        print(_full(plan, found))


def _sizes(searcher: Any, search: JointSearch) -> str:
    count, seconds = search.count, search.seconds
    kinds = len(set(search.costs.layers.kinds))
    return (
        f"  {len(searcher.graph.operators()):,} operators, {len(search.costs.layers)} "
        f"layers of {kinds} kinds, {len(search.submeshes)} submeshes, microbatches "
        f"{', '.join(map(str, search.counts))}\n"
        f"  {count.get('solve', 0)} bounds and dynamic programs "
        f"{seconds.get('solve', 0):.2f} s, {count.get('layers', 0)} layers planned "
        f"{seconds.get('layers', 0):.2f} s"
    )


def _stages(found: FoundStages) -> str:
    problem, assignment = found.problem, found.assignment
    gap = 1 - found.bound_seconds / assignment.seconds
    lines = [
        f"  {len(assignment.stages)} stages, {problem.num_microbatches} microbatches, "
        f"{problem.schedule}: modelled {assignment.seconds:.3f} s, gap {gap:.2%}"
    ]
    stages = zip(assignment.stages, found.labels(), strict=True)
    alike = groupby(stages, lambda each: (each[0].end - each[0].first, each[1]))
    for (number, submesh), group in alike:
        stage = next(group)[0]
        span = stage.first, stage.end
        choice = problem.choices[stage.choice]
        repeats = 1 + sum(1 for _ in group)
        lines.append(
            f"    {repeats} x {number} layers on {submesh}: "
            f"{choice.seconds[span] * 1e3:.1f} ms a microbatch, "
            f"{choice.fixed_bytes[span] / 1e9:.2f} GB and "
            f"{choice.microbatch_bytes[span] / 1e9:.3f} GB for each in flight"
        )
    return "\n".join(lines)


def _full(plan: StagedPlan, found: FoundStages) -> str:
    predicted = plan.predicted
    error = predicted.step_seconds / found.assignment.seconds - 1
    return (
        f"  planned in full: {predicted.step_seconds:.3f} s ({error:+.2%} of the "
        f"model), {predicted.peak_bytes / 1e9:.2f} GB a device, bubble "
        f"{predicted.bubble_fraction:.1%}"
    )


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="gpt-39b")
    parser.add_argument("--cluster", default="8x8xV100")
    parser.add_argument("--option", action="append", default=[], help="name=value")
    parser.add_argument("--microbatches", type=int, help="searched if left out")
    parser.add_argument("--budget", help="of a device, such as 12GB")
    parser.add_argument("--no-plan", action="store_true", help="only the search")
    measure(parser.parse_args(given))


if __name__ == "__main__":
    main()
