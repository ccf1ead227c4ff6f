"""What of a layer's backward work no other layer waits for: what zero bubble fills its
wait with, and what that work is handed meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ..graph.op_graph import Operator
from ..microbatches.microbatch_flow import tensors_of
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
    found: set[int] = set()
    for op in reversed(backward):
        if awaited.isdisjoint(op.results):
            found.add(op.index)
        else:
            awaited.update(tensors_of(op.operands))
    return frozenset(found)


def handed_tensors(
    operators: Iterable[Operator], weight: Collection[int], kept: Collection[int]
) -> frozenset[int]:
    """What weight work reads of a stage's other work, besides what is kept anyway."""
    made, read = set[int](), set[int]()
    for op in operators:
        if op.index in weight:
            read.update(tensors_of(op.operands))
        else:
            made.update(op.results)
    return frozenset(read & made).difference(kept)
