"""How long the planner takes at full size, phase by phase, without a binding budget.

For every case, in a process of its own:

  trace, graph     the step as a jaxpr, and its operator graph
  problem          strategies, resharding costs, the choice graph
  fold .. ilp      the steps of the solver, by name
  plan             the plan read off the choices, with its memory
  total            all but trace and graph

Times are CPU seconds (the planner is one thread), medians over the rounds. Sizes are
those of the whole choice graph and of the one that messages ran on. The gap is against
a bound of the whole problem; the loss by folding is what the plan costs beyond that of
the solver that does not fold (with `--loss`, which takes long). Peak memory is that of
the whole process, JAX and the trace included.

    python -m benchmarks.solver_time
    python -m benchmarks.solver_time --cases gpt-39b "llama-8b, 256" --rounds 3 --loss
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeVar

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Case:
    """A model of the zoo, its options, and where it is to run."""

    model: str
    options: dict[str, Any]
    cluster: str
    mesh: str


def _depth(num_layers: int, cluster: str, mesh: str) -> Case:
    return Case("gpt-39b", {"num_layers": num_layers}, cluster, mesh)


_ONE_HOST = ("1x8xH100", "x:2;y:4")
_EIGHT_HOSTS = ("8x8xH100", "x:8;y:8")

CASES = {
    **{f"gpt, depth {n}, 8": _depth(n, *_ONE_HOST) for n in (12, 24, 48, 96)},
    **{f"gpt, depth {n}, 64": _depth(n, *_EIGHT_HOSTS) for n in (12, 24, 48, 96)},
    "gpt-39b": Case("gpt-39b", {}, *_EIGHT_HOSTS),
    "llama-8b, 256": Case("llama-8b", {}, "32x8xH100", "x:32;y:8"),
    "gpt-39b, 8": Case("gpt-39b", {}, *_ONE_HOST),
    "gpt-39b, 4096": Case("gpt-39b", {}, "512x8xH100", "x:512;y:8"),
    "moe-70b, 64": Case("moe-70b", {}, *_EIGHT_HOSTS),
    "wrn-13b, 64": Case("wrn-13b", {}, *_EIGHT_HOSTS),
    "unet-2d, 8": Case("unet-2d", {}, *_ONE_HOST),
}


@dataclass(frozen=True)
class Measurement:
    """CPU seconds by phase, sizes, and how good the plan is."""

    case: str
    seconds: dict[str, float]
    num_operators: int
    whole: str  # nodes / choices / edges
    left: str
    gap: float
    closed_by: str
    step_seconds: float
    peak_gib: float
    loss: float | None = None

    @property
    def total(self) -> float:
        """All that comes after the operator graph."""
        apart = ("trace", "graph")
        return sum(s for name, s in self.seconds.items() if name not in apart)

    def __str__(self) -> str:
        times = self.seconds
        steps = [
            f"{name} {seconds:.2f}"
            for name, seconds in times.items()
            if name not in ("trace", "graph", "problem", "plan")
        ]
        loss = "-" if self.loss is None else f"{self.loss:.4%}"
        cells = (
            *(self.case, f"{self.num_operators:,}", f"{times['trace']:.2f}"),
            *(f"{times['graph']:.2f}", f"{times['problem']:.2f}", ", ".join(steps)),
            *(f"{times['plan']:.2f}", f"**{self.total:.2f}**", self.whole, self.left),
            *(f"{self.gap:.4%} ({self.closed_by})", loss, f"{self.peak_gib:.2f}"),
        )
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| case, devices | operators | trace | graph | problem | solve | plan | total | "
    "nodes / choices / edges | left for messages | gap | loss by folding | peak GiB |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)


def measure(name: str, case: Case, *, with_loss: bool = False) -> Measurement:
    """One round of one case, in this process."""
    import autopar.rules  # noqa: F401  (registers every rule)
    from autopar.clusters.cluster import Cluster
    from autopar.costs.resharding import Resharder
    from autopar.frontend.tracing import trace
    from autopar.graph.build_graph import build_graph
    from autopar.planner.intra_op import read_plan
    from autopar.planner.sharding_problem import build_problem
    from autopar.planner.whole_step import roles_of
    from autopar.sharding.mesh import parse_mesh
    from autopar.solver import solve

    from .models import build

    workload = build(case.model, **case.options)
    arguments = workload.abstract()
    cluster = Cluster.preset(case.cluster)
    mesh = parse_mesh(case.mesh, cluster.num_devices)
    seconds, passed = dict[str, float](), dict[str, float]()

    def timed(phase: str, work: Callable[[], _Result]) -> _Result:
        start, began = process_time(), perf_counter()
        result = work()
        seconds[phase], passed[phase] = process_time() - start, perf_counter() - began
        return result

    traced = timed("trace", lambda: trace(workload.step, arguments, {}))
    graph = timed("graph", lambda: build_graph(traced, roles_of(traced)))
    resharder = Resharder(mesh, cluster)
    problem = timed("problem", lambda: build_problem(graph, mesh, cluster, resharder))
    choices = problem.choice_graph
    found = timed("solve", lambda: solve(choices))
    share = seconds.pop("solve") / passed["solve"]  # others use the machine
    for phase in found.phases:
        step = "beside" if phase.name == "plan" else phase.name  # "plan" is read below
        seconds[step] = seconds.get(step, 0.0) + phase.seconds * share
    plan = timed("plan", lambda: read_plan(problem, found, cluster, resharder))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    loss = None
    if with_loss:
        whole = solve(choices, folds=False, work_limit=300)
        loss = found.cost / whole.cost - 1
    first = found.phases[0]
    return Measurement(
        *(name, seconds, len(graph.operators())),
        _sizes(len(choices.nodes), choices.num_choices, len(choices.edges)),
        _sizes(first.num_nodes, first.num_choices, first.num_edges),
        *(float(found.gap), found.closed_by, plan.predicted.step_seconds, peak, loss),
    )


def _sizes(*numbers: int) -> str:
    return " / ".join(f"{number:,}" for number in numbers)


def median_of(rounds: Sequence[Measurement]) -> Measurement:
    """The last round, with the medians of the phases and the most memory."""
    phases = dict.fromkeys(phase for each in rounds for phase in each.seconds)
    seconds = {
        phase: median(each.seconds.get(phase, 0.0) for each in rounds)
        for phase in phases
    }
    peak = max(each.peak_gib for each in rounds)
    return replace(rounds[-1], seconds=seconds, peak_gib=peak)


def _measure_apart(name: str, with_loss: bool) -> Measurement:
    """One round in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.solver_time", "--one", name]
    if with_loss:
        command.append("--loss")
    run = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    return Measurement(**json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loss", action="store_true", help="solve unfolded too")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        gc.disable()  # as planning does
        one = measure(arguments.one, CASES[arguments.one], with_loss=arguments.loss)
        print(json.dumps(asdict(one)))
        return
    print(HEAD)
    for name in arguments.cases:
        number = arguments.rounds
        rounds = [
            _measure_apart(name, arguments.loss and left == 1)
            for left in range(number, 0, -1)
        ]
        print(median_of(rounds), flush=True)


if __name__ == "__main__":
    main()
