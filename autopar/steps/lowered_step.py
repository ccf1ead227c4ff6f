"""A lowered and a compiled step, in the words of `jax.stages`, with the audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import jax

from ..audit.audit import Audit, MemoryUse, audit
from ..audit.compiled_collectives import collectives_in_lowered, collectives_on
from ..audit.replay import Replay, replay_if_known
from ..clusters.cluster import Cluster
from ..frontend.calls import Call, open_call
from ..frontend.constant_leaves import ResultTree
from ..frontend.static_arguments import StaticArguments
from ..graph.build_graph import tensor_type
from ..graph.op_graph import OpGraph
from ..graph.traced_function import TracedFunction
from ..lowering.compiled_program import compile_program
from ..lowering.programs import SpmdProgram
from ..state.distributed_array import abstract_leaf, gathered
from ..targets.compile_service import TargetExecutable, refuse_call
from .parallel_plan import Plan


@dataclass(frozen=True, eq=False)
class Traced:
    """A step as JAX traced it, in the words of `jax.stages.Traced`.

    `out_info` are the types of its results; `lower` plans and lowers it.
    """

    fun_name: str
    jaxpr: Any
    out_info: Any
    lower: Callable[[], Any]

    def __repr__(self) -> str:
        return f"<traced {self.fun_name}: {len(self.jaxpr.eqns)} equations>"


@contextmanager
def call_as_lowered(
    traced: TracedFunction, only_arrays: bool, args: Any, kwargs: Any
) -> Iterator[Call]:
    """A call of a compiled step.

    Raises:
      TypeError: the step was lowered for other trees or constants.
    """
    with open_call(StaticArguments(), args, kwargs, only_arrays) as call:
        tree = jax.tree.structure(call.arguments())
        if tree != traced.in_tree:
            raise TypeError(
                f"A compiled step must be called with the arguments it was lowered "
                f"for, and the same constants in them: {traced.in_tree!s:.200}, but "
                f"got {tree!s:.200}; call the parallelized function, or lower again."
            )
        yield call


@dataclass(frozen=True, eq=False, repr=False)
class Lowered:
    """A lowered step: StableHLO on no particular data, and the plan it came from."""

    program: SpmdProgram
    plan: Plan
    traced: TracedFunction
    graph: OpGraph
    only_arrays: bool = False  # all other leaves are constants
    cluster: Cluster | None = None

    def __repr__(self) -> str:
        return f"<lowered\n{self.plan!r}>"

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        """The StableHLO module; arguments are those of `jax.stages.Lowered`."""
        return self.program.lower().as_text(*args, **kwargs)

    def compile(self, limit_seconds: float = inf) -> Compiled:
        """Compile for the devices of the mesh, or for the target of an absent cluster.

        Raises:
          TargetError: the target's compiler refuses the program.
          TimeoutError: compiling for a target took longer than `limit_seconds`.
        """
        return Compiled(self, compile_program(self.program, limit_seconds))


@dataclass(frozen=True, eq=False, repr=False)
class Compiled:
    """A compiled step, with the audit of its collectives against the plan."""

    lowered: Lowered
    compiled: Any  # a jax.stages.Compiled, or a TargetExecutable

    def __repr__(self) -> str:
        return f"<compiled\n{self.plan!r}>"

    @property
    def plan(self) -> Plan:
        return self.lowered.plan

    @cached_property
    def predicted(self) -> Replay | None:
        """Seconds of the program as compiled, of GPUs and TPUs; None of CPUs."""
        mesh = self.plan.sharding.mesh
        return replay_if_known(self.as_text(), self.lowered.cluster, mesh)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step with arguments of the lowered types, static ones left out."""
        if isinstance(self.compiled, TargetExecutable):
            refuse_call(self.compiled.target.name)
        traced, only_arrays = self.lowered.traced, self.lowered.only_arrays
        with call_as_lowered(traced, only_arrays, args, kwargs) as call:
            program = self.lowered.program
            self._check_types(call.leaves)
            leaves = program.without_repeats(call.leaves)
            whole = map(gathered, leaves, program.shardings)
            placed = jax.device_put(list(whole), list(program.shardings))
            outputs = program.watched(lambda: self.compiled(program.constants, *placed))
            return call.result(ResultTree.of(self.lowered.traced.out_tree), outputs)

    def _check_types(self, leaves: Sequence[Any]) -> None:
        program = self.lowered.program
        types = zip(program.paths, leaves, program.argument_types, strict=True)
        for path, leaf, planned_type in types:
            given = tensor_type(jax.typeof(abstract_leaf(leaf)))
            planned = tensor_type(planned_type)
            if given != planned:
                raise TypeError(
                    f"A compiled step must be called with the types it was lowered "
                    f"for, but {path} is {given} and was {planned}; lower again, or "
                    f"call the parallelized function, which compiles for each shape."
                )

    def as_text(self) -> str:
        """The optimized HLO module."""
        return self.compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        """What the compiler says of memory, as `jax.stages.Compiled` does."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """The compiler's flops and bytes, as `jax.stages.Compiled` has them."""
        return self.compiled.cost_analysis()

    def audit(self) -> Audit:
        """Compare the plan's collectives with those of the two programs."""
        sharding = self.plan.sharding
        return audit(
            sharding.collectives,
            collectives_in_lowered(self.lowered.program.lower()),
            collectives_on(sharding.mesh.size, self.as_text()),
            memory=MemoryUse.of(self.compiled, self.lowered.program.host_bytes),
            num_devices=sharding.mesh.size,
            mesh=sharding.mesh,
            predicted_bytes=sharding.predicted.peak_bytes,
        )
