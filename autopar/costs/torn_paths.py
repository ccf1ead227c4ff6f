"""What XLA does not do again in its readers, as it would also have to read it there.

`InstructionFusion::CanFuseOnAllPaths`: what is read in several kernels is done in each
of them only if all ways from it to its readers can be fused. So an activation that the
backward pass reads beside its gradient is kept, as a way through the loss is torn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..graph.op_graph import GraphColumns
from .names import roots


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
    pairs = np.sort(((reader * count + made) * 2 + is_reordered)[is_read])
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    reader, made = np.divmod(pairs // 2, max(count, 1))
    is_shared = np.bincount(made, minlength=count) > 1
    ends_here = ~is_fusable | (is_shared & ~may_repeat)
    is_asked = is_shared & asked
    if not is_asked.any():
        return is_asked
    # A single thing that a row reads and can do itself leads to it as to what it reads.
    alone = np.bincount(reader, minlength=count)[reader] == 1
    alone &= is_fusable[reader] & ~is_asked[reader] & ~ends_here[made]
    name = np.arange(count)
    name[reader[alone]] = made[alone]
    stop = int(reader[is_asked[made]].max()) + 1  # nothing later is asked for
    kept = np.flatnonzero(~alone & (reader < stop))
    reader, made, is_reordered = reader[kept], made[kept], pairs[kept] % 2 > 0
    ends = ends_here[made] | ~is_fusable[reader]
    own = is_asked[made] & ~is_reordered
    made = roots(name)[made]
    return _with_torn_ways(count, reader, made, ends, own)


def _with_torn_ways(
    count: int, reader: np.ndarray, made: np.ndarray, ends: np.ndarray, own: np.ndarray
) -> np.ndarray:
    """bool [count], those asked for to one of whose readers a way is torn.

    Way w is that from `made[w]` to `reader[w]`; it is torn there if `ends[w]`, and
    asked for if `own[w]`.
    """
    is_torn, pairs = np.zeros(count, bool), reader * count + made
    is_torn[made[own & np.isin(pairs, pairs[ends])]] = True  # on the way itself
    # Other ways lead through what is made later, and is read beside what is asked for.
    last = np.full(count, -1)
    np.maximum.at(last, reader, made)
    left = np.flatnonzero(own & ~is_torn[made] & (last[reader] > made))
    changes = np.zeros(count + 1, np.intp)
    np.add.at(changes, made[left] + 1, 1)
    np.add.at(changes, reader[left] + 1, -1)
    between = np.flatnonzero(np.cumsum(changes)[reader])
    ways = (each[between].tolist() for each in (reader, made, ends, own))
    rows, bits = np.unique(made[left]).tolist(), [0] * count
    for place, row in enumerate(rows):
        bits[row] = 1 << place
    found = _torn(bits, zip(*ways, strict=True))
    is_torn[[row for row in rows if bits[row] & found]] = True
    return is_torn


def _torn(bits: Sequence[int], ways: Iterable[tuple[int, int, bool, bool]]) -> int:
    """The bits of rows to one of whose readers a way is torn.

    Each way is (row, what it reads, whether it is torn there, whether `bits` are those
    of what it reads itself), by rows, all after what they read.
    """
    found, row, own = 0, -1, 0
    reached = list(bits)  # what leads to each row,
    torn = [0] * len(bits)  # and by a way that cannot be fused
    for reader, made, is_torn, is_asked in ways:
        if reader != row:
            if own:
                found |= own & torn[row]
            row, own = reader, 0
        leading = reached[made]
        reached[row] |= leading
        torn[row] |= torn[made] | leading if is_torn else torn[made]
        if is_asked:
            own |= bits[made]
    return found | (own & torn[row])
