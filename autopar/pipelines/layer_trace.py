"""The program of a microbatch of a layer, traced from the graph of the whole batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..graph.op_graph import Constant
from ..lowering.blocks import as_array
from ..microbatches.microbatch_runners import MicrobatchRunner
from ..microbatches.microbatches import MicrobatchSplit
from ..sharding.spec import SUM
from .stage_pieces import Piece, TracedPiece
from .stage_programs import PipelineBuilder
from .stage_trace import COUNTER, graph_of


def trace_layer(
    builder: PipelineBuilder, piece: Piece, split: MicrobatchSplit
) -> TracedPiece:
    """The program of a microbatch of a piece, whose graph is of the whole batch."""
    graph = builder.parts.microbatch
    names = (*piece.inputs, *piece.added, COUNTER)

    def struct(operand: int | Constant) -> jax.ShapeDtypeStruct:
        kind = (
            operand.type
            if isinstance(operand, Constant)
            else graph.tensors[operand].type
        )
        shape, state = list(kind.shape), SUM
        if isinstance(operand, int):
            state = split.state[operand]
        if state >= 0:
            shape[state] //= split.num_microbatches
        return jax.ShapeDtypeStruct(tuple(shape), kind.dtype)

    def task(*values: Any) -> list[Any]:
        given = dict(zip(names, values, strict=True))
        runner = MicrobatchRunner(graph, split, {}, given[COUNTER])
        runner.values.update({t: given[name] for name, t in piece.inputs.items()})
        runner.run_operators(piece.operators)
        found = []
        for name, operand in piece.outputs.items():
            if isinstance(operand, Constant):
                value = as_array(operand.value)
            elif name in builder.parts.sums:
                value = runner.read(operand, SUM)
            else:
                value = as_array(runner.values[operand])
            found.append(given[name] + value if name in piece.added else value)
        return found

    task.__name__ = f"{piece.kind}_{piece.stage}"
    operands = [*piece.inputs.values(), *(piece.outputs[n] for n in piece.added)]
    structs = (*map(struct, operands), jax.ShapeDtypeStruct((), jnp.uint32))
    outputs = list(piece.outputs)
    ties = tuple(
        outputs.index(name)
        if name in piece.outputs
        and (name in piece.added or builder.slots[name].kind == "state")
        else None
        for name in names
    )
    part = graph_of(task, structs, names, outputs, ties)
    part = builder.with_roles(part, split.num_microbatches)
    return TracedPiece(part, structs, names, ties)
