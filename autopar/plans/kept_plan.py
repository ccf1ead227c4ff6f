"""A plan kept beside the code, as a golden test: is the plan made now still that?"""

from __future__ import annotations

from dataclasses import dataclass

from .explain import format_bytes, format_seconds
from .plan_diff import PlanDiff, diff_plans
from .plan_view import Decision

TOLERANCE = 0.01  # of the step's seconds and the peak's bytes


@dataclass(frozen=True)
class KeptCheck:
    """Whether a plan made now is one that was kept; `reason` says what is not so."""

    diff: PlanDiff
    reason: str

    @property
    def is_kept(self) -> bool:
        """Whether it decides the same, at no more than the tolerated cost."""
        return not self.reason

    def __str__(self) -> str:
        kept, made = self.diff.before.predicted, self.diff.after.predicted
        if not self.is_kept:
            return self.reason
        return (
            f"the plan is as it was kept: step {format_seconds(made.step_seconds)} "
            f"(kept {format_seconds(kept.step_seconds)}), peak "
            f"{format_bytes(made.peak_bytes)} (kept {format_bytes(kept.peak_bytes)})"
        )


def check_kept(
    made: Decision, kept: Decision, tolerance: float = TOLERANCE
) -> KeptCheck:
    """Compares a plan made now with the one that was kept.

    They must decide the same for every tensor and operator; names of files and lines
    may differ. `tolerance` is how much more the step may take and a device may hold,
    as a part of what was kept: both change with the cost model and with calibration.

    Raises:
      ValueError: the tolerance is below 0.
    """
    if not tolerance >= 0:
        raise ValueError(
            f"`tolerance` must be a part from 0 up, such as 0.01, but got {tolerance}."
        )
    diff = diff_plans(kept, made)
    return KeptCheck(diff, _reason(diff, tolerance))


def _reason(diff: PlanDiff, tolerance: float) -> str:
    kept, made = diff.before, diff.after
    if kept.decision.cluster != made.decision.cluster:
        return (
            f"the kept plan is for the cluster {kept.decision.cluster}, and this one "
            f"is for {made.decision.cluster}; plan for the same cluster"
        )
    if not diff.has_same_decisions:
        return "the plan differs from the one that was kept"
    figures = (
        ("step", kept.predicted.step_seconds, made.predicted.step_seconds),
        ("peak", kept.predicted.peak_bytes, made.predicted.peak_bytes),
    )
    for name, was, now in figures:
        if now > was * (1 + tolerance):
            more = now / was - 1 if was else float("inf")
            return (
                f"the plan decides as the kept one, but its {name} is predicted "
                f"{more:.1%} above it, where {tolerance:.1%} are tolerated"
            )
    return ""
