"""Tensors that are other names of what is read, as reshapes make them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..graph.op_graph import GraphColumns


def renamed(
    columns: GraphColumns,
    rows: slice,
    renames: np.ndarray,
    equals: Mapping[int, int],
    read: tuple[np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Of which tensor each is another name, and as which read of a block.

    Args:
      columns: of the graph.
      rows: those of the block.
      renames: bool [rows], whose results are other names of what they read.
      equals: by such a row, an earlier one that makes the same.
      read: (start, tensor): row k reads `tensor[start[k] : start[k + 1]]`.

    Returns:
      same, at: [tensors] the tensor, itself where it has a value of its own, and the
      entry of `tensor` that it was read as, -1 for none.
    """
    starts = columns.result_start[rows.start : rows.stop + 1]
    chosen = slice(starts[0], starts[-1])
    row, result = columns.rows_of_results[chosen], columns.results[chosen]
    place = np.arange(starts[0], starts[-1]) - columns.result_start[row]
    row = row - rows.start
    equal = np.full(len(renames), -1)
    equal[list(equals)] = list(equals.values())
    same = np.arange(len(columns.type_of))
    at = np.full(len(same), -1)
    is_read = renames[row] & (equal[row] < 0)
    at[result[is_read]] = read[0][row[is_read]] + place[is_read]
    same[result[is_read]] = read[1][at[result[is_read]]]
    is_equal = equal[row] >= 0
    same[result[is_equal]] = columns.results[
        starts[equal[row[is_equal]]] + place[is_equal]
    ]
    return same, at


def roots(name: np.ndarray) -> np.ndarray:
    """[n] what each is called in the end, where `name[k]` is another name of k."""
    while True:
        further = name[name]
        if (further == name).all():
            return name
        name = further
