"""What compilers made of a plan's programs, beside what the plan predicts of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import floor

from rich.console import RenderableType
from rich.text import Text

from ..audit.audit import Audit
from ..audit.replay import Replay
from ..errors import InfeasiblePlanError
from ..plans.explain import format_seconds


@dataclass(frozen=True)
class CompiledFigures:
    """The audit of each program of a plan, compiled for the devices it is for.

    Attributes:
      target: the devices, such as `2x8xH100`.
      audits: by the name of a program, its collectives and memory beside the plan's.
      compile_seconds: what compiling took, also where kept programs were found; 0 for
        devices of this process.
      memory_bytes: what one device holds; 0 for those of this process, whose compiler
        refuses what is larger itself.
      replayed: how long a step takes as compiled; None for CPUs, and for pipelines.
    """

    target: str
    audits: tuple[tuple[str, Audit], ...]
    compile_seconds: float
    memory_bytes: int = 0
    replayed: Replay | None = None

    @property
    def ok(self) -> bool:
        """Whether every difference of every program is explained."""
        return all(audit.ok for _, audit in self.audits)

    @property
    def peak_bytes(self) -> int:
        """What the largest program holds on a device."""
        found = (audit.memory for _, audit in self.audits)
        return max((memory.device_bytes for memory in found if memory), default=0)

    def check_fits(self) -> None:
        """Checks that the programs fit their devices, which not all compilers do.

        Raises:
          InfeasiblePlanError: one does not.
        """
        for name, audit in self.audits:
            held = audit.memory.device_bytes if audit.memory else 0
            if not self.memory_bytes or held <= self.memory_bytes:
                continue
            ratio = held / (audit.predicted_bytes or held)
            budget = floor(self.memory_bytes / ratio)
            raise InfeasiblePlanError(
                f"A program must fit the {self.memory_bytes:,} B of one device of "
                f"{self.target}, but {name or 'the step'} takes {held:,} B as "
                f"compiled, {ratio:.2f} of what was predicted; give "
                f"memory_budget={budget} (--budget {budget}): a plan, remat, "
                f"microbatches or offload is looked for that fits with this error.",
                held,
            )

    def named(self) -> CompiledFigures:
        """The same, each program named with the devices that it is compiled for."""
        where = f"compiled for {self.target}"
        named = ((f"{n}, {where}" if n else where, each) for n, each in self.audits)
        return replace(self, audits=tuple(named))

    def parts(self) -> Iterator[RenderableType]:
        """What is printed, part by part."""
        yield Text(
            f"\ncompiled for {self.target} ({self.compile_seconds:.1f} s): "
            f"{self.peak_bytes:,} B per device, audit {'ok' if self.ok else 'wrong'}",
            style="bold",
        )
        if self.replayed is not None:
            yield Text(f"  step {_in_words(self.replayed)}")
        for name, audit in self.audits:
            if name:
                yield Text(name)
            yield audit


def _in_words(replayed: Replay) -> str:
    parts = sorted(replayed.by_class.items(), key=lambda each: -each[1])
    told = ", ".join(f"{name} {format_seconds(each)}" for name, each in parts)
    exposed = format_seconds(replayed.exposed_seconds)
    return f"{format_seconds(replayed.seconds)}, {exposed} of it communication: {told}"
