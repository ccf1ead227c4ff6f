"""Compiles a lowered program: for devices of this process, or for those of a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import jax
from jax import export

from ..errors import TargetError
from ..sharding.mesh import MeshShape
from ..targets.compile_service import Placed, Request, TargetExecutable, compile_for
from ..targets.target import Target
from .exported_program import ExportedProgram, ShardedType, export_program
from .host_memory import HOST
from .programs import SpmdProgram

_made: WeakKeyDictionary[SpmdProgram, TargetExecutable] = WeakKeyDictionary()


def compile_program(
    program: SpmdProgram, limit_seconds: float = inf
) -> jax.stages.Compiled | TargetExecutable:
    """The compiled program, once; one of a target can be read, and not be called.

    Raises:
      TargetError: the target's compiler is not installed or refuses the program.
      TimeoutError: it took longer than `limit_seconds`, which only a target has.
    """
    if program.target is None:
        return program.compile()
    if program in _made:
        return _made[program]
    if program.host_calls is not None:
        raise TargetError(
            f"A program is compiled for {program.target} from its exported form, which "
            f"has no host callbacks, but {program.jitted.__name__} calls the host; "
            f"leave callbacks out of the step, or compile where the devices are."
        )
    code = export_program(program, program.target.platform)
    made = compile_for(program.target, _request(code), limit_seconds)
    return _made.setdefault(program, made)


def compile_jitted(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Target,
    limit_seconds: float = inf,
) -> tuple[TargetExecutable, MeshShape]:
    """A jitted function compiled for a target, and the mesh that its arrays are on.

    Shardings are those of `jax.jit` and of the arguments' types, on any mesh of as many
    devices; what has none is the partitioner's.

    Raises:
      ValueError: the function is for another number of devices, or on several meshes.
      TargetError: the target's compiler is not installed or refuses the program.
      TimeoutError: it took longer than `limit_seconds`.
    """
    exported = export.export(jitted, platforms=[target.platform])(*args, **kwargs)
    if exported.nr_devices != target.num_devices:
        raise ValueError(
            f"A step is compiled for all {target.num_devices} devices of {target}, but "
            f"{exported.fun_name} is for {exported.nr_devices}; give shardings on a "
            f"mesh of {target.num_devices}."
        )
    nowhere: Any = None  # shardings on the mesh they were given on
    inputs: Sequence[Any] = exported.in_shardings_jax(nowhere)
    outputs: Sequence[Any] = exported.out_shardings_jax(nowhere)
    meshes = {tuple(each.mesh.shape.items()) for each in (*inputs, *outputs) if each}
    if len(meshes) > 1:
        raise ValueError(
            f"A step is compiled on one mesh, but arrays of {exported.fun_name} are on "
            f"{', '.join(map(str, map(dict, meshes)))}; name the same axes for all."
        )
    (axes,) = meshes or {(("devices", target.num_devices),)}
    mesh = MeshShape(tuple(n for n, _ in axes), tuple(size for _, size in axes))
    donated = jax.tree.leaves(
        jitted.trace(*args, **kwargs).args_info, is_leaf=lambda x: hasattr(x, "donated")
    )
    flat = replace(
        exported,
        in_tree=jax.tree.structure((((), *inputs), {}), is_leaf=lambda x: x is None),
        out_tree=jax.tree.structure([0] * len(outputs)),
    )
    request = Request(
        *(exported.fun_name, bytes(flat.serialize()), mesh.axis_names),
        *(mesh.axis_sizes, (), tuple(map(_place, inputs)), tuple(map(_place, outputs))),
        [number for number, each in enumerate(donated) if each.donated],
        {},
    )
    return compile_for(target, request, limit_seconds), mesh


def _place(sharding: Any) -> Placed:
    if sharding is None:
        return None
    kind = sharding.memory_kind
    return tuple(sharding.spec), kind if kind == HOST else None


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
