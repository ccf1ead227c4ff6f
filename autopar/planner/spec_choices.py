"""The spec of one tensor under each choice of a decision, and the distinct ones.

Equal decisions share one value (`SpecTable`): a graph of many equal layers is then
classified once, and what is computed of a pair of values can be found by identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..sharding.spec import REPLICATED, Spec
from .strategies import shard_fractions


@dataclass(frozen=True, eq=False)
class SpecChoices:
    """`specs` [k, axes] by choice, each of class `classes` [k] among `distinct`.

    `fractions` [k] is the part of the tensor that one device holds.
    """

    specs: np.ndarray
    axis_sizes: tuple[int, ...]
    classes: np.ndarray = field(init=False)
    distinct: tuple[Spec, ...] = field(init=False)
    fractions: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rows, inverse = np.unique(self.specs, axis=0, return_inverse=True)
        object.__setattr__(self, "classes", inverse.reshape(-1))
        object.__setattr__(self, "distinct", tuple(map(tuple, rows.tolist())))
        fractions = shard_fractions(self.specs, self.axis_sizes)
        object.__setattr__(self, "fractions", fractions)

    @cached_property
    def may_be_pending(self) -> bool:
        """Whether some spec has a pending reduction."""
        return any(state < REPLICATED for spec in self.distinct for state in spec)

    def of(self, choice: int) -> Spec:
        """The spec under one choice."""
        return self._by_choice[choice]

    @cached_property
    def _by_choice(self) -> list[Spec]:
        return [self.distinct[number] for number in self.classes.tolist()]

    def __str__(self) -> str:
        return f"SpecChoices: {len(self.classes)} choices of {len(self.distinct)} specs"


class _Key(NamedTuple):
    shape: tuple[int, ...]
    content: bytes


class SpecTable:
    """One `SpecChoices` object per distinct array of specs on one mesh."""

    def __init__(self, axis_sizes: Sequence[int]) -> None:
        self._axis_sizes = tuple(axis_sizes)
        self._known: dict[_Key, SpecChoices] = {}
        self._shifted: dict[tuple[int, int], SpecChoices] = {}

    def choices(self, specs: np.ndarray) -> SpecChoices:
        """The value with these specs [k, axes]."""
        specs = np.ascontiguousarray(specs, np.intp)
        key = _Key(specs.shape, specs.tobytes())
        if key not in self._known:
            self._known[key] = SpecChoices(specs, self._axis_sizes)
        return self._known[key]

    def shifted(self, choices: SpecChoices, extra: int) -> SpecChoices:
        """The same choices of a tensor with `extra` more leading dims."""
        if not extra:
            return choices
        key = id(choices), extra
        if key not in self._shifted:
            specs = choices.specs
            self._shifted[key] = self.choices(
                np.where(specs >= 0, specs + extra, specs)
            )
        return self._shifted[key]
