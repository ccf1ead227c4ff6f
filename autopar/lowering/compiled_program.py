"""Compiles a lowered program: for devices of this process, or for those of a target."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import jax

from ..errors import TargetError
from ..targets.compile_service import Placed, Request, TargetExecutable, compile_for
from .exported_program import ExportedProgram, ShardedType, export_program
from .programs import SpmdProgram


def compile_program(
    program: SpmdProgram, limit_seconds: float = inf
) -> jax.stages.Compiled | TargetExecutable:
    """The compiled program; one of a target can be read, and not be called.

    Raises:
      TargetError: the target's compiler is not installed or refuses the program.
      TimeoutError: it took longer than `limit_seconds`, which only a target has.
    """
    if program.target is None:
        return program.compile()
    if program.host_calls is not None:
        raise TargetError(
            f"A program is compiled for {program.target} from its exported form, which "
            f"has no host callbacks, but {program.jitted.__name__} calls the host; "
            f"leave callbacks out of the step, or compile where the devices are."
        )
    code = export_program(program, program.target.platform)
    return compile_for(program.target, _request(code), limit_seconds)


def _request(code: ExportedProgram) -> Request:
    (first, *_) = (*code.inputs, *code.constants, *code.outputs)
    return Request(
        code.name,
        code.code,
        first.axis_names,
        first.axis_sizes,
        _placed(code.constants),
        _placed(code.inputs),
        _placed(code.outputs),
        code.donated,
        code.compiler_options,
    )


def _placed(types: Sequence[ShardedType]) -> tuple[Placed, ...]:
    return tuple((tuple(type_.spec), type_.memory or None) for type_ in types)
