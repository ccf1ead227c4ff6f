"""The strategies of one kind of operator, shared by all of the kind in a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .spec_choices import SpecChoices
from .strategies import Strategies


@dataclass(frozen=True, eq=False)
class OperatorChoices:
    """The strategies of one kind of operator, with what an execution takes [n]."""

    strategies: Strategies
    seconds: np.ndarray
    operands: tuple[SpecChoices, ...]
    results: tuple[SpecChoices, ...]


def params_key(params: Mapping[str, object]) -> object:
    """Equal only for equal parameters: themselves, or how they print."""
    items = tuple(sorted(params.items(), key=lambda item: item[0]))
    try:
        hash(items)
    except TypeError:
        return repr(items)
    return items
