"""A lowered and a compiled step, in the words of `jax.stages`, with the audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from .audit import Audit, MemoryUse, audit
from .compiled_collectives import collectives_in_compiled
from .graph import OpGraph
from .lowered_collectives import collectives_in_lowered
from .parallel_plan import Plan
from .programs import SpmdProgram
from .tracing import TracedFunction


@dataclass(frozen=True, eq=False)
class Lowered:
    """A lowered step: StableHLO on no particular data, and the plan it came from."""

    program: SpmdProgram
    plan: Plan
    traced: TracedFunction
    graph: OpGraph

    def as_text(self) -> str:
        """The StableHLO module."""
        return self.program.lower().as_text()

    def compile(self) -> Compiled:
        """Compile for the devices of the mesh."""
        return Compiled(self, self.program.compile())


@dataclass(frozen=True, eq=False)
class Compiled:
    """A compiled step, with the audit of its collectives against the plan."""

    lowered: Lowered
    compiled: jax.stages.Compiled

    @property
    def plan(self) -> Plan:
        return self.lowered.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step with arguments of the lowered types, static ones left out."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self.lowered.traced.in_tree:
            raise TypeError(
                f"A compiled step must be called with the arguments it was lowered for "
                f"{self.lowered.traced.in_tree}, but got {tree}."
            )
        program = self.lowered.program
        placed = jax.device_put(leaves, list(program.shardings))
        donated, kept = program.split(placed)
        outputs = self.compiled(donated, kept, list(program.constants))
        return jax.tree.unflatten(self.lowered.traced.out_tree, outputs)

    def as_text(self) -> str:
        """The optimized HLO module."""
        return self.compiled.as_text() or ""

    def memory_analysis(self) -> Any:
        """What the compiler says of memory, as `jax.stages.Compiled` does."""
        return self.compiled.memory_analysis()

    def audit(self) -> Audit:
        """Compare the plan's collectives with those of the two programs."""
        sharding = self.plan.sharding
        return audit(
            sharding.collectives,
            collectives_in_lowered(self.lowered.program.lower()),
            collectives_in_compiled(self.as_text()),
            memory=MemoryUse.of(self.compiled),
            num_devices=sharding.mesh.size,
            mesh=sharding.mesh,
            predicted_bytes=sharding.predicted.peak_bytes,
        )
