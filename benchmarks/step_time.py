"""Step time and collective bytes beside jit with the same shardings as annotations.

Four programs of one workload, on the same devices and with the same shardings:

  autopar        the plan, lowered to explicit SPMD
  own step       jit of the user's step as JAX traced it, every result annotated with
                 the sharding that the plan gives it: what a user would write
  same graph     the same of the step as autopar rewrote it before it was planned
                 (`autopar/frontend/`), which leaves lowering and collectives to compare
  arguments      jit of the user's step, the plan's shardings given for arguments and
                 results only

Pending sums cannot be annotated; bodies of loops are annotated as all else. Each round
runs one step of each program in turn, so a change in the machine's speed hits all
alike; ratios are taken round by round, and their median is what is told. Bytes are
per-device HLO result bytes of a step, read from the compiled programs.

    python -m benchmarks.step_time --models gpt mlp --mesh "x:2;y:4" --rounds 20
    python -m benchmarks.step_time --models gpt --set num_layers=4 hidden=256
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .targets import BenchStep

OURS = "autopar"
BASELINES = ("own step", "same graph", "arguments")
_WARM_UP = 2


@dataclass(frozen=True)
class Measurement:
    """One program: medians in seconds over the rounds, bytes per device and step.

    `times` are autopar's seconds over those of each baseline, medians of the rounds;
    of autopar's own program only. `annotated_share` is that of the results with an
    annotation, of all that operators make; 0 where none is meant to have one.
    """

    model: str
    mesh: str
    program: str
    median_seconds: float
    times: Mapping[str, float]
    collective_bytes: int
    temp_bytes: int
    compile_seconds: float
    annotated_share: float
    spread: float  # of the seconds: half of them lie within this part of the median


def measure(
    workload: BenchStep,
    mesh: str,
    rounds: int,
    clock: Callable[[], float] = perf_counter,
) -> list[Measurement]:
    """Compile and time the programs of `workload`, by `clock`."""
    import jax

    made = programs(workload, mesh)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    names = list(made)
    for number in range(rounds + _WARM_UP):
        names.append(names.pop(0))  # whoever is first may find the machine otherwise
        for name in names:
            start = clock()
            jax.block_until_ready(made[name].step())
            if number >= _WARM_UP:
                seconds[name].append(clock() - start)
    times = {
        name: statistics.median(
            a / b for a, b in zip(seconds[OURS], seconds[name], strict=True)
        )
        for name in BASELINES
    }
    return [
        Measurement(
            workload.name,
            mesh,
            name,
            statistics.median(seconds[name]),
            times if name == OURS else {},
            program.collective_bytes,
            program.temp_bytes,
            program.compile_seconds,
            program.annotated_share,
            spread(seconds[name]),
        )
        for name, program in made.items()
    ]


def spread(times: Sequence[float]) -> float:
    """The distance between the quartiles, over the median; 0 of a single time."""
    if len(times) < 2:
        return 0.0
    first, middle, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / middle


@dataclass(frozen=True)
class Program:
    """A compiled step on arguments of its own; `step` gives its flat results."""

    step: Callable[[], Any]
    text: str
    collective_bytes: int
    temp_bytes: int
    compile_seconds: float
    annotated_share: float = 0.0


def programs(workload: BenchStep, mesh: str) -> dict[str, Program]:
    """Autopar's program of a workload and the baselines', by name."""
    import jax

    import autopar
    from benchmarks.annotated_step import AnnotatedStep, own_step, same_graph

    parallel = autopar.parallelize(workload.step, mesh=mesh, donate_argnums=())
    arguments = workload.arguments()
    lowered = parallel.lower(*arguments)
    program = lowered.program
    closed, leaves = traced(workload.step, arguments)
    homes = *program.shardings, *program.constant_shardings
    placed = jax.device_put([*leaves, *program.constants], list(homes))
    num_leaves = len(leaves)

    def annotated(step: AnnotatedStep) -> Program:
        jitted = jax.jit(
            step, in_shardings=homes, out_shardings=list(program.output_shardings)
        )
        share = step.annotated_share() if step.annotations else 0.0
        return _compiled(lambda: jitted.lower(*placed).compile(), placed, share)

    own = own_step(lowered, closed)
    constants = tuple(placed[num_leaves:])
    return {
        OURS: _compiled(program.compile, (constants, *placed[:num_leaves])),
        "own step": annotated(own),
        "same graph": annotated(same_graph(lowered)),
        "arguments": annotated(AnnotatedStep(own.graph, {})),
    }


def traced(step: Callable[..., Any], arguments: Any) -> tuple[Any, Sequence[Any]]:
    """The step as JAX traces it, and the leaves that it takes.

    Modules of NNX are split, and leaves that are no arrays held, as autopar does.
    """
    import jax

    from autopar.frontend.calls import open_call, plain_function
    from autopar.frontend.constant_leaves import takes_only_arrays
    from autopar.frontend.static_arguments import StaticArguments

    nothing = StaticArguments((), ())
    with open_call(nothing, arguments, {}, takes_only_arrays(step)) as call:
        plain = plain_function(step, call.statics)
        args, kwargs = call.arguments()
        return jax.jit(plain).trace(*args, **kwargs).jaxpr, call.leaves


def _compiled(
    compile: Callable[[], Any], arguments: Sequence[Any], share: float = 0.0
) -> Program:
    from autopar.audit.compiled_collectives import collectives_in_compiled
    from autopar.plans.plan import total_bytes

    start = perf_counter()
    compiled = compile()
    seconds = perf_counter() - start
    text = compiled.as_text()
    return Program(
        lambda: compiled(*arguments),
        text,
        total_bytes(collectives_in_compiled(text)),
        compiled.memory_analysis().temp_size_in_bytes,
        seconds,
        share,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["mlp", "gpt", "bert", "vit"])
    parser.add_argument("--mesh", nargs="+", default=["x:8", "x:2;y:4"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="seconds of the processor")
    parser.add_argument(
        *("--set", "--option"),
        nargs="+",
        default=[],
        dest="options",
        metavar="NAME=VALUE",
        help="options of every model, such as num_layers=4",
    )
    parser.add_argument("--json", help="write the measurements to this file")
    arguments = parser.parse_args()
    from autopar.clusters.virtual_devices import use_virtual_devices

    use_virtual_devices(8)
    from .models import build

    options = dict(each.split("=", 1) for each in arguments.options)
    options = {name: json.loads(value) for name, value in options.items()}
    clock = process_time if arguments.cpu else perf_counter
    found: list[Measurement] = []
    for model in arguments.models:
        for mesh in arguments.mesh:
            found += measure(build(model, **options), mesh, arguments.rounds, clock)
    _tell(found)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([asdict(each) for each in found], file, indent=1)


def _tell(found: Sequence[Measurement]) -> None:
    """Autopar's time as a multiple of each program's, beside that program."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="step time and bytes, 8 virtual devices")
    for column in ("model", "mesh", "program"):
        table.add_column(column)
    for column in ("ms", "autopar takes", "bytes", "temp", "compile s", "annotated"):
        table.add_column(column, justify="right")
    times: Mapping[str, float] = {}
    for each in found:
        times = each.times or times
        is_ours, share = each.program == OURS, each.annotated_share
        table.add_row(
            each.model,
            each.mesh,
            each.program,
            f"{each.median_seconds * 1e3:.2f}",
            "" if is_ours else f"{times[each.program]:.3f} times",
            f"{each.collective_bytes:,}",
            f"{each.temp_bytes:,}",
            f"{each.compile_seconds:.1f}",
            f"{share:.1%}" if share else "",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
