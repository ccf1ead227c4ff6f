"""The graphs of stage programs before they are planned; of equal ones one is traced.

Two programs are equal if they do the same operators in the same order on values of the
same types, whatever their names. The second has the graph of the first under its own
names, which are those that tracing gives: of slots, scopes and source lines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ..graph.op_graph import (
    Constant,
    Operand,
    Operator,
    OpGraph,
    TensorType,
    params_key,
)
from ..lowering.blocks import as_array
from ..microbatches.microbatch_runners import WholeRunner
from .equal_programs import operand_key
from .stage_pieces import Piece, TracedPiece
from .stage_trace import graph_of

_Ties = tuple[int | None, ...]


@dataclass
class PieceGraphs:
    """Graphs of pieces of two functions; `known` are the pieces that were traced."""

    known: dict[Hashable, tuple[Piece, OpGraph]] = field(default_factory=dict)

    def of(self, piece: Piece, graph: OpGraph, ties: _Ties) -> TracedPiece:
        """The graph of a piece of `graph`, whose inputs and outputs are slots in order.

        `ties` are the outputs that inputs become, by position.
        """
        key = _key(piece, graph, ties)
        found = None
        if key in self.known:
            found = _renamed(*self.known[key], piece)
        if found is None:
            found = _traced(piece, graph, ties)
            if key is not None:
                self.known.setdefault(key, (piece, found))
        structs = (jax.ShapeDtypeStruct(t.shape, t.dtype) for t in _types(piece, graph))
        return TracedPiece(found, tuple(structs), (*piece.inputs, *piece.added), ties)


def _types(piece: Piece, graph: OpGraph) -> list[TensorType]:
    operands = [*piece.inputs.values(), *(piece.outputs[n] for n in piece.added)]
    return [
        o.type if isinstance(o, Constant) else graph.tensors[o].type for o in operands
    ]


def _traced(piece: Piece, graph: OpGraph, ties: _Ties) -> OpGraph:
    names = (*piece.inputs, *piece.added)
    types = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in _types(piece, graph)]

    def task(*values: Any) -> list[Any]:
        runner = WholeRunner(graph)
        given = dict(zip(names, values, strict=True))
        runner.values.update({t: given[n] for n, t in piece.inputs.items()})
        runner.run_operators(piece.operators)
        found = []
        for name, operand in piece.outputs.items():
            value = as_array(runner.value(operand))
            found.append(given[name] + value if name in piece.added else value)
        return found

    task.__name__ = f"{piece.kind}_{piece.stage}"
    return graph_of(task, types, names, list(piece.outputs), ties)


def _key(piece: Piece, graph: OpGraph, ties: _Ties) -> Hashable | None:
    """Equal for equal pieces; None where operators have bodies, which are traced."""
    number: dict[int, int] = {}

    def places(operands: Iterable[Operand]) -> tuple[Hashable, ...]:
        return tuple(
            number.setdefault(o, len(number)) if isinstance(o, int) else operand_key(o)
            for o in operands
        )

    if any(op.bodies for op in piece.operators):
        return None
    inputs = places(piece.inputs.values())
    types = tuple(_types(piece, graph))
    work = tuple(
        (
            *(op.kind, params_key(op.params), "transpose(" in op.name),
            *(places(op.operands), places(op.results), op.result_types),
        )
        for op in piece.operators
    )
    order = list(piece.outputs)
    added = tuple(order.index(name) for name in piece.added)
    return inputs, types, work, places(piece.outputs.values()), added, ties


def _renamed(first: Piece, known: OpGraph, piece: Piece) -> OpGraph | None:
    """The graph of a piece equal to `first`, from that of `first`; None if it cannot be
    told which of its names are which."""
    scopes = _mapping(map(_scope, first.operators), map(_scope, piece.operators))
    sources = _mapping(
        (op.source for op in first.operators), (op.source for op in piece.operators)
    )
    is_alike = len(known.inputs) == len(_slots(piece))
    if scopes is None or sources is None or not is_alike:
        return None
    names = {t: n for t, n in zip(known.blocks[0].inputs, _slots(piece), strict=True)}
    operators: list[Operator] = []
    ordinals: dict[str, int] = {}
    for op in known.blocks[0].operators:
        scope, source = scopes.get(_scope(op)), sources.get(op.source)
        is_ours = not op.source or not _scope(op)  # of what is added up
        if (scope is None or source is None) and not is_ours:
            return None
        scope = _scope(op) if scope is None else scope
        stem = f"{scope}/{op.kind}" if scope else op.kind
        ordinal = ordinals[stem] = ordinals.get(stem, -1) + 1
        name = f"{stem}.{ordinal}"
        many = len(op.results) > 1
        names.update(
            (t, f"{name}:{i}" if many else name) for i, t in enumerate(op.results)
        )
        source = op.source if source is None else source
        operators.append(replace(op, name=name, source=source))
    block = replace(known.blocks[0], operators=tuple(operators))
    return replace(
        known,
        name=f"{piece.kind}_{piece.stage}",
        tensors=tuple(replace(t, name=names[t.index]) for t in known.tensors),
        blocks=(block, *known.blocks[1:]),
        inputs=tuple(
            replace(each, path=path)
            for each, path in zip(known.inputs, _slots(piece), strict=True)
        ),
        output_paths=tuple(piece.outputs),
    )


def _slots(piece: Piece) -> Sequence[str]:
    return (*piece.inputs, *piece.added)


def _scope(op: Operator) -> str:
    return op.name.rpartition("/")[0]


def _mapping(first: Iterable[str], other: Iterable[str]) -> dict[str, str] | None:
    """What each of `first` is in `other`, or None if one is several."""
    found: dict[str, str] = {}
    for old, new in zip(first, other, strict=True):
        if found.setdefault(old, new) != new:
            return None
    return found
