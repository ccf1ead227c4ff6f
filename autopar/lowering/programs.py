"""Lowered plans as something that runs: one SPMD function, or a program a stage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..costs.resharding import Resharder
from ..graph.build_graph import BARRIER
from ..graph.effects import CALLBACKS
from ..graph.op_graph import OpGraph
from ..jax_compat import CONCRETE_ARRAY as CONCRETE_ARRAY
from ..jax_compat import PyTreeDef as PyTreeDef
from ..jax_compat import Tracer, weakly_typed, without_mesh
from ..jax_compat import bits_of as bits_of
from ..jax_compat import call_in_cpp as call_in_cpp
from ..jax_compat import compiled as compiled
from ..jax_compat import distributed_store as distributed_store
from ..jax_compat import is_checking_values as is_checking_values
from ..jax_compat import path_in_cpp as path_in_cpp
from ..plans.plan import ShardingPlan, TaskKind
from ..rules.halos import RING
from ..rules.host_calls import HostCalls
from ..targets.target import Target
from .channels import number_channels
from .host_memory import HostLeaves, at_host, host_bytes
from .spmd import input_shardings, output_shardings, spmd_function

SlotKind = Literal["state", "batch", "activation", "gradient", "result"]


# XLA's CPU compiler makes one all_reduce of many, whose operands and results are then
# all in memory at once.
APART = ("cpu-all-reduce-combiner",)
# It drops barriers before it joins equal operators: what is to be gathered or computed
# again would be kept instead. Where barriers stay, a loop over less than a KiB may not
# become one kernel: its emitter ends the process at a barrier.
KEEP_BARRIERS = ("cse_barrier_expander", "small-while-loop-hoisting")
# The order of kernels that memory is predicted of. XLA's usual one for CPUs, which puts
# many side by side, holds up to a third more and crashes with some collectives.
LEAST_MEMORY = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
SCHEDULER_FLAGS = (
    "xla_cpu_scheduler_type",
    "xla_cpu_enable_concurrency_optimized_scheduler",
)


class SignatureChanged(Exception):
    """A program was called with other types than it was planned for."""


def is_traced(leaves: Sequence[Any]) -> bool:
    """Whether a call stands inside a JAX transformation, and has no values yet."""
    return any(issubclass(kind, Tracer) for kind in set(map(type, leaves)))


@dataclass(frozen=True, eq=False)
class SpmdProgram:
    """`jitted(constants, *leaves)` runs one step and returns flat outputs.

    `donated` are positions among the argument leaves; `paths`, `shardings` and
    `argument_types` are the name, home and type of every leaf; `constants` are the
    closed-over arrays, in place. On an abstract mesh, which cannot be compiled for but
    exported, constants are where they were.
    """

    jitted: Any
    donated: tuple[int, ...]
    paths: tuple[str, ...]
    shardings: tuple[NamedSharding, ...]
    constants: tuple[Any, ...]
    argument_types: tuple[jax.ShapeDtypeStruct, ...]
    constant_shardings: tuple[NamedSharding, ...]
    output_shardings: tuple[NamedSharding, ...]
    mesh: Mesh | AbstractMesh
    host_calls: HostCalls | None = None  # where it has any
    compiler_options: Mapping[str, str] = field(default_factory=dict[str, str])
    target: Target | None = None  # what it is compiled for, if not for devices here

    def without_repeats(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves, with a copy of each array that is donated and comes again.

        Moved first, they would be several arrays of one buffer, which XLA's CPU client
        does not survive.
        """
        found, donated = list(leaves), set(self.donated)
        seen = {id(leaf) for i, leaf in enumerate(leaves) if i not in donated}
        for i in self.donated:
            if isinstance(found[i], jax.Array) and id(found[i]) in seen:
                found[i] = jax.numpy.copy(found[i])
            seen.add(id(found[i]))
        return found

    def watched(self, run: Callable[[], Any]) -> Any:
        """What `run` gives, which starts the program.

        With host callbacks the program is waited for, and what one raises is raised.
        """
        return run() if self.host_calls is None else self.host_calls.watch(run)

    @property
    def host_bytes(self) -> int:
        """Bytes of the arguments that the host holds for one device."""
        return host_bytes(self.shardings, self.argument_types)

    def lower(self) -> jax.stages.Lowered:
        """Lower for the argument types the plan was made for, once."""
        return self._lowered

    def compile(self) -> jax.stages.Compiled:
        """Compile for the devices of the mesh, once."""
        return self._compiled

    @cached_property
    def _lowered(self) -> jax.stages.Lowered:
        if isinstance(self.mesh, Mesh):
            with without_mesh():  # a caller's is not that of the program
                lowered = self.jitted.lower(self.constants, *self.argument_types)
            return number_channels(lowered, platform_of(self.mesh))
        shapes = tuple(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in self.constants)
        device = self.mesh.abstract_device
        assert device is not None, "a mesh of other hosts says what its devices are"
        traced = self.jitted.trace(shapes, *self.argument_types)
        lowered = traced.lower(lowering_platforms=(device.platform,))
        return number_channels(lowered, device.platform)

    @cached_property
    def _compiled(self) -> jax.stages.Compiled:
        if isinstance(self.mesh, Mesh):
            return compiled(self._lowered, self.compiler_options)
        here = tuple(jax.devices()[: self.mesh.size])
        if len(here) < self.mesh.size:
            raise RuntimeError(
                f"A program of other hosts is compiled there; to compile it here takes "
                f"as many devices, which are {self.mesh.size}, and this process has "
                f"{len(here)}. Start it with XLA_FLAGS=--xla_force_host_platform_"
                f"device_count={self.mesh.size}, or call the step."
            )
        return compiled(self._lowered, self.compiler_options, here)


