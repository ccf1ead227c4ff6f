"""Two result files beside each other: what got worse, what better, what is gone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from benchmarks.results import NOISE, Result, ResultFile, with_unit

TOLERANCE = 1e-3  # of values, which are the same on every machine; bytes have none
TIMED_TOLERANCE = 0.25  # of what is timed
_SPREAD = "spread"  # says how sure the times beside it are, and is not judged


@dataclass(frozen=True)
class Change:
    """A number that two files both have."""

    suite: str
    case: str
    name: str
    before: float
    after: float
    is_timed: bool
    is_comparable: bool = True

    @property
    def tolerance(self) -> float:
        """By how much it may rise, as a part of what it was."""
        if self.is_timed:
            return TIMED_TOLERANCE
        return 0.0 if self.name.endswith("bytes") else TOLERANCE

    @property
    def is_regression(self) -> bool:
        """Whether it got worse by more than its tolerance."""
        before, after = self._rising()
        return self.is_comparable and after > _above(before, self.tolerance)

    @property
    def is_improvement(self) -> bool:
        """Whether it got better by more than its tolerance."""
        before, after = self._rising()
        return self.is_comparable and before > _above(after, self.tolerance)

    def _rising(self) -> tuple[float, float]:
        """Both so that more is worse."""
        if self.name.endswith("tflops"):
            return -self.before, -self.after
        return self.before, self.after

    def __str__(self) -> str:
        before, after = (
            with_unit(self.name, self.before),
            with_unit(self.name, self.after),
        )
        if before == after:
            before, after = f"{self.before:.10g}", f"{self.after:.10g}"
        return (
            f"{self.suite} {self.case}: {self.name} {before} -> {after}{self._part()}"
        )

    def _part(self) -> str:
        if not (isfinite(self.before) and isfinite(self.after)):
            return ""
        if abs(self.before) <= NOISE:
            return ""
        return f" ({self.after / self.before - 1:+.1%})"


def _above(value: float, tolerance: float) -> float:
    return value + tolerance * abs(value) + NOISE if isfinite(value) else value


@dataclass(frozen=True)
class Comparison:
    """Two files, number by number; `warnings` say what cannot be judged.

    `losses` are cases that had numbers and now have none, with the reason.
    """

    changes: tuple[Change, ...]
    warnings: tuple[str, ...]
    losses: tuple[str, ...] = ()

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.is_regression)

    @property
    def improvements(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.is_improvement)

    @property
    def is_worse(self) -> bool:
        return bool(self.regressions or self.losses)

    def __str__(self) -> str:
        lines = [f"warning: {each}" for each in self.warnings]
        lines += [f"better: {change}" for change in self.improvements]
        lines += [f"REGRESSION {each}" for each in (*self.losses, *self.regressions)]
        judged = sum(change.is_comparable for change in self.changes)
        lines.append(
            f"{judged} numbers compared: {len(self.improvements)} better, "
            f"{len(self.regressions) + len(self.losses)} regressions"
        )
        return "\n".join(lines)


def compare(before: ResultFile, after: ResultFile) -> Comparison:
    """What changed from one file to the other; timings only count on one machine.

    Raises:
      ValueError: no case is in both.
    """
    known = {(each.suite, each.case): each for each in before.results}
    found = {(each.suite, each.case): each for each in after.results}
    shared = [key for key in found if key in known]
    if not shared and known and found:
        raise ValueError(
            f"files that are compared must share cases, but the first has "
            f"{_some(before)} and the second {_some(after)}; run the same suite with "
            f"the same models and meshes."
        )
    warnings = []
    is_same = before.machine == after.machine
    if not is_same:
        warnings.append(
            f"the results are of different machines, {before.machine} and "
            f"{after.machine}: what was timed is not judged"
        )
    for number, keys in (
        ("first", known.keys() - found.keys()),
        ("second", found.keys() - known.keys()),
    ):
        warnings += [
            f"{s} {case} is in the {number} file only" for s, case in sorted(keys)
        ]
    return Comparison(
        tuple(c for key in shared for c in _changes(known[key], found[key], is_same)),
        tuple(warnings),
        tuple(t for key in shared for t in _losses(known[key], found[key])),
    )


def _some(file: ResultFile) -> str:
    first = file.results[0]
    more = len(file.results) - 1
    return f"{first.suite} {first.case}" + (f" and {more} more" if more else "")


def _losses(before: Result, after: Result) -> Iterator[str]:
    gone = before.values.keys() - after.values.keys()
    if gone and not after.values:
        why = after.failure or after.note or "nothing says why"
        yield f"{after.suite} {after.case}: had numbers, has none now: {why}"


def _changes(before: Result, after: Result, is_same: bool) -> Iterator[Change]:
    for is_timed in (False, True):
        old, new = (each.timed if is_timed else each.values for each in (before, after))
        for name in old:
            if name in new and name != _SPREAD:
                yield Change(
                    *(after.suite, after.case, name, old[name], new[name]),
                    *(is_timed, is_same or not is_timed),
                )
