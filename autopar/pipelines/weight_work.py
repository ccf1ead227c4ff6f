"""What of a layer's backward work no other layer waits for: what zero bubble fills its
wait with, and what that work is handed meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..graph.dependencies import leading_to, read_by
from ..graph.op_graph import Operator
from .stage_pieces import Piece


def weight_operators(pieces: Iterable[Piece], stage: int) -> frozenset[int]:
    """Operators of a stage's backward that lead to nothing another stage reads.

    None of a stage that no other waits for, which keeps its backward whole.
    """
    backward: Sequence[Operator] = ()
    awaited = set[int]()
    for piece in pieces:
        if piece.stage != stage:
            awaited.update(piece.inputs.values())
        elif piece.kind == "backward":
            backward = piece.operators
    awaited.intersection_update(t for op in backward for t in op.results)
    if not awaited:
        return frozenset()
    waited_for = {op.index for op in leading_to(awaited, backward)}
    return frozenset(op.index for op in backward if op.index not in waited_for)


def handed_tensors(
    operators: Iterable[Operator], weight: Collection[int], kept: Collection[int]
) -> frozenset[int]:
    """What weight work reads of a stage's other work, besides what is kept anyway."""
    every = list(operators)
    read = read_by(op for op in every if op.index in weight)
    made = {t for op in every if op.index not in weight for t in op.results}
    return frozenset(made.intersection(read).difference(kept))
