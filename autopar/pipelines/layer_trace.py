"""The program of a microbatch of a layer, traced from the graph of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ..graph.op_graph import Constant, Operand
from ..microbatches.microbatch_runners import MicrobatchRunner
from ..microbatches.microbatches import MicrobatchSplit
from ..sharding.spec import SUM
from .piece_graphs import run_piece
from .stage_pieces import Piece, TracedPiece
from .stage_programs import PipelineBuilder
from .stage_trace import COUNTER, graph_of


def trace_layer(
    builder: PipelineBuilder, piece: Piece, split: MicrobatchSplit
) -> TracedPiece:
    """The program of a microbatch of a piece, whose graph is of the whole batch."""
    names = (*piece.taken, COUNTER)

    def task(*values: Any) -> list[Any]:
        given = dict(zip(names, values, strict=True))
        graph = builder.parts.microbatch
        runner = MicrobatchRunner(graph, split, {}, given[COUNTER])

        def value_of(name: str, operand: Operand) -> Any:
            if isinstance(operand, Constant):
                return operand.value
            reduction = builder.parts.sums.get(name)
            if reduction is None:
                return runner.values[operand]
            return runner.read(operand, reduction)

        return run_piece(piece, runner, given, value_of)

    task.__name__ = f"{piece.kind}_{piece.stage}"
    counter = jax.ShapeDtypeStruct((), jnp.uint32)
    structs = (*_structs(builder, piece, split), counter)
    ties = (*piece.ties(builder.slots), None)
    part = graph_of(task, structs, names, list(piece.outputs), ties)
    part = builder.with_roles(part, split.num_microbatches)
    return TracedPiece(part, structs, names, ties)


def _structs(
    builder: PipelineBuilder, piece: Piece, split: MicrobatchSplit
) -> Iterator[jax.ShapeDtypeStruct]:
    """What the program takes: of what is cut, the part of one microbatch."""
    for operand in piece.taken.values():
        kind = builder.parts.microbatch.type_of(operand)
        shape = list(kind.shape)
        state = split.state[operand] if isinstance(operand, int) else SUM
        if state >= 0:
            shape[state] //= split.num_microbatches
        yield jax.ShapeDtypeStruct(tuple(shape), kind.dtype)