def build_program(
    graph: OpGraph,
    plan: ShardingPlan,
    resharder: Resharder,
    mesh: Mesh | AbstractMesh,
    argument_types: Sequence[jax.ShapeDtypeStruct],
    constants: Sequence[Any],
    donated: Sequence[int],
    weak_outputs: Sequence[int] = (),
    host_outputs: Sequence[int] = (),
) -> SpmdProgram:
    """The program of `plan` on the devices of `mesh`, or on those of another host.

    `argument_types` are the leaves of the call, `constants` the closed-over arrays that
    follow them among the graph's inputs, `donated` positions whose buffers may be
    reused, `weak_outputs` positions of results that are weakly typed, `host_outputs`
    of those that go to the host's memory besides the next values of what lies there.
    """
    host = HostLeaves.of(graph, plan)
    homes = at_host(input_shardings(plan, mesh), host.inputs)
    at_end = host.outputs.union(host_outputs)
    ends = at_host(output_shardings(graph, plan, mesh), at_end)
    num_arguments = len(argument_types)
    kinds = {op.kind for op in graph.operators()}
    calls = HostCalls() if kinds.intersection(CALLBACKS) else None
    run = spmd_function(graph, plan, mesh, resharder, calls)

    def step(closed_over: tuple[Any, ...], *leaves: Any) -> list[Any]:
        given = host.fetched([*leaves, *closed_over], homes)
        outputs = list(run(*given))
        for position in weak_outputs:
            outputs[position] = weakly_typed(outputs[position])
        return outputs

    step.__name__ = graph.name
    jitted = jax.jit(
        step,
        in_shardings=(homes[num_arguments:], *homes[:num_arguments]),
        out_shardings=list(ends),
        donate_argnums=tuple(1 + position for position in donated),
    )
    placed = list(constants)
    if isinstance(mesh, Mesh):
        placed = jax.device_put(placed, list(homes[num_arguments:]))
    return SpmdProgram(
        jitted,
        tuple(donated),
        tuple(i.path for i in plan.inputs[:num_arguments]),
        homes[:num_arguments],
        tuple(placed),
        tuple(argument_types),
        homes[num_arguments:],
        ends,
        mesh,
        calls,
        _compiler_options(plan, mesh),
    )


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """That of a mesh's devices; empty if an abstract one does not say."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    return mesh.abstract_device.platform if mesh.abstract_device is not None else ""


def _compiler_options(plan: ShardingPlan, mesh: Mesh | AbstractMesh) -> dict[str, str]:
    """What the compiler of a plan's devices leaves undone, and its order of kernels.

    A scheduler that the user names in `XLA_FLAGS` stays.
    """
    if platform_of(mesh) != "cpu":
        return {}
    has_barriers = any(
        op.kind == BARRIER or any(name.startswith(RING) for name in op.factors)
        for op in plan.operators
    )
    left_out = (*APART, *(KEEP_BARRIERS if has_barriers else ()))
    options = {"xla_disable_hlo_passes": ",".join(left_out)}
    given = os.environ.get("XLA_FLAGS", "")
    if not any(flag in given for flag in SCHEDULER_FLAGS):
        options |= LEAST_MEMORY
    return options


@dataclass(frozen=True)
class Slot:
    """A named value that stage programs read and write.

    By `kind`: a *state* lives across steps, and whoever reads it gets what the step
    began with; a *batch* slot is fed from outside, once a microbatch; an *activation*
    (residual, cotangent) is made once a microbatch; a *gradient* starts at zero (a
    maximum at the least value) and is accumulated over the microbatches; a *result*
    leaves the step. What an apply program makes exists once a step, whatever its kind.
    `stage` makes or holds it.
    """

    name: str
    kind: SlotKind
    stage: int


@dataclass(frozen=True, eq=False)
class StageProgram:
    """What a task of one stage and kind runs; `run` takes and returns lists of arrays.

    `inputs` and `outputs` are slot names in the order of `run`'s lists. `donated` are
    the positions of inputs whose buffers it reuses: accumulators, old state.
    """

    stage: int
    kind: TaskKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    donated: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """A step cut into stage programs, and where each stage makes or wants each slot.

    `shardings` has an entry for the (slot, stage) that makes or holds it and for every
    other stage that reads it; `zeros` makes the first value of each gradient slot. A
    task with several programs runs them in their order in `programs`; apply programs
    are in an order in which those of all stages could run one after the other.
    """

    num_stages: int
    num_microbatches: int
    slots: Mapping[str, Slot]
    programs: tuple[StageProgram, ...]
    shardings: Mapping[tuple[str, int], NamedSharding]
    zeros: Mapping[str, Callable[[], Any]]
