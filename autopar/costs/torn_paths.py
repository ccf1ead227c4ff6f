"""What XLA does not do again in its readers, as it would also have to read it there.

`InstructionFusion::CanFuseOnAllPaths`: what is read in several kernels is done in each
of them only if all ways from it to its readers can be fused. So an activation that the
backward pass reads beside its gradient is kept, as a way through the loss is torn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph.op_graph import GraphColumns


def torn_rows(
    columns: GraphColumns,
    is_fusable: np.ndarray,
    may_repeat: np.ndarray,
    asked: np.ndarray,
    is_reordered: np.ndarray,
) -> np.ndarray:
    """bool [rows], those of `asked` to one of whose readers a way is torn.

    Args:
      columns: those of the graph.
      is_fusable: bool [rows], what can be done inside a reader at all, names included.
      may_repeat: bool [rows], what is done again for each of several readers.
      asked: bool [rows].
      is_reordered: bool [operands], what is read as a copy in another order of dims,
        which takes the place of the reader.
    """
    count = len(columns.operators)
    maker = np.full(len(columns.type_of) + 1, -1)
    maker[columns.results] = columns.rows_of_results
    reader, made = columns.rows_of_operands, maker[columns.operands]
    is_read = (made >= 0) & (columns.operands >= 0)
    pairs = (reader * count + made) * 2 + is_reordered
    pairs = np.unique(pairs[is_read])
    reader, made = np.divmod(pairs // 2, max(count, 1))
    is_shared = np.bincount(made, minlength=count) > 1
    starts = np.searchsorted(reader, np.arange(count + 1)).tolist()
    ends_here = ~is_fusable | (is_shared & ~may_repeat)
    rows = np.flatnonzero(is_shared & asked).tolist()
    bits = [0] * count
    for place, row in enumerate(rows):
        bits[row] = 1 << place
    ends = ends_here.tolist(), is_fusable.tolist()
    found = _torn(bits, starts, made.tolist(), (pairs % 2).tolist(), *ends)
    is_torn = np.zeros(count, bool)
    is_torn[[row for row in rows if bits[row] & found]] = True
    return is_torn


def _torn(
    bits: Sequence[int],
    starts: Sequence[int],
    made: Sequence[int],
    is_reordered: Sequence[int],
    ends_here: Sequence[bool],
    is_fusable: Sequence[bool],
) -> int:
    """The bits of rows to one of whose readers a way is torn.

    Row k reads the rows `made[starts[k] : starts[k + 1]]`, all before it, some of them
    in another order.
    """
    found = 0
    reached = list(bits)  # what leads to each row,
    torn = [0] * len(bits)  # and by a way that cannot be fused
    for row in range(len(bits)):
        leading, cut, own = bits[row], 0, 0
        for at in range(starts[row], starts[row + 1]):
            each = made[at]
            leading |= reached[each]
            cut |= torn[each]
            if ends_here[each] or not is_fusable[row]:
                cut |= reached[each]
            if not is_reordered[at]:
                own |= bits[each]
        reached[row], torn[row] = leading, cut
        found |= own & cut
    return found
