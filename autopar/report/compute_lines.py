"""Where a step's compute goes, by source line, and how each line's work is split."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..costs.compute import is_heavy
from ..plans.plan import OperatorPlan
from ..plans.plan_view import ProgramView, format_source
from ..sharding.mesh import MeshShape
from ..sharding.spec import Spec


@dataclass(frozen=True)
class ComputeLine:
    """The operators of one line that are split alike.

    Args:
      program: the stage program that they are in, or nothing.
      source: the line, as the trace has it; empty for all light operators together.
      operator: the primitive, and the phase.
      mesh: what they are split over.
      spec: the state of their first result along each mesh axis; None if they differ.
      count: how many there are in the program.
      seconds: of a step, on one device.
    """

    program: str
    source: str
    operator: str
    mesh: MeshShape
    spec: Spec | None
    count: int
    seconds: float


def compute_lines(programs: Iterable[ProgramView]) -> tuple[ComputeLine, ...]:
    """A line for each source line of products and the like, one for all the rest.

    Those that take longest come first.
    """
    lines = [line for program in programs for line in _lines(program)]
    return tuple(sorted(lines, key=lambda line: -line.seconds))


def _lines(program: ProgramView) -> Iterator[ComputeLine]:
    grouped: dict[tuple[str, str, Spec | None], list[OperatorPlan]] = defaultdict(list)
    for op in program.sharding.operators:
        if is_heavy(op.kind):
            spec = op.result_specs[0] if op.result_specs else None
            line = format_source(op.source)
            grouped[line, f"{op.kind}{_phase(op)}", spec].append(op)
        elif op.seconds:
            grouped["", "all light operators", None].append(op)
    for (line, operator, spec), same in grouped.items():
        yield ComputeLine(
            program.name,
            same[0].source if line else "",
            operator,
            program.sharding.mesh,
            spec,
            len(same),
            sum(op.seconds for op in same) * program.times,
        )


def _phase(op: OperatorPlan) -> str:
    return " (backward)" if "transpose(" in op.name else ""
