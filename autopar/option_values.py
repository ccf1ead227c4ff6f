"""What single options may be: remat, offload, microbatch semantics, memory budgets."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeVar, get_args

import numpy as np

from .clusters.cluster import Cluster

Offload = Literal["auto", "optimizer_state", "state"]
MicrobatchSemantics = Literal["exact", "independent"]
RESERVED_FRACTION = 0.08
"""The part of a device's memory that plans leave alone: the runtime's own, buffers of
collectives, and what an allocator loses between arrays."""
NO_BUDGET = sys.maxsize
_UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")},
    **{f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")},
}
_LEAST_BARE = 1024  # bytes: a smaller number without a unit is taken for a slip
_EXAMPLES = "write '70GiB', '900MB' or a whole number of bytes"

Level = Literal["selective", "cheap", "full"]
LEVELS: tuple[Level, ...] = get_args(Level)
OFFLOADS: tuple[Offload | None, ...] = (None, *get_args(Offload))
SEMANTICS: tuple[MicrobatchSemantics, ...] = get_args(MicrobatchSemantics)
_T = TypeVar("_T")


@dataclass(frozen=True)
class Remat:
    """The residuals that the backward pass makes again, as JAX's remat would.

    By `level`, from the least work to the most:

      selective  what lies between two products of examples with each other: the scores
                 and weights of attention (Megatron-LM's core), from queries and keys
      cheap      all but products: what elementwise operators and reductions make, from
                 the results of products
      full       everything, from what enters a segment

    Segments are the iterations of a loop over layers, or parts of unrolled layers, of
    which `num_segments`, from the first on, do so (None: all but the last, which the
    backward pass starts with). Prints as `full` or `full:3` and parses back.
    """

    level: Level
    num_segments: int | None = None

    def __str__(self) -> str:
        number = self.num_segments
        return self.level if number is None else f"{self.level}:{number}"

    @classmethod
    def parse(cls, text: str) -> Remat:
        """The inverse of `str`.

        Raises:
          ValueError: the text is no level, or has no number of segments behind it.
        """
        found = re.fullmatch(rf"({'|'.join(LEVELS)})(?::([1-9]\d*))?", text)
        if found is None:
            raise ValueError(
                f"`remat` must be None, auto or one of {', '.join(LEVELS)}, with a "
                f"number of segments behind it if need be (full:3), but got {text!r}."
            )
        level, number = found.groups()
        return cls(
            next(each for each in LEVELS if each == level),
            None if number is None else int(number),
        )


def check_remat(given: object) -> str | None:
    """The option as it is kept: None, "auto", or the text of a `Remat`.

    Raises:
      ValueError: anything else.
    """
    if given is None or given in ("none", "auto"):
        return "auto" if given == "auto" else None
    return str(Remat.parse(str(given)))


def one_of(option: str, given: object, allowed: Sequence[_T]) -> _T:
    """What is given, which is one of the values that an option may have.

    Raises:
      ValueError: it is none.
    """
    if given in allowed:
        return allowed[allowed.index(given)]  # type: ignore[arg-type]
    known = " or ".join(map(repr, allowed))
    raise ValueError(f"`{option}` must be {known}, but got {given!r}.")


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
