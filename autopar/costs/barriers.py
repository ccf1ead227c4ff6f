"""What waits for barriers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph.op_graph import Operator


def waits(
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
