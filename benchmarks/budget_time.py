"""How long planning within a budget that binds takes, beside planning without one.

For every case and every budget, in a process of its own:

  free      CPU seconds of planning without a budget, after the operator graph
  within    CPU seconds of planning within the budget, the plan without one included
  gap       of the plan, against a bound of all plans, whatever their memory;
            `infeasible` where the least budget named is all there is

Budgets are fractions of what the plan without one is predicted to hold. Planning is one
thread; peak memory is that of the whole process, JAX and the trace included.

    python -m benchmarks.budget_time
    python -m benchmarks.budget_time --cases "gpt, 12 layers" --budgets 0.9 0.8
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from time import process_time

from .solver_time import CASES as FREE_CASES
from .solver_time import Case

_LOCAL = "local"
_ONE_HOST = ("1x8xH100", "x:2;y:4")
_EIGHT_HOSTS = ("8x8xH100", "x:8;y:8")
# One example a device, layers made again: what is left over is state and gathers.
_BINDING = {"batch_size": 64, "remat": True, "compute_dtype": "bfloat16"}

CASES = {
    **{
        f"gpt, {n} layers": Case("gpt", {"num_layers": n}, _LOCAL, "x:8")
        for n in (12, 24)
    },
    **{
        f"gpt-1.3b, {n} layers": Case(
            "gpt-1.3b", {"num_layers": n, "batch_size": 16}, *_ONE_HOST
        )
        for n in (12, 24)
    },
    **{
        f"gpt-39b, remat, {n} layers, 64": Case(
            "gpt-39b", {"num_layers": n, **_BINDING}, *_EIGHT_HOSTS
        )
        for n in (12, 48)
    },
    **{
        name: FREE_CASES[name]
        for name in ("unet-2d, 8", "gpt, depth 12, 64", "llama-8b, 256")
    },
    **{name: FREE_CASES[name] for name in ("moe-70b, 64", "wrn-13b, 64")},
}


@dataclass(frozen=True)
class Measurement:
    """One case within one budget; bytes are those of one device."""

    case: str
    fraction: float
    num_operators: int
    free_seconds: float
    free_bytes: int
    free_step: float
    seconds: float
    bytes: int
    step: float
    gap: float
    peak_gib: float
    is_infeasible: bool

    def __str__(self) -> str:
        step = f"{self.step / self.free_step:.3f}"
        gap = f"{self.gap:.2%}"
        cells = (
            *(self.case, f"{self.num_operators:,}", f"{self.fraction:g}"),
            *(f"{self.free_seconds:.2f}", f"{self.seconds:.2f}"),
            f"**{self.seconds / self.free_seconds:.1f}**",
            f"{self.bytes / self.free_bytes:.4f}",
            *(("infeasible", "-") if self.is_infeasible else (step, gap)),
            f"{self.peak_gib:.2f}",
        )
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| case | operators | budget | free s | within s | times | bytes / free | "
    "step / free | gap | peak GiB |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def measure(name: str, fraction: float) -> Measurement:
    """One case within one budget, in this process."""
    import autopar.rules  # noqa: F401  (registers every rule)
    from autopar.clusters.cluster import Cluster
    from autopar.errors import InfeasiblePlanError
    from autopar.frontend.tracing import trace
    from autopar.graph.build_graph import build_graph
    from autopar.planner.budget import BudgetPlanner
    from autopar.planner.intra_op import plan_intra_op
    from autopar.planner.whole_step import roles_of
    from autopar.sharding.mesh import parse_mesh

    from .models import build

    case = CASES[name]
    workload = build(case.model, **case.options)
    is_local = case.cluster == _LOCAL
    cluster = Cluster.local() if is_local else Cluster.preset(case.cluster)
    mesh = parse_mesh(case.mesh, cluster.num_devices)
    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    plan_intra_op(graph, mesh, cluster)  # what is made once a process
    start = process_time()
    free = plan_intra_op(graph, mesh, cluster).plan.predicted
    free_seconds = process_time() - start
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    budget = int(fraction * free.peak_bytes)
    planner = BudgetPlanner(graph, mesh, cluster, batch)
    start, is_infeasible = process_time(), False
    held, step, gap = 0, 0.0, 0.0
    try:
        found = planner.within(budget, 1e-4).plan.predicted
    except InfeasiblePlanError as error:
        is_infeasible, held = True, error.least_budget_bytes or 0
    else:
        held, step, gap = found.peak_bytes, found.step_seconds, found.optimality_gap
        assert held <= budget, "no plan may be above its budget"
    return Measurement(
        *(name, fraction, len(graph.operators())),
        *(free_seconds, free.peak_bytes, free.step_seconds),
        *(process_time() - start, held, step, gap),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        is_infeasible,
    )


def _measure_apart(name: str, fraction: float) -> Measurement:
    """One case within one budget, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.budget_time", "--one", name]
    flags = os.environ.get("XLA_FLAGS", "")
    run = subprocess.run(
        [*command, "--budgets", str(fraction)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8",
        },
    )
    return Measurement(**json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.9, 0.75])
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asdict(measure(arguments.one, arguments.budgets[0]))))
        return
    print(HEAD)
    for name in arguments.cases:
        for fraction in arguments.budgets:
            print(_measure_apart(name, fraction), flush=True)


if __name__ == "__main__":
    main()
