"""What waits for barriers, and what they wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph.companions import companions
from ..graph.op_graph import GraphColumns, Operator


def read_besides(
    columns: GraphColumns,
    own: slice,
    renames: np.ndarray,
    barriers: tuple[np.ndarray, np.ndarray],
    value_of: np.ndarray,
) -> np.ndarray:
    """The pairs (row, value) of a block that are no operands, [pairs, 2].

    What is behind a barrier reads what stands for its result. A barrier that gathers
    again reads what must be there before.

    Args:
      columns: those of the graph.
      own: the rows of the block.
      renames: bool [rows], those whose results are what they read.
      barriers: rows, and the values that stand for their results, in order.
      value_of: [tensors] the value of each, as it is made.
    """
    rows, values = (each.tolist() for each in barriers)
    behind = _waits(columns.operators[own], renames, rows, values)
    pairs = [(row, value) for row, each in behind.items() for value in each]
    for row, tensor in companions(columns).items() if rows else ():
        if own.start <= row < own.stop:
            pairs.append((row - own.start, int(value_of[tensor])))
    return np.array(pairs, np.intp).reshape(-1, 2)


def _waits(
    operators: Sequence[Operator],
    renames: np.ndarray,
    rows: Sequence[int],
    values: Sequence[int],
) -> dict[int, list[int]]:
    """By row, what of barriers it reads beside its operands.

    Entry i of `values` is what stands for a result of the barrier in row `rows[i]`, in
    the order of its results; `renames` [rows]: its results are what it reads.
    """
    passed: dict[int, int] = {}  # by tensor
    behind: dict[int, list[int]] = {}
    for row, value in zip(rows, values, strict=True):
        behind.setdefault(row, []).append(value)
    found: dict[int, list[int]] = {}
    for row, op in enumerate(operators if behind else ()):
        read = [passed.get(o) for o in op.operands if isinstance(o, int)]
        own = [value for value in dict.fromkeys(read) if value is not None]
        if own:
            found[row] = own
        if row in behind:
            passed.update(zip(op.results, behind[row], strict=True))
        elif renames[row] and own:
            passed.update(dict.fromkeys(op.results, own[0]))
    return found
