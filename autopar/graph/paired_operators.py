"""What is gathered again, and what has to be there before."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .build_graph import BARRIER
from .op_graph import GraphColumns

GATHERED_AGAIN = "gather_again/"
"""Begins the names of barriers between a parameter and its backward readers."""


@lru_cache(maxsize=4)
def companions(columns: GraphColumns) -> dict[int, int]:
    """For each of these barriers, by row, a tensor that its first reader reads besides.

    The cotangent, as a rule: no scheduler gathers again before it is there.
    """
    barriers = np.flatnonzero(columns.where(lambda op: op.kind == BARRIER)).tolist()
    waiting: dict[int, int] = {}  # row by its result
    for row in barriers:
        op = columns.operators[row]
        if op.name.startswith(GATHERED_AGAIN):
            waiting[op.results[0]] = row
    gathered, found = set(waiting), dict[int, int]()
    for at in np.flatnonzero(np.isin(columns.operands, list(gathered))).tolist():
        reader = columns.operators[int(columns.rows_of_operands[at])]
        read = [o for o in reader.operands if isinstance(o, int)]
        others = [each for each in read if each not in gathered]
        tensor = int(columns.operands[at])
        if others and tensor in waiting:
            found[waiting.pop(tensor)] = others[0]
    return found
