"""What an update reads of an argument: that keeps no copy of it in memory.

A parameter that is gathered for the forward pass is read by the update, too, but in the
spec it lies in. So readers that no product waits for do not say how long a copy lasts.
"""

from __future__ import annotations

import numpy as np

from ..graph.build_graph import STRUCTURED
from ..graph.dependencies import leading_to, read_by
from ..graph.op_graph import OpGraph
from .strategies import is_heavy_operator
from .vertices import VertexColumns


def late_reads(graph: OpGraph, vertices: VertexColumns) -> np.ndarray:
    """Bool [reads]: of arguments that work reads, too, by what no work waits for.

    Work are products, and all that has bodies or passes a barrier.
    """
    reads = vertices.reads
    is_late = np.append(_is_late(graph), False)[vertices.row[reads.vertex]]
    is_argument = np.zeros(len(graph.tensors), bool)
    is_argument[[each.tensor for each in graph.inputs]] = True
    is_worked_on = np.zeros(len(graph.tensors), bool)
    is_worked_on[reads.tensor[~is_late]] = True
    return is_late & (is_argument & is_worked_on)[reads.tensor]


def _is_late(graph: OpGraph) -> np.ndarray:
    """Bool [rows]: operators of the outermost block that lead to no work."""
    columns = graph.columns
    is_work = columns.where(lambda op: is_heavy_operator(op) or op.kind in STRUCTURED)
    is_outermost = columns.block_of == 0
    rows = np.flatnonzero(is_outermost & is_work).tolist()
    work = [columns.operators[row] for row in rows]
    leading = leading_to(read_by(work), graph.blocks[0].operators)
    needed = [op.index for op in (*work, *leading)]
    return is_outermost & ~np.isin(columns.index, needed)
