"""Plans compiled for GPUs and TPUs that this machine has not: memory, and the audit.

Needs their compilers, `autopar targets add cuda` and `tpu`, and no device. Models of
the zoo in tiny sizes, as planned by default; those of `METHOD_MODELS` also by every
named method that takes them. Devices of a host, or of a slice of TPUs, are one mesh
axis, hosts another. `audit` is whether all
collectives are those of the plan: exits with 1 where some are not, and says which.
`--sized` takes the models of `benchmarks.on_device`, as planned, whose batches are cut
until a device is predicted to hold at most 10 GB.

    python -m benchmarks.compile_for --targets 1x8xH100 2x8xH100 1x8xA100
    python -m benchmarks.compile_for --targets v5e:2x4 v5p:2x2x2
    python -m benchmarks.compile_for --models gpt moe --methods "Zero(3)"
    python -m benchmarks.compile_for --targets v5e:2x4 --sized
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from .against_methods import MODELS
from .on_device import CASES

if TYPE_CHECKING:
    from autopar.audit.audit import Audit
    from autopar.audit.program_figures import ProgramFigures

    from .targets import BenchStep

PLANNED = "as planned"
METHODS = (
    *(PLANNED, "DataParallel()", "Zero(1)", "Zero(2)", "Zero(3)"),
    "Megatron(8, sequence=True)",
)
METHOD_MODELS = ("gpt", "moe", "resnet")
# Scanned layers come with remat too.
COMPILED = tuple(name for name in MODELS if name != "gpt, scan")
MOST_BYTES = 10 * 10**9  # of a sized model, as predicted


def table(columns: Sequence[str]) -> Callable[..., None]:
    """Begin a Markdown table; returns what prints a row of it at once."""

    def row(*cells: object) -> None:
        print(f"| {' | '.join(map(str, cells))} |", flush=True)

    row(*columns)
    print("|---" * len(columns) + "|")
    return row


def step_for(workload: BenchStep, target: str, method: str = PLANNED) -> Any:
    """The parallelized step on all devices of `target`: 2x8xH100, or v5e:2x4."""
    import autopar
    from autopar.commands.plan_targets import parse_method

    cluster = autopar.Cluster.preset(target)
    hosts, devices = cluster.num_hosts, cluster.devices_per_host
    return autopar.parallelize(
        workload.step,
        mesh=f"x:{devices}" if hosts == 1 else f"h:{hosts};x:{devices}",
        cluster=cluster,
        method=None if method == PLANNED else parse_method(method),
    )


def measure(
    model: str, method: str, target: str, is_sized: bool = False
) -> tuple[Audit, ProgramFigures]:
    """The audit of a model's program, and what the compiler says.

    Raises:
      ValueError: the method does not take the model.
      TargetError: the compiler is not installed, or refuses the program.
    """
    from autopar.audit.program_figures import ProgramFigures

    from .models import build

    name, own = (CASES if is_sized else MODELS)[model]
    while True:
        workload = build(name, **own)
        arguments: Any = workload.abstract()
        step = step_for(workload, target, method)
        held = step.plan(*arguments).predicted.peak_bytes if is_sized else 0
        if held <= MOST_BYTES:
            break
        own = {**own, "batch_size": jax.tree.leaves(arguments[1])[0].shape[0] // 2}
    compiled = step.lower(*arguments).compile()
    return compiled.audit(), ProgramFigures.of(compiled.compiled)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--targets", nargs="+", default=["1x8xH100"])
    parser.add_argument("--models", nargs="+", choices=list({**MODELS, **CASES}))
    parser.add_argument("--sized", action="store_true", help="models of real sizes")
    parser.add_argument(
        "--methods",
        nargs="+",
        help=f"of all models; else {PLANNED!r}, and of {', '.join(METHOD_MODELS)} also "
        f"{', '.join(METHODS[1:])}",
    )
    asked = parser.parse_args()
    from autopar.errors import TargetError

    methods = (PLANNED,) if asked.sized else METHODS
    row = table(
        ("model", "method", "target", "predicted MB", "compiled MB", "ratio")
        + ("collectives", "compile s", "audit")
    )
    wrong: list[str] = []
    for target in asked.targets:
        for model in asked.models or (CASES if asked.sized else COMPILED):
            usual = methods if model in METHOD_MODELS else (PLANNED,)
            for method in asked.methods or usual:
                case = model, method, target
                try:
                    audit, seen = measure(*case, asked.sized)
                except TargetError as error:
                    row(*case, *"-----", "failed")
                    wrong.append(f"{model} by {method} for {target}: {error}")
                    continue
                except (ValueError, NotImplementedError) as error:
                    row(*case, *"-----", f"refused: {str(error).split(';')[0]}")
                    continue
                row(*case, *_cells(audit, seen))
                wrong += [
                    f"{model} by {method} for {target}: {each}"
                    for each in audit.differences
                    if each.is_wrong
                ]
    print("\n".join(wrong))
    return bool(wrong)


def _cells(audit: Audit, seen: ProgramFigures) -> tuple[str, ...]:
    from autopar.sharding.collective import num_operations

    predicted = audit.predicted_bytes or 0
    number = num_operations(seen.collectives)
    beside = num_operations(each for each in seen.collectives if each.is_async)
    return (
        f"{predicted / 1e6:,.1f}",
        f"{seen.device_bytes / 1e6:,.1f}",
        f"{predicted / seen.device_bytes:.3f}",
        f"{number} ({beside} async)",
        f"{seen.compile_seconds:.1f}",
        "ok" if audit.ok else "**wrong**",
    )


if __name__ == "__main__":
    sys.exit(main())
