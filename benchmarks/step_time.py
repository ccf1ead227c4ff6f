"""Step time and collective bytes beside jit with the same shardings as annotations.

Three programs of one workload, on the same devices and the same shardings:

  autopar      the plan, lowered to explicit SPMD
  arguments    plain jit, the plan's shardings given for arguments and results
  annotated    the same, and a sharding constraint on every operator's result

Each round runs one step of each in turn, so a change in the machine's speed hits all
alike; ratios are taken round by round and the median is printed. Bytes are per-device
HLO result bytes of a step, read from the compiled programs.

    python -m benchmarks.step_time --models gpt mlp --mesh "x:2;y:4" --rounds 20
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from autopar.graph.op_graph import OpGraph
    from autopar.plans.parallel_plan import Plan

    from .models import Workload


@dataclass(frozen=True)
class Measurement:
    """One program: medians in seconds over the rounds, bytes per device and step."""

    model: str
    mesh: str
    program: str
    median_seconds: float
    ratio: float  # median over rounds of this program's time over jit's, arguments only
    collective_bytes: int
    temp_bytes: int
    compile_seconds: float


def measure(workload: Workload, mesh: str, rounds: int) -> list[Measurement]:
    """Compile and time the three programs of `workload`."""
    import jax

    programs = {name: make() for name, make in _programs(workload, mesh).items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 2):
        for name, program in programs.items():
            start = perf_counter()
            jax.block_until_ready(program.step())
            if number >= 2:  # the first rounds warm up
                times[name].append(perf_counter() - start)
    base = times["arguments"]
    return [
        Measurement(
            workload.name,
            mesh,
            name,
            statistics.median(times[name]),
            statistics.median(a / b for a, b in zip(times[name], base, strict=True)),
            program.collective_bytes,
            program.temp_bytes,
            program.compile_seconds,
        )
        for name, program in programs.items()
    ]


@dataclass(frozen=True)
class _Program:
    step: Callable[[], Any]
    collective_bytes: int
    temp_bytes: int
    compile_seconds: float


def _programs(workload: Workload, mesh: str) -> dict[str, Callable[[], _Program]]:
    import jax

    import autopar
    from autopar.lowering.spmd import output_shardings

    parallel = autopar.parallelize(workload.step, mesh=mesh, donate_argnums=())
    state = workload.init(jax.random.key(0))
    batch = workload.make_batch(0)
    lowered = parallel.lower(state, batch)
    plan, graph, program = lowered.plan, lowered.graph, lowered.program
    leaves = jax.tree.leaves(((state, batch), {}))
    homes = list(program.shardings)

    def ours() -> _Program:
        placed = jax.device_put(leaves, homes)
        return _compiled(program.jitted, (program.constants, *placed))

    def annotated(*, everywhere: bool) -> _Program:
        run = _global_function(graph, plan, homes[0].mesh if everywhere else None)
        jitted = jax.jit(
            run,
            in_shardings=(homes,),
            out_shardings=list(output_shardings(graph, plan.sharding, homes[0].mesh)),
        )
        placed = jax.device_put(leaves, homes)
        return _compiled(jitted, (placed,))

    return {
        "autopar": ours,
        "arguments": lambda: annotated(everywhere=False),
        "annotated": lambda: annotated(everywhere=True),
    }


def _compiled(jitted: Any, arguments: Sequence[Any]) -> _Program:
    from autopar.audit.compiled_collectives import collectives_in_compiled
    from autopar.plans.plan import total_bytes

    start = perf_counter()
    compiled = jitted.lower(*arguments).compile()
    seconds = perf_counter() - start
    return _Program(
        lambda: compiled(*arguments),
        total_bytes(collectives_in_compiled(compiled.as_text())),
        compiled.memory_analysis().temp_size_in_bytes,
        seconds,
    )


def _global_function(graph: OpGraph, plan: Plan, mesh: Any) -> Callable[..., Any]:
    """The step on global arrays; with `mesh`, each result constrained to its spec."""
    from jax import lax
    from jax.sharding import NamedSharding

    from autopar.graph.op_graph import Constant
    from autopar.rules.base import bind_params
    from autopar.sharding.spec import is_pending, to_partition_spec

    names = plan.sharding.mesh.axis_names

    def sharding(tensor: int) -> NamedSharding | None:
        planned = plan.sharding.tensors[tensor]
        if mesh is None or is_pending(planned.spec):
            return None
        rank = len(planned.shape)
        return NamedSharding(mesh, to_partition_spec(planned.spec, rank, names))

    def run(leaves: Sequence[Any]) -> list[Any]:
        values = dict(zip(graph.blocks[0].inputs, leaves, strict=True))

        def read(operand: Any) -> Any:
            if isinstance(operand, Constant):
                return operand.value
            return values[operand]

        for op in graph.blocks[0].operators:
            operands = [read(operand) for operand in op.operands]
            if op.kind == "optimization_barrier":
                results = lax.optimization_barrier(tuple(operands))
            else:
                results = bind_params(op, operands)
            for tensor, result in zip(op.results, results, strict=True):
                wanted = sharding(tensor)
                if wanted is not None:
                    result = lax.with_sharding_constraint(result, wanted)
                values[tensor] = result
        return [read(operand) for operand in graph.outputs]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt", "bert", "vit"])
    parser.add_argument("--mesh", nargs="+", default=["x:8", "x:2;y:4"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="write the measurements to this file")
    arguments = parser.parse_args()
    from autopar.clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(8)
    from rich.console import Console
    from rich.table import Table

    from .models import build

    found: list[Measurement] = []
    for model in arguments.models:
        for mesh in arguments.mesh:
            found += measure(build(model), mesh, arguments.rounds)
    table = Table(title="step time and bytes, 8 virtual devices")
    for column in ("model", "mesh", "program"):
        table.add_column(column)
    for column in ("ms", "ratio", "bytes", "temp", "compile s"):
        table.add_column(column, justify="right")
    for each in found:
        table.add_row(
            each.model,
            each.mesh,
            each.program,
            f"{each.median_seconds * 1e3:.2f}",
            f"{each.ratio:.2f}",
            f"{each.collective_bytes:,}",
            f"{each.temp_bytes:,}",
            f"{each.compile_seconds:.1f}",
        )
    Console(width=110).print(table)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(each) for each in found], file, indent=1)


if __name__ == "__main__":
    main()
