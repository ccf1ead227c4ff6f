"""Of pins that leave no plan, the few that already do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import comb
from typing import TypeVar

from jax.sharding import PartitionSpec

from ..errors import InfeasiblePlanError

_MAX_SETS = 64  # of one size that are tried, as each is solved

T = TypeVar("T")
PinsByKey = Mapping[str, PartitionSpec]


def blame_pins(
    error: InfeasiblePlanError,
    pins: PinsByKey,
    plan_with: Callable[[PinsByKey], object],
) -> InfeasiblePlanError:
    """The error, with the smallest set of pins that is to blame, if any is.

    Args:
      error: says that no plan exists with all pins.
      pins: by key.
      plan_with: plans with some of them, or raises such an error.
    """

    known = {frozenset(pins): False}  # each set is solved once

    def is_feasible(keys: Sequence[str]) -> bool:
        some = frozenset(keys)
        if some not in known:
            try:
                plan_with({key: pins[key] for key in keys})
                known[some] = True
            except InfeasiblePlanError:
                known[some] = False
        return known[some]

    if not pins or not is_feasible(()):
        return error
    conflict = shortest_conflict(tuple(pins), is_feasible)
    specs = " and ".join(f"{key!r}: {pins[key]}" for key in conflict)
    alone = "pin alone leaves" if len(conflict) == 1 else "pins together leave"
    which = "it" if len(conflict) == 1 else "one of them"
    return error.saying_more(
        f"Without pins there is a plan; the {alone} none: {specs}. Change or drop "
        f"{which}."
    )


def shortest_conflict(
    pins: Sequence[T], is_feasible: Callable[[Sequence[T]], bool]
) -> tuple[T, ...]:
    """The smallest set of pins that leaves no plan; empty if all together leave one.

    Among many pins it is a set of which every part leaves a plan, if not the smallest.

    Args:
      pins: any names of them, in the order in which they were given.
      is_feasible: whether there is a plan with these pins; with fewer there is one too.
    """
    if is_feasible(pins):
        return ()
    conflict = tuple(pins)
    for pin in reversed(pins):
        rest = tuple(each for each in conflict if each != pin)
        if not is_feasible(rest):
            conflict = rest
    for size in range(1, len(conflict)):
        if comb(len(pins), size) > _MAX_SETS:
            break
        for some in combinations(pins, size):
            if not is_feasible(some):
                return some
    return conflict
