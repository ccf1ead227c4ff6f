"""Results of benchmarks: what one holds, where it is from, the file they are in."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from math import inf, isfinite
from pathlib import Path
from typing import Any

from autopar.plans.explain import format_bytes, format_seconds

VERSION = 1
NOISE = 1e-9  # what is no more, such as a closed gap, is rounding
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Result:
    """One case of one suite; less is better in every number but Tflop/s.

    Attributes:
      suite: such as `plan`.
      case: model, mesh and method, in words.
      values: what does not depend on the machine: bytes, gaps, modelled seconds.
      timed: what was measured on this machine, seconds or ratios of them.
      note: what a reader should know.
      failure: the error that ended the case, "" if none did.
    """

    suite: str
    case: str
    values: dict[str, float] = field(default_factory=dict)
    timed: dict[str, float] = field(default_factory=dict)
    note: str = ""
    failure: str = ""

    @property
    def numbers(self) -> dict[str, float]:
        """All of them, by name."""
        return {**self.values, **self.timed}

    def __str__(self) -> str:
        numbers = self.numbers.items()
        text = ", ".join(f"{without_unit(n)} {with_unit(n, x)}" for n, x in numbers)
        note = f" ({self.note})" if self.note else ""
        failure = f" failed: {self.failure}" if self.failure else ""
        return f"{self.suite}: {self.case}: {text}{note}{failure}"


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
    if name.endswith(("gap", "error", "spread", "fraction")):
        return f"{value:.2%}"
    if value == int(value) and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def without_unit(name: str) -> str:
    """A number's name in words; its unit is said by the number."""
    for unit in ("_seconds", "_bytes", "_fraction"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


@dataclass(frozen=True)
class Machine:
    """What ran the benchmarks."""

    host: str
    processor: str
    num_cores: int
    python: str
    jax: str
    devices: str = "virtual CPU devices"

    @classmethod
    def here(cls, devices: str = "virtual CPU devices") -> Machine:
        return cls(
            *(platform.node(), _processor(), os.cpu_count() or 1),
            *(platform.python_version(), metadata.version("jax"), devices),
        )

    def __str__(self) -> str:
        return (
            f"{self.host} ({self.num_cores} cores, {self.processor}, {self.devices}, "
            f"Python {self.python}, jax {self.jax})"
        )


def _processor() -> str:
    """Its name where the system tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(names, "") or platform.machine()


@dataclass(frozen=True)
class Origin:
    """What a reader needs to run it again; "" where it is not known."""

    command: str = ""
    commit: str = ""  # of the checkout; with a + if files were changed
    day: str = ""  # UTC

    @classmethod
    def here(cls, command: str) -> Origin:
        return cls(command, _commit(), datetime.now(UTC).date().isoformat())


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *words],
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return ""


@dataclass(frozen=True)
class ResultFile:
    """The results of one run, as JSON; a number that is not finite is null."""

    machine: Machine
    results: tuple[Result, ...]
    origin: Origin = Origin()

    def save(self, path: Path) -> None:
        content = {"version": VERSION, **asdict(self)}
        for each in content["results"]:
            each["values"] = _or_null(each["values"])
            each["timed"] = _or_null(each["timed"])
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")

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
            results = tuple(_result(each) for each in content["results"])
            origin = Origin(**content.get("origin", {}))
            return cls(Machine(**content["machine"]), results, origin)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"a result file is what autopar bench --json wrote, version {VERSION}, "
                f"but {path} is not ({error!r}); run the benchmark again."
            ) from None


def _or_null(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: x if isfinite(x) else None for name, x in numbers.items()}


def _result(content: Mapping[str, Any]) -> Result:
    numbers = {
        part: {name: inf if x is None else x for name, x in content[part].items()}
        for part in ("values", "timed")
    }
    return Result(**{**content, **numbers})
