"""What of a plan is not as it should be: work done twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..graph.work import is_heavy
from ..plans.plan_view import ProgramView, format_source

_MOST_NAMED = 5


def cautions(programs: Sequence[ProgramView]) -> tuple[str, ...]:
    """Sentences, one for each program of which devices repeat heavy work."""
    return tuple(_about_repeated_work(programs))


def _about_repeated_work(programs: Sequence[ProgramView]) -> Iterator[str]:
    for program in programs:
        plan, size = program.sharding, program.sharding.mesh.size
        repeated = [
            op for op in plan.operators if is_heavy(op.kind) and op.split < size
        ]
        if not repeated:
            continue
        lines = list(dict.fromkeys(format_source(op.source) for op in repeated))
        named = ", ".join(lines[:_MOST_NAMED])
        more = f" and {len(lines) - _MOST_NAMED} more" * (len(lines) > _MOST_NAMED)
        where = f"In {program.name}, " if program.name else ""
        share = 1 - plan.predicted.split_flops_fraction
        yield (
            f"{where}{share:.1%} of the heavy flops are done by several devices alike: "
            f"{named}{more}."
        )
