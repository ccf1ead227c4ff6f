"""What XLA does again in every kernel that reads it, though it is in memory as well.

`InstructionFusion::ComputeGloballyUnfusible`: an operator that has at most one large
operand (`EffectivelyAtMostUnary`), or reads no more elements than it makes, is done
inside whoever can do so, also where another reader needs it in memory. Of all others
either every reader does them, or none.
"""

from __future__ import annotations

import numpy as np

from ..graph.op_graph import GraphColumns, TensorType


def repeated_rows(columns: GraphColumns, is_filled: np.ndarray) -> np.ndarray:
    """bool [rows], those that kernels may do again beside the one in memory.

    `is_filled` [tensors]: broadcasts and iotas, which are made in whoever reads them.
    """
    count = len(columns.operators)
    if not count:
        return np.zeros(0, bool)
    sizes = np.array([kind.size for kind in columns.types], np.int64)[columns.type_of]
    ranks = np.array(list(map(_true_rank, columns.types)), np.intp)[columns.type_of]
    has_results = np.diff(columns.result_start) > 0
    first = np.zeros(count, np.intp)
    first[has_results] = columns.results[columns.result_start[:-1][has_results]]
    tensor, row = columns.operands, columns.rows_of_operands
    is_read = tensor >= 0
    tensor, row = tensor[is_read], row[is_read]
    is_large = ~is_filled[tensor] & (ranks[tensor] >= ranks[first[row]])
    num_large = np.bincount(row[is_large], minlength=count)
    pairs = np.unique(row * len(sizes) + tensor)
    row, tensor = np.divmod(pairs, len(sizes))
    read = np.bincount(row, weights=sizes[tensor], minlength=count)
    return has_results & ((num_large <= 1) | (read <= sizes[first]))


def _true_rank(kind: TensorType) -> int:
    """How many dims are larger than one."""
    return sum(size > 1 for size in kind.shape)


def filled_tensors(columns: GraphColumns, renames: np.ndarray) -> np.ndarray:
    """bool [tensors], those that broadcasts and iotas make, under whatever name.

    `renames` [rows]: the results are other names of what is read.
    """
    found = np.zeros(len(columns.type_of), bool)
    fills = columns.where(lambda op: op.kind in ("broadcast_in_dim", "iota"))
    found[columns.results[(fills & ~renames)[columns.rows_of_results]]] = True
    for row in np.flatnonzero(renames).tolist():
        op = columns.operators[row]
        if len(op.operands) == 1 and isinstance(op.operands[0], int):
            found[op.results[0]] |= found[op.operands[0]]
    return found
