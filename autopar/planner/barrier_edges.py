"""What passes a barrier holds no less than what lies there, or passes a later one.

An argument is in memory throughout, and a copy that is kept to be read behind a barrier
until then. So a barrier that lets less pass than the argument holds, or than what is
read later, saves nothing, and what is gathered again costs time: no such choices are
offered. Rows of memory, which charge what is kept to the barrier that is read next
(`passed_values.py`), less what lies there already (`point_rows.py`), rely on that.
(On one axis an argument is whole or in equal parts, which other rows tell apart, and
more edges make a small problem harder.)
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from autopar.solver.choice_graph import EdgeType, TypedEdges

from ..graph.op_graph import OpGraph
from ..graph.ports import barriers_of
from .equal_rows import equal_rows
from .spec_choices import SpecChoices
from .vertices import VertexColumns

ROUNDING = 1e-9


def with_barrier_edges(
    edges: TypedEdges,
    graph: OpGraph,
    vertices: VertexColumns,
    access: np.ndarray,
    lasting: Collection[int],
    *,
    with_arguments: bool,
) -> TypedEdges:
    """The edges, and those between barriers that let the same argument pass.

    `access` [tensors] is the place of each tensor's writer among the writes, `lasting`
    are the arguments and their names. `with_arguments`: also between the last of these
    barriers and what the argument holds.
    """
    pairs = _in_turn(graph, vertices, lasting, with_arguments)
    if not len(pairs):
        return edges
    writes = vertices.writes
    before, behind = access[pairs].T
    sources, targets = writes.choices[before], writes.choices[behind]
    examples, number = equal_rows(sources, targets)
    types = [
        _no_less(vertices.choices[sources[row]], vertices.choices[targets[row]])
        for row in examples.tolist()
    ]
    return TypedEdges(
        [*edges.types, *types],
        np.append(edges.type_of, number + len(edges.types)),
        np.append(edges.first, writes.vertex[before]),
        np.append(edges.second, writes.vertex[behind]),
    )


def _in_turn(
    graph: OpGraph,
    vertices: VertexColumns,
    lasting: Collection[int],
    with_arguments: bool,
) -> np.ndarray:
    """[pairs, 2] names of one tensor behind two barriers, the one read sooner first.

    `with_arguments`: last of all is the tensor itself.
    """
    passed: dict[int, list[int]] = {}
    for block in graph.blocks:
        for _, (tensor, behind) in barriers_of(block):
            if tensor in lasting:
                passed.setdefault(tensor, []).append(behind)
    if any(len(each) > 1 for each in passed.values()):
        reads = vertices.reads
        last = np.full(len(graph.tensors), -1)
        np.maximum.at(last, reads.tensor, vertices.row[reads.vertex])
        for behind in passed.values():
            behind.sort(key=last.__getitem__)
    found = [
        pair
        for tensor, behind in passed.items()
        for pair in pairwise([*behind, tensor] if with_arguments else behind)
    ]
    return np.array(found, np.intp).reshape(-1, 2)


def _no_less(sooner: SpecChoices, later: SpecChoices) -> EdgeType:
    """Forbids that less is held by the one that is read sooner."""
    first, held_first = np.unique(sooner.fractions, return_inverse=True)
    second, held_second = np.unique(later.fractions, return_inverse=True)
    is_less = first[:, None] < second[None, :] * (1 - ROUNDING)
    matrix = np.where(is_less, np.inf, 0.0)
    return held_first.reshape(-1), held_second.reshape(-1), matrix
