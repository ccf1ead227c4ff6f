"""What passes several barriers holds as much before the earlier ones.

A copy of an argument that is kept to be read behind a barrier is in memory until then.
So a barrier that lets less of it pass to readers that come sooner saves nothing, and
what they gather again costs time: no such choices are offered. Rows of memory, which
charge what is kept to the barrier that is read next (`passed_values.py`), rely on that.
"""

from __future__ import annotations

from collections.abc import Collection

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
) -> TypedEdges:
    """The edges, and those between barriers that let the same argument pass.

    `access` [tensors] is the place of each tensor's writer among the writes, `lasting`
    are the arguments and their names.
    """
    pairs = _in_turn(graph, vertices, lasting)
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
    graph: OpGraph, vertices: VertexColumns, lasting: Collection[int]
) -> np.ndarray:
    """[pairs, 2] names of one tensor behind two barriers, the one read sooner first."""
    passed: dict[int, list[int]] = {}
    for block in graph.blocks:
        for _, (tensor, behind) in barriers_of(block):
            if tensor in lasting:
                passed.setdefault(tensor, []).append(behind)
    passed = {tensor: each for tensor, each in passed.items() if len(each) > 1}
    if not passed:
        return np.zeros((0, 2), np.intp)
    reads = vertices.reads
    last = np.full(len(graph.tensors), -1)
    np.maximum.at(last, reads.tensor, vertices.row[reads.vertex])
    found: list[tuple[int, int]] = []
    for behind in passed.values():
        behind.sort(key=last.__getitem__)
        found += zip(behind[:-1], behind[1:], strict=True)
    return np.array(found, np.intp)


def _no_less(sooner: SpecChoices, later: SpecChoices) -> EdgeType:
    """Forbids that less is held by the one that is read sooner."""
    first, held_first = np.unique(sooner.fractions, return_inverse=True)
    second, held_second = np.unique(later.fractions, return_inverse=True)
    is_less = first[:, None] < second[None, :] * (1 - ROUNDING)
    matrix = np.where(is_less, np.inf, 0.0)
    return held_first.reshape(-1), held_second.reshape(-1), matrix
