"""Memory budgets: how they are written, and the one of a cluster that is given none."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

import numpy as np

from ..clusters.cluster import Cluster
from ..plans.plan import ShardingPlan
from ..plans.staged_plan import StagedPlan

RESERVED_FRACTION = 0.08
"""The part of a device's memory that plans leave alone: the runtime's own, buffers of
collectives, and what an allocator loses between arrays."""

NO_BUDGET = sys.maxsize

_Decision = TypeVar("_Decision", ShardingPlan, StagedPlan)
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")},
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")},
}
_LEAST_BARE = 1024  # bytes: a smaller number without a unit is taken for a slip
_EXAMPLES = "write '70GiB', '900MB' or a whole number of bytes"


def parse_budget(given: int | str) -> int:
    """Bytes a device, from a whole number or a text such as `"70GiB"` or `"1.5 GB"`.

    Raises:
      TypeError: neither a whole number nor a text.
      ValueError: not positive, or a text that is no number with a unit.
    """
    if isinstance(given, bool) or not isinstance(given, int | np.integer | str):
        raise TypeError(
            f"`memory_budget` must be bytes a device, but got {given!r} of type "
            f"{type(given).__name__}; {_EXAMPLES}."
        )
    amount = _parse(given) if isinstance(given, str) else int(given)
    if amount <= 0:
        raise ValueError(
            f"`memory_budget` must be positive, but got {given!r}; {_EXAMPLES}, or "
            f"leave it out for the device's memory."
        )
    if isinstance(given, str) and given.strip().isdigit() and amount < _LEAST_BARE:
        raise ValueError(
            f"`memory_budget` must have a unit if it is so small, but got {given!r}; "
            f"write '{amount}GiB', or '{amount}B' if bytes are meant."
        )
    return amount


def _parse(text: str) -> int:
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?|-?\.\d+)\s*([A-Za-z]*)\s*", text)
    if not match:
        raise ValueError(
            f"`memory_budget` must be a number with a unit, but got {text!r}; "
            f"{_EXAMPLES}."
        )
    number, unit = match.groups()
    by_lower = {each.lower(): size for each, size in _UNITS.items()}
    if unit.lower() not in by_lower:
        raise ValueError(
            f"`memory_budget` must be in {', '.join(u for u in _UNITS if u)}, but got "
            f"the unit {unit!r} in {text!r}; {_EXAMPLES}."
        )
    return int(Fraction(number) * by_lower[unit.lower()])


def default_budget(cluster: Cluster) -> int:
    """A device's memory less the reserve, in bytes; CPUs share the host's, so none."""
    if cluster.device.kind == "CPU":
        return NO_BUDGET
    return int(cluster.device.memory_bytes * (1 - RESERVED_FRACTION))


def with_budget(plan: _Decision, budget_bytes: int) -> _Decision:
    """The plan, which says within what budget it was made, if within any."""
    given = 0 if budget_bytes == NO_BUDGET else budget_bytes
    return replace(plan, predicted=replace(plan.predicted, budget_bytes=given))
