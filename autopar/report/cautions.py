"""What a reader of a plan should know before trusting it: limits, fallbacks, doubts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isinf

from ..graph.work import is_heavy
from ..plans.explain import format_bytes
from ..plans.plan import Prediction
from ..plans.plan_view import Decision, ProgramView, format_source
from ..plans.staged_plan import StagedPlan

_FULL = 0.9  # of the budget: the memory model is up to 14% off
_WIDE_GAP = 0.01
_BIG_BUBBLE = 0.2
_MOST_NAMED = 5


def cautions(decision: Decision, programs: Sequence[ProgramView]) -> tuple[str, ...]:
    """Sentences, the most serious first."""
    return (
        *_about_memory(decision),
        *_about_repeated_work(programs),
        *_about_search(decision),
        *_about_loops(programs),
    )


def _about_memory(decision: Decision) -> Iterator[str]:
    predicted = decision.predicted
    budget, peak = predicted.budget_bytes, predicted.peak_bytes
    if budget and peak > budget:
        yield (
            f"The predicted peak of {format_bytes(peak)} a device is above the budget "
            f"of {format_bytes(budget)}."
        )
    elif budget and peak > _FULL * budget:
        yield (
            f"The predicted peak fills {peak / budget:.0%} of the budget; the model of "
            f"memory was up to 14% off on the programs it was calibrated with."
        )
    if predicted.memory_correction != 1.0:
        yield (
            f"Compiling showed the memory model wrong by a factor of "
            f"{predicted.memory_correction:.2f} on this step; the peak is corrected."
        )
    if not budget:
        yield "The plan was made without a memory budget, or its file does not say."


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


def _about_search(decision: Decision) -> Iterator[str]:
    predicted = decision.predicted
    if isinstance(decision, StagedPlan):
        yield f"Each stage program is solved on its own; {_about_stages(predicted)}."
        if predicted.bubble_fraction > _BIG_BUBBLE:
            yield (
                f"Submeshes wait {predicted.bubble_fraction:.0%} of the time; more "
                f"microbatches, evener stages or fewer of them make that less."
            )
    elif isinf(predicted.optimality_gap):
        yield "No bound is known for this plan; a better one may exist."
    elif predicted.optimality_gap > _WIDE_GAP:
        yield (
            f"The solver stopped {predicted.optimality_gap:.1%} above its bound; a "
            f"better plan may exist."
        )


def _about_stages(predicted: Prediction) -> str:
    gap = predicted.optimality_gap
    if isinf(gap):
        return "no bound is known for the choice of stages"
    return (
        f"the stages are within {gap:.1%} of the bound of their search, to which a "
        f"stage takes what its layers take"
    )


def _about_loops(programs: Sequence[ProgramView]) -> Iterator[str]:
    found = [each for program in programs for each in program.sharding.collectives]
    unbounded = sum(each.unbounded for each in found)
    conditional = sum(each.conditional for each in found)
    if unbounded:
        yield (
            f"{unbounded} collectives stand in loops of unknown length and are counted "
            f"once."
        )
    if conditional:
        yield (
            f"{conditional} collectives stand in branches and are counted as if these "
            f"were taken."
        )
