"""What XLA does again in every kernel that reads it, though it is in memory as well.

`InstructionFusion::ComputeGloballyUnfusible`: an operator that has at most one large
operand (`EffectivelyAtMostUnary`), or reads no more elements than it makes, is done
inside whoever can do so, also where another reader needs it in memory. Of all others
either every reader does them, or none.
"""

from __future__ import annotations

import numpy as np

from ..graph.op_graph import GraphColumns, TensorType
from .names import roots


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
    pairs = np.sort(row * len(sizes) + tensor)
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
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
    single = (np.diff(columns.operand_start) == 1) & (np.diff(columns.result_start) > 0)
    rows = np.flatnonzero(renames & single)
    read = columns.operands[columns.operand_start[rows]]
    made = columns.results[columns.result_start[rows]]
    name = np.arange(len(found))
    name[made[read >= 0]] = read[read >= 0]
    return found[roots(name)]
