"""`autopar.compare`: a step that was sharded by hand beside a plan, as both compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from rich.console import RenderableType
from rich.text import Text

from .api import ParallelFunction
from .audit.program_figures import ProgramFigures
from .lowering.compiled_program import compile_jitted
from .plans.explain import as_text, format_bytes, format_seconds, table
from .sharding.mesh import MeshShape
from .steps.lowered_step import Compiled, Lowered
from .targets.target import Target, check_compilable


@dataclass(frozen=True)
class Comparison:
    """Two compiled programs of one step, for the same devices; prints as a table.

    Attributes:
      devices: what both are compiled for.
      names: of the plan's step, and of the other.
      planned: the plan's program.
      other: that of the step beside it.
    """

    devices: str
    names: tuple[str, str]
    planned: ProgramFigures
    other: ProgramFigures

    def __str__(self) -> str:
        return as_text(self._parts())

    __repr__ = __str__

    def _parts(self) -> Iterator[RenderableType]:
        title = f"{' beside '.join(self.names)}, compiled for {self.devices}"
        yield Text(title, style="bold")
        rows = table("", ">plan", ">other", ">times")
        for name, ours, theirs, words in self._rows():
            is_whole = ours and not name.startswith(" ")
            ratio = f"{theirs / ours:.2f}" if is_whole else ""
            rows.add_row(name, words(ours), words(theirs), ratio)
        yield rows
        yield Text("bytes of one device in a step; times: the other over the plan")

    def _rows(self) -> Iterator[tuple[str, float, float, Callable[[float], str]]]:
        sides = self.planned, self.other
        replayed = [each.replayed for each in sides if each.replayed is not None]
        if len(replayed) == len(sides):
            ours, theirs = replayed
            yield "step", ours.seconds, theirs.seconds, format_seconds
            exposed = ours.exposed_seconds, theirs.exposed_seconds
            yield "  exposed communication", *exposed, format_seconds
        held = self.planned.device_bytes, self.other.device_bytes
        yield "peak memory", *held, format_bytes
        yield "sent", self.planned.sent_bytes, self.other.sent_bytes, format_bytes
        by_kind = [each.bytes_by_kind for each in sides]
        for kind in {**by_kind[0], **by_kind[1]}:
            ours, theirs = (float(each.get(kind, 0)) for each in by_kind)
            yield f"  {kind}", ours, theirs, format_bytes


def compare(
    step: ParallelFunction, other: Callable[..., Any], *args: Any, **kwargs: Any
) -> Comparison:
    """Compile a plan and another form of its step for the same devices, side by side.

    Devices are those of the step's cluster, which need not be here where their compiler
    is installed (`autopar targets add`). Neither is run.

    Args:
      step: a parallelized function.
      other: the same step sharded by hand: a function that `jax.jit` was given
        shardings for, or one that takes arguments with shardings, on a mesh of as many
        devices (a `jax.sharding.AbstractMesh` needs none); or a parallelized function.
      args: arguments of both: arrays, or jax.ShapeDtypeStruct in their place. Where
        they lie is for the other step alone.
      kwargs: keyword arguments of both.

    Raises:
      TypeError: `step` is not parallelized.
      ValueError: the other step is for another number of devices.
      NotImplementedError: a plan is a pipeline.
      TargetError: the cluster's devices are not here, nor is their compiler.
    """
    if not isinstance(step, ParallelFunction):
        raise TypeError(
            f"autopar.compare needs a parallelized step first, but got {step!r}; give "
            f"autopar.parallelize(step, ...), and the one sharded by hand after it."
        )
    check_compilable(step.options.cluster, step.options.mesh)
    types = _types(args), _types(kwargs)
    compiled = _compiled(step, *types)
    lowered = compiled.lowered
    target = lowered.program.target
    planned = _figures(compiled)
    if isinstance(other, ParallelFunction):
        beside = _figures(_compiled(other, *types))
    else:
        given = _types(args, True), _types(kwargs, True)
        beside = _jitted_figures(other, *given, target, lowered)
    here = f"{lowered.plan.sharding.mesh.size} x {jax.devices()[0].device_kind}"
    names = f"the plan of {lowered.traced.name}", _name_of(other)
    return Comparison(str(target or here), names, planned, beside)


def _name_of(other: Any) -> str:
    kind = "another plan" if isinstance(other, ParallelFunction) else "jit"
    return f"{getattr(other, '__name__', type(other).__name__)} ({kind})"


def _types(tree: Any, has_places: bool = False) -> Any:
    """Types in place of arrays; where these lie on a mesh would decide the plan."""

    def type_of(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            return leaf
        place = leaf.sharding if isinstance(leaf.sharding, NamedSharding) else None
        weak = {"weak_type": getattr(leaf, "weak_type", False)}
        given = place if has_places else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=given, **weak)

    return jax.tree.map(type_of, tree)


def _compiled(step: ParallelFunction, args: Any, kwargs: Any) -> Compiled:
    lowered = step.lower(*args, **kwargs)
    if not isinstance(lowered, Lowered):
        raise NotImplementedError(
            "Programs are compared one with one, but a plan is a pipeline, which has "
            "several; compare with method=autopar.ShardParallel()."
        )
    return lowered.compile()


def _figures(compiled: Compiled) -> ProgramFigures:
    given = compiled.lowered.cluster, compiled.plan.sharding.mesh
    host_bytes = compiled.lowered.program.host_bytes
    return ProgramFigures.of(compiled.compiled, *given, host_bytes)


def _jitted_figures(
    other: Any, args: Sequence[Any], kwargs: Any, target: Target | None, ours: Lowered
) -> ProgramFigures:
    jitted = other if hasattr(other, "lower") else jax.jit(other)
    if target is not None:
        compiled, mesh = compile_jitted(jitted, args, kwargs, target)
        return ProgramFigures.of(compiled, ours.cluster, mesh)
    here = jitted.lower(*args, **kwargs).compile()
    number = ours.plan.sharding.mesh.size
    kinds = jax.tree.leaves(here.input_shardings)
    devices = max((len(each.device_set) for each in kinds), default=1)
    if devices != number:
        raise ValueError(
            f"Both steps are compiled for {number} devices, but {_name_of(other)} is "
            f"for {devices}; give shardings on a mesh of {number}."
        )
    # The mesh only says how devices are numbered, which on one kind of them is alike.
    return ProgramFigures.of(here, ours.cluster, MeshShape(("devices",), (number,)))
