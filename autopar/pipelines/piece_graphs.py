"""The graphs of stage programs before they are planned.

Most are parts of a graph that is there: its operators, under the names that tracing
would give. What owns blocks, has effects or returns literals is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax

from ..graph.build_graph import SHARD_MAP
from ..graph.dependencies import leading_to, tensors_of
from ..graph.op_graph import (
    Block,
    Constant,
    GraphInput,
    Operand,
    Operator,
    OpGraph,
    Tensor,
    TensorType,
)
from ..lowering.blocks import as_array
from ..microbatches.extremes import JOINS
from ..microbatches.microbatch_runners import RetracingRunner, WholeRunner
from ..sharding.spec import State
from .stage_pieces import Piece, TracedPiece
from .stage_trace import graph_of

_Ties = tuple[int | None, ...]


def graph_of_piece(piece: Piece, graph: OpGraph, ties: _Ties) -> TracedPiece:
    """The graph of a piece of `graph`, whose inputs and outputs are slots in order.

    `ties` are the outputs that inputs become, by position.
    """
    is_part = all(map(_is_kept, piece.operators)) and not any(
        isinstance(operand, Constant) for operand in piece.outputs.values()
    )
    found = (part_of if is_part else traced)(piece, graph, ties)
    return TracedPiece(found, _structs(piece, graph), tuple(piece.taken), ties)


def _is_kept(op: Operator) -> bool:
    """Whether tracing an operator again gives the same one."""
    is_own = op.eqn.primitive.name == op.kind  # not what a call became
    return is_own and not (op.bodies or op.eqn.effects or op.kind == SHARD_MAP)


def _structs(piece: Piece, graph: OpGraph) -> tuple[jax.ShapeDtypeStruct, ...]:
    types = map(graph.type_of, piece.taken.values())
    return tuple(jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in types)


def traced(piece: Piece, graph: OpGraph, ties: _Ties) -> OpGraph:
    """The graph of a piece of any operators."""
    names, structs = tuple(piece.taken), _structs(piece, graph)

    def task(*values: Any) -> list[Any]:
        runner = WholeRunner(graph)
        given = dict(zip(names, values, strict=True))
        return run_piece(piece, runner, given, lambda _, out: runner.value(out))

    task.__name__ = f"{piece.kind}_{piece.stage}"
    return graph_of(task, structs, names, list(piece.outputs), ties)


def run_piece(
    piece: Piece,
    runner: RetracingRunner,
    given: Mapping[str, Any],
    value_of: Callable[[str, Operand], Any],
) -> list[Any]:
    """The outputs of a piece, whose values by slot the runner has then."""
    runner.values.update({tensor: given[n] for n, tensor in piece.inputs.items()})
    runner.run_operators(piece.operators)
    found: list[Any] = []
    for name, operand in piece.outputs.items():
        value = as_array(value_of(name, operand))
        if name in piece.added:
            value = JOINS[piece.added[name]](given[name], value)
        found.append(value)
    return found


def part_of(piece: Piece, graph: OpGraph, ties: _Ties) -> OpGraph:
    """The same for a piece whose operators tracing gives back, and with its names."""
    part = _Part()
    given = {n: part.tensor(n, graph.type_of(o)) for n, o in piece.taken.items()}
    known = {tensor: given[name] for name, tensor in piece.inputs.items()}
    outputs = dict[str, int]()
    for op in leading_to(tensors_of(piece.outputs.values()), piece.operators):
        operands = [known[o] if isinstance(o, int) else o for o in op.operands]
        results = part.add(op, op.name.rpartition("/")[0], operands)
        known.update(zip(op.results, results, strict=True))
    for name, operand in piece.outputs.items():
        assert isinstance(operand, int)
        outputs[name] = known[operand]
        if name in piece.added:
            joining = _joining(graph.type_of(operand), piece.added[name])
            (outputs[name],) = part.add(joining, "", (given[name], known[operand]))
    block = Block(
        *(0, None, 1, 1.0, False, False, tuple(given.values())),
        tuple(outputs.values()),
        tuple(part.operators),
    )
    inputs = (
        GraphInput(tensor, name, "other" if tie is None else "state", tie)
        for (name, tensor), tie in zip(given.items(), ties, strict=True)
    )
    name = f"{piece.kind}_{piece.stage}"
    return OpGraph(name, tuple(part.tensors), (block,), tuple(inputs), tuple(outputs))


@dataclass
class _Part:
    """A graph of one block that grows operator by operator."""

    tensors: list[Tensor] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    ordinals: dict[str, int] = field(default_factory=dict)

    def tensor(self, name: str, kind: TensorType) -> int:
        self.tensors.append(Tensor(len(self.tensors), name, kind, 0))
        return len(self.tensors) - 1

    def add(
        self, op: Operator, scope: str, operands: Iterable[Operand]
    ) -> tuple[int, ...]:
        """The results of an operator that does the same on other operands."""
        stem = f"{scope}/{op.kind}" if scope else op.kind
        ordinal = self.ordinals[stem] = self.ordinals.get(stem, -1) + 1
        name, many = f"{stem}.{ordinal}", len(op.results) > 1
        results = tuple(
            self.tensor(f"{name}:{i}" if many else name, kind)
            for i, kind in enumerate(op.result_types)
        )
        index = len(self.operators)
        own = tuple(operands)
        self.operators.append(
            replace(op, index=index, name=name, operands=own, results=results, block=0)
        )
        return results


@lru_cache(maxsize=1024)
def _joining(kind: TensorType, reduction: State) -> Operator:
    """The sum or maximum of two arrays, as an operator."""
    struct = jax.ShapeDtypeStruct(kind.shape, kind.dtype)

    def task(before: Any, value: Any) -> list[Any]:
        return [JOINS[reduction](before, value)]

    graph = graph_of(task, (struct, struct), ("before", "value"), ("sum",))
    (op,) = graph.operators()
    return replace(op, source="")
