"""A lowered and a compiled pipeline, in the words of `jax.stages`, with the audits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from ..audit.audit import Audit, AuditRow, Difference
from ..errors import AuditError
from ..frontend.constant_leaves import ResultTree
from ..graph.traced_function import TracedFunction
from ..lowering.memory_use import MemoryUse
from ..lowering.programs import SignatureChanged
from ..pipelines.pipeline import PipelinedStep
from ..targets.compile_service import refuse_call
from .lowered_step import call_as_lowered
from .parallel_plan import Plan


@dataclass(frozen=True)
class PipelineAudit:
    """The audits of all programs of a pipeline, by what they are of; prints them.

    Args:
      audits: of each program, with its stage and kind in words.
      peak_bytes: what one device of each submesh holds in a step, with the programs as
        compiled and the values that the schedule holds.
      predicted_bytes: the plan's own figures for `peak_bytes`.
    """

    audits: tuple[tuple[str, Audit], ...]
    peak_bytes: tuple[int, ...] = ()
    predicted_bytes: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[AuditRow, ...]:
        """The rows of all programs."""
        return tuple(row for each in self for row in each.rows)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Where a program is not as planned, explained or wrong."""
        return tuple(found for each in self for found in each.differences)

    @property
    def memory(self) -> MemoryUse | None:
        """That of the compiled program which takes the most of a device."""
        found = (each.memory for each in self if each.memory is not None)
        return max(found, key=lambda use: use.device_bytes, default=None)

    @property
    def ok(self) -> bool:
        """Whether every difference of every program is explained."""
        return all(each.ok for _, each in self.audits)

    def __iter__(self) -> Iterator[Audit]:
        return (each for _, each in self.audits)

    def raise_if_wrong(self) -> None:
        """Does nothing if all is as planned or explained.

        Raises:
          AuditError: if not, with a note that names the stage program.
        """
        for name, each in self.audits:
            try:
                each.raise_if_wrong()
            except AuditError as error:
                error.add_note(f"found in the program of {name}")
                raise

    def __str__(self) -> str:
        lines = [f"{name}\n{each}" for name, each in self.audits]
        both = zip(self.peak_bytes, self.predicted_bytes, strict=True)
        for submesh, (peak, predicted) in enumerate(both):
            lines.append(
                f"submesh {submesh}: {peak:,} B a device, {peak / predicted:.2f} of "
                f"the {predicted:,} B predicted"
            )
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class LoweredPipeline:
    """A lowered pipeline: StableHLO of every stage program, and the plan it came from.

    With `only_arrays`, all other leaves of a call are constants.
    """

    step: PipelinedStep
    plan: Plan
    only_arrays: bool = False

    def __repr__(self) -> str:
        return f"<lowered\n{self.plan!r}>"

    @property
    def traced(self) -> TracedFunction:
        """The whole step as it was traced."""
        return self.step.pipeline.traced

    def as_text(self) -> str:
        """The StableHLO modules, each below a line that names its stage and kind."""
        return "\n".join(
            f"// {each.name}\n{each.program.lower().as_text()}"
            for each in self.step.pipeline.lowered
        )

    def compile(self, limit_seconds: float = inf) -> CompiledPipeline:
        """Compile every program for the devices of its stage.

        Raises:
          TargetError: the compiler of an absent cluster refuses a program.
          TimeoutError: a program of one took longer than `limit_seconds`.
        """
        pipeline = self.step.pipeline
        if not pipeline.compiled:  # those of other hosts
            for each in pipeline.lowered:
                each.compile(limit_seconds)
        return CompiledPipeline(self)


@dataclass(frozen=True, eq=False, repr=False)
class CompiledPipeline:
    """A compiled pipeline, with the audit of its collectives against the plan."""

    lowered: LoweredPipeline

    def __repr__(self) -> str:
        return f"<compiled\n{self.plan!r}>"

    @property
    def plan(self) -> Plan:
        return self.lowered.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step with arguments of the lowered types, static ones left out."""
        return self._run(self.lowered.step, args, kwargs)

    def record(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Run one step as `__call__` does, and return its results and its trace.

        The trace has the predicted and the measured timeline, prints both, and
        `trace.save("step.json")` writes them for ui.perfetto.dev.
        """
        traces: list[Any] = []
        step = partial(self.lowered.step, traces=traces)
        return self._run(step, args, kwargs), traces[0]

    def _run(
        self,
        step: Callable[[Sequence[Any]], list[Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if (target := self.lowered.step.pipeline.target) is not None:
            refuse_call(target)
        traced = self.lowered.traced
        only_arrays = self.lowered.only_arrays
        with call_as_lowered(traced, only_arrays, args, kwargs) as call:
            try:
                results = step(call.leaves)
            except SignatureChanged:
                raise TypeError(
                    "A compiled step must be called with the types it was lowered for, "
                    "but some shape or dtype differs; lower again, or call the "
                    "parallelized function, which compiles for each shape."
                ) from None
            return call.result(ResultTree.of(traced.out_tree), results)

    def as_text(self) -> str:
        """The optimized HLO modules, each below a line that names its program."""
        return "\n".join(
            f"// {each.name}\n{each.compile().as_text()}"
            for each in self.lowered.step.pipeline.lowered
        )

    def memory_analysis(self) -> tuple[Any, ...]:
        """What the compiler says of the memory of each stage program."""
        programs = self.lowered.step.pipeline.lowered
        return tuple(each.compile().memory_analysis() for each in programs)

    def cost_analysis(self) -> tuple[Any, ...]:
        """The compiler's flops and bytes of each stage program."""
        programs = self.lowered.step.pipeline.lowered
        return tuple(each.compile().cost_analysis() for each in programs)

    def audit(self) -> PipelineAudit:
        """Compare the plans' collectives with those of all stage programs."""
        pipeline, stages = self.lowered.step.pipeline, self.plan.stages
        audits = tuple((each.name, each.audit()) for each in pipeline.lowered)
        peaks = pipeline.compiled_peaks(stages)
        return PipelineAudit(audits, peaks, stages.peak_bytes)
