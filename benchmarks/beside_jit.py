"""A step's program beside those of plain jit, compiled for devices that are not here.

Four programs of one step on the same mesh, each compiled for the target alone:

  autopar        the plan, lowered to explicit SPMD
  arguments      jit of the user's step, the plan's shardings given for arguments and
                 results only
  annotated      the same, every result annotated with the sharding that the plan gives
                 it (`benchmarks/annotated_step.py`): what a user would write
  data parallel  jit with the batch split over all devices, all else on each

Bytes are of one device; what it sends in a step is that of rings. Milliseconds are
those of a step as its schedule is replayed. Exits with 1 where autopar's program
takes more memory than that of `arguments`, sends more, or takes longer, by the
figures as printed: buffers that lie otherwise take some KB more or less.

    python -m benchmarks.beside_jit --target 1x8xH100
    python -m benchmarks.beside_jit --target v5e:2x4
    python -m benchmarks.beside_jit --models gpt moe --except moe
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any

from .compile_for import step_for, table
from .step_time import OURS, traced

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from autopar.audit.program_figures import ProgramFigures
    from autopar.lowering.programs import SpmdProgram
    from autopar.steps.lowered_step import Lowered

    from .annotated_step import AnnotatedStep
    from .targets import BenchStep

Compile = Callable[[float], Any]  # within seconds
ARGUMENTS = "arguments"
_TEXT = {"vocab_size": 8192, "seq_len": 512, "hidden": 512, "batch_size": 64}
_IMAGES = {"image_size": 128, "num_classes": 1000, "batch_size": 64}
_SCANNED = {"num_layers": 4, "scan_layers": True, "compute_dtype": "bfloat16"}
# Large enough that the workspace of products, 32 MiB, is a small part of the memory.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt": {**_TEXT, **_SCANNED},
    "llama": {**_TEXT, **_SCANNED, "width": 1536},
    "moe": {**_TEXT, "group_size": 512},
    "t5": {**_TEXT, "head_dim": 64, "width": 2048},
    "vit": {**_IMAGES, "patch_size": 8, "hidden": 512},
    "resnet": {**_IMAGES, "channels": 64},
}


def programs(workload: BenchStep, target: str) -> dict[str, Compile]:
    """What compiles each program of a step for a target within seconds, by name."""
    from autopar.lowering.compiled_program import compile_jitted, compile_program

    from .annotated_step import AnnotatedStep, own_step

    lowered: Lowered = step_for(workload, target).lower(*workload.abstract())
    closed, _ = traced(workload.step, workload.abstract())
    annotated, ours = own_step(lowered, closed), lowered.program
    plain = AnnotatedStep(annotated.graph, {})

    def by_jit(program: SpmdProgram, step: AnnotatedStep) -> Compile:
        jitted, types = jit_of(program, step)
        assert program.target is not None
        target = program.target
        return lambda limit: compile_jitted(jitted, types, {}, target, limit)[0]

    return {
        OURS: lambda limit: compile_program(ours, limit),
        ARGUMENTS: by_jit(ours, plain),
        "annotated": by_jit(ours, annotated),
        "data parallel": by_jit(_data_parallel(ours, plain), plain),
    }


def jit_of(program: SpmdProgram, step: AnnotatedStep) -> tuple[Any, Sequence[Any]]:
    """A step jitted with arguments and results where the program's are, and types."""
    import jax

    jitted = jax.jit(
        step.__call__,
        in_shardings=(*program.shardings, *program.constant_shardings),
        out_shardings=list(program.output_shardings),
        donate_argnums=program.donated,
    )
    constants = (jax.ShapeDtypeStruct(c.shape, c.dtype) for c in program.constants)
    return jitted, (*program.argument_types, *constants)


def _data_parallel(program: SpmdProgram, step: AnnotatedStep) -> SpmdProgram:
    """The program with the batch split over all axes, and all else on each device."""
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = program.mesh
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    def everywhere(shardings: Sequence[NamedSharding]) -> tuple[NamedSharding, ...]:
        return (whole,) * len(shardings)

    inputs = step.graph.inputs[: len(program.shardings)]
    return replace(
        program,
        shardings=tuple(split if i.role == "batch" else whole for i in inputs),
        constant_shardings=everywhere(program.constant_shardings),
        output_shardings=everywhere(program.output_shardings),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default="1x8xH100")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument(
        "--except", nargs="*", default=[], dest="exceptions", choices=MODELS
    )
    parser.add_argument("--compile-seconds", type=float, default=inf)
    asked = parser.parse_args()
    from autopar.audit.program_figures import ProgramFigures

    from .models import build

    row = table(("model", "program", "MB", "MB sent", "ms", "collectives", "compile s"))
    worse: list[str] = []
    for model in asked.models:
        found: dict[str, ProgramFigures] = {}
        workload = build(model, **MODELS[model])
        for name, compiled_in in programs(workload, asked.target).items():
            try:
                compiled = compiled_in(asked.compile_seconds)
            except TimeoutError as error:
                row(model, name, *"----", error)
                continue
            seen = found[name] = ProgramFigures.of(compiled)
            row(model, name, *_cells(seen))
        if model in asked.exceptions or not {OURS, ARGUMENTS} <= found.keys():
            continue
        if reason := why_worse(found[OURS], found[ARGUMENTS]):
            worse.append(f"{model} {reason}")
    print("\n".join(worse))
    return bool(worse)


def why_worse(ours: ProgramFigures, other: ProgramFigures) -> str:
    """What ours takes or sends more than the other; empty if nothing."""
    figures = (
        ("takes", "B", ours.device_bytes, other.device_bytes),
        ("sends", "B", ours.sent_bytes, other.sent_bytes),
        ("takes", "ns", _nanoseconds(ours), _nanoseconds(other)),
    )
    found = [
        f"{what} {mine:,.0f} {unit}, and {theirs:,.0f} {unit} by jit"
        for what, unit, mine, theirs in figures
        if round(mine / 1e5) > round(theirs / 1e5)
    ]
    return ", ".join(found)


def _nanoseconds(seen: ProgramFigures) -> float:
    return 1e9 * seen.replayed.seconds if seen.replayed else 0.0


def _cells(seen: ProgramFigures) -> tuple[str, ...]:
    from autopar.sharding.collective import num_operations

    kinds = sorted({each.kind for each in seen.collectives})
    numbers = (
        f"{num_operations(x for x in seen.collectives if x.kind == kind)} {kind}"
        for kind in kinds
    )
    return (
        f"{seen.device_bytes / 1e6:,.1f}",
        f"{seen.sent_bytes / 1e6:,.1f}",
        f"{seen.replayed.seconds * 1e3:,.3f}" if seen.replayed else "-",
        ", ".join(numbers) or "none",
        f"{seen.compile_seconds:.1f}",
    )


if __name__ == "__main__":
    sys.exit(main())
