"""A plan kept beside the code, as a golden test: is the plan made now still that?"""

from __future__ import annotations

from dataclasses import dataclass

from .explain import format_seconds
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
        seconds = format_seconds(self.diff.after.predicted.step_seconds)
        return self.reason or f"the plan is as it was kept: step {seconds}"


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
    clusters = kept.decision.cluster, made.decision.cluster
    if clusters[0] != clusters[1]:
        return (
            f"the kept plan is for the cluster {clusters[0]}, and this one is for "
            f"{clusters[1]}; plan for the same cluster"
        )
    if not diff.has_same_decisions:
        return "the plan differs from the one that was kept"
    for name in ("step_seconds", "peak_bytes"):
        was, now = getattr(kept.predicted, name), getattr(made.predicted, name)
        if now > was * (1 + tolerance):
            more = now / was - 1 if was else float("inf")
            return (
                f"the plan decides as the kept one, but its {name.split('_')[0]} is "
                f"predicted {more:.1%} above it, where {tolerance:.1%} are tolerated"
            )
    return ""
