"""Results of benchmarks: what one holds, the file they are in, and two compared."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from math import isfinite
from pathlib import Path

from autopar.plans.explain import format_bytes, format_seconds

VERSION = 1
TOLERANCE = 1e-3  # of values, which are the same on every machine
TIMED_TOLERANCE = 0.25  # of what is timed
NOISE = 1e-9  # what is no more, such as a closed gap, is rounding
FAILED = "failed"  # the case of a suite that ended with an error


@dataclass(frozen=True)
class Result:
    """One case of one suite; less is better in every number.

    Attributes:
      suite: such as `plan`.
      case: model, mesh and method, in words.
      values: what does not depend on the machine: bytes, gaps, modelled seconds.
      timed: what was measured on this machine, seconds or ratios of them.
      note: what a reader should know.
    """

    suite: str
    case: str
    values: dict[str, float] = field(default_factory=dict)
    timed: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        numbers = {**self.values, **self.timed}.items()
        text = ", ".join(f"{_without_unit(n)} {with_unit(n, x)}" for n, x in numbers)
        note = f" ({self.note})" if self.note else ""
        return f"{self.suite}: {self.case}: {text}{note}"


def with_unit(name: str, value: float) -> str:
    """A number as it is read; its name ends in its unit, or it is a ratio."""
    if not isfinite(value):
        return "unknown"
    if abs(value) <= NOISE:
        return "0"
    if name.endswith("seconds"):
        return format_seconds(value)
    if name.endswith("bytes"):
        return format_bytes(value)
    if name.endswith(("gap", "error")):
        return f"{value:.2%}"
    return f"{value:.4g}"


def _without_unit(name: str) -> str:
    return name.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")


@dataclass(frozen=True)
class Machine:
    """What ran the benchmarks."""

    host: str
    processor: str
    num_cores: int
    python: str
    jax: str

    @classmethod
    def here(cls) -> Machine:
        return cls(
            *(platform.node(), platform.machine(), os.cpu_count() or 1),
            *(platform.python_version(), metadata.version("jax")),
        )

    def __str__(self) -> str:
        return (
            f"{self.host} ({self.num_cores} cores, {self.processor}, "
            f"Python {self.python}, jax {self.jax})"
        )


@dataclass(frozen=True)
class ResultFile:
    """The results of one run, as JSON."""

    machine: Machine
    results: tuple[Result, ...]

    def save(self, path: Path) -> None:
        content = {"version": VERSION, **asdict(self)}
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> ResultFile:
        """Reads what `save` wrote.

        Raises:
          ValueError: the file is not there, or no result file of this version.
        """
        if not path.is_file():
            raise ValueError(
                f"a result file is what autopar bench --json wrote, but there is no "
                f"file {path}."
            )
        try:
            content = json.loads(path.read_text())
            if content["version"] != VERSION:
                raise KeyError("version")
            results = tuple(Result(**each) for each in content["results"])
            return cls(Machine(**content["machine"]), results)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"a result file is what autopar bench --json wrote, version {VERSION}, "
                f"but {path} is not ({error!r}); run the benchmark again."
            ) from None


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
    def is_regression(self) -> bool:
        """Whether it rose by more than its tolerance."""
        tolerance = TIMED_TOLERANCE if self.is_timed else TOLERANCE
        rose = self.after > self.before + tolerance * abs(self.before) + 1e-12
        return rose and self.is_comparable

    def __str__(self) -> str:
        relative = self.after / self.before - 1 if self.before else float("inf")
        return (
            f"{self.suite} {self.case}: {self.name} {self.before:.6g} -> "
            f"{self.after:.6g} ({relative:+.1%})"
        )


@dataclass(frozen=True)
class Comparison:
    """Two files, number by number; `warnings` say what cannot be judged."""

    changes: tuple[Change, ...]
    warnings: tuple[str, ...]

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.is_regression)

    def __str__(self) -> str:
        lines = [f"warning: {each}" for each in self.warnings]
        lines += [f"REGRESSION {change}" for change in self.regressions]
        judged = sum(change.is_comparable for change in self.changes)
        lines.append(f"{judged} numbers compared, {len(self.regressions)} regressions")
        return "\n".join(lines)


def compare(before: ResultFile, after: ResultFile) -> Comparison:
    """What rose from one file to the other; timings only count on one machine."""
    warnings = []
    is_same = before.machine == after.machine
    if not is_same:
        warnings.append(
            f"the results are of different machines, {before.machine} and "
            f"{after.machine}: what was timed is not judged"
        )
    known = {(each.suite, each.case): each for each in before.results}
    found = {(each.suite, each.case) for each in after.results}
    for suite, case in known.keys() - found:
        warnings.append(f"{suite} {case} is in the first file only")
    for suite, case in found - known.keys():
        warnings.append(f"{suite} {case} is in the second file only")
    changes = [
        change
        for each in after.results
        if (each.suite, each.case) in known
        for change in _changes(known[each.suite, each.case], each, is_same)
    ]
    return Comparison(tuple(changes), tuple(sorted(warnings)))


def _changes(before: Result, after: Result, is_same: bool) -> Iterator[Change]:
    for is_timed in (False, True):
        old, new = (each.timed if is_timed else each.values for each in (before, after))
        for name in old.keys() & new.keys():
            yield Change(
                *(after.suite, after.case, name, old[name], new[name]),
                *(is_timed, is_same or not is_timed),
            )
