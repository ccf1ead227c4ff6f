"""Trace a step again with its scans over layers cut by length into chains of scans.

Each chunk of such a scan is then one operator that a pipeline can put on a stage, and
each piece of a stacked leaf an argument of its own, with its own home.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from ..frontend.dead_code import dead_code_eliminated
from ..frontend.roles import Roles
from ..frontend.tracing import TracedFunction
from ..graph.op_graph import OpGraph
from ..lowering.blocks import as_array
from ..sharding.pins import spellings
from .piece_flow import Cut, PieceFlow
from .piece_runner import Lengths, PieceRunner

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class PiecedStep:
    """A step whose stacked leaves come in pieces along dim 0.

    `traced` has an input and an output for every piece, in the order of the leaves;
    `input_lengths` and `output_lengths` say how each leaf of the original step is cut,
    None if it is whole.
    """

    traced: TracedFunction
    roles: Roles
    input_lengths: tuple[Lengths | None, ...]
    output_lengths: tuple[Lengths | None, ...]

    @classmethod
    def uncut(cls, traced: TracedFunction, roles: Roles) -> PiecedStep:
        """A step with no scan to cut: every leaf is whole."""
        inputs, outputs = len(traced.input_paths), len(traced.output_paths)
        return cls(traced, roles, (None,) * inputs, (None,) * outputs)

    def by_piece(self, by_path: Mapping[str, T], whole: TracedFunction) -> dict[str, T]:
        """What is said of leaves of `whole`, the original step, by path of a piece."""
        known = {name for path in whole.input_paths for name in spellings(path)}
        found = {key: value for key, value in by_path.items() if key not in known}
        for path, pieces in self.pieces_by_path(whole).items():
            for name in spellings(path):
                if name in by_path:
                    found.update(dict.fromkeys(pieces, by_path[name]))
        return found

    def pieces_by_path(self, whole: TracedFunction) -> dict[str, tuple[str, ...]]:
        """The paths of the pieces of each leaf of `whole`, the original step."""
        pieces = iter(self.traced.input_paths)
        counts = (1 if each is None else len(each) for each in self.input_lengths)
        return {
            path: tuple(itertools.islice(pieces, count))
            for path, count in zip(whole.input_paths, counts, strict=True)
        }


def cut_scans(
    traced: TracedFunction,
    graph: OpGraph,
    roles: Roles,
    lengths: Mapping[int, Lengths],
    fixed: Sequence[int],
) -> PiecedStep:
    """The step with some scans cut into chunks of `lengths`, by operator of `graph`.

    Scans that read what a cut scan stacked (its backward pass) are cut alike. `fixed`
    are input tensors that stay whole: the batch. Values are those of the step itself;
    carries that only add up from zero do so in each chunk and are summed.
    """
    flow = PieceFlow(graph, lengths, frozenset(fixed))
    flow.run()
    leaf_cut = [flow.cut.get(i.tensor) for i in graph.inputs]
    num_arguments = len(traced.input_paths)
    rows = [
        _rows(cut, graph.tensors[i.tensor].type.shape)
        for cut, i in zip(leaf_cut, graph.inputs, strict=True)
    ][:num_arguments]
    outputs = _output_cuts(graph, flow)

    def step(*leaves: Any) -> list[Any]:
        runner, given = PieceRunner(graph, flow), iter(leaves)
        for graph_input, cut in zip(graph.inputs, leaf_cut, strict=True):
            if cut is None:
                runner.values[graph_input.tensor] = next(given)
            else:
                pieces = tuple(next(given) for _ in cut.lengths)
                runner.pieces[graph_input.tensor] = pieces
        runner.run_outermost()
        results: list[Any] = []
        for operand, cut in zip(graph.outputs, outputs, strict=True):
            if cut is None:
                results.append(as_array(runner.value(operand)))
            else:
                results.extend(runner.cut_pieces(operand, cut))
        return results

    types = [
        kind
        for var, lengths in zip(traced.jaxpr.jaxpr.invars, rows, strict=True)
        for kind in _piece_types(var.aval, lengths)
    ]
    result_rows = [
        _rows(cut, var.aval.shape)
        for cut, var in zip(outputs, traced.jaxpr.jaxpr.outvars, strict=True)
    ]
    constants = [as_array(value) for value in traced.jaxpr.consts]
    closed = jax.make_jaxpr(lambda *leaves: step(*leaves, *constants))(*types)
    return PiecedStep(
        TracedFunction(
            traced.name,
            dead_code_eliminated(closed),
            jax.tree.structure(((0,) * len(types), {})),
            jax.tree.structure((0,) * len(closed.out_avals)),
            _piece_paths(traced.input_paths, rows),
            _piece_paths(traced.output_paths, result_rows),
        ),
        _pieced_roles(roles, rows, result_rows),
        tuple(rows),
        tuple(result_rows),
    )


def _rows(cut: Cut | None, shape: Sequence[int]) -> Lengths | None:
    """The size of dim 0 of each piece; a layer may have several rows."""
    if cut is None:
        return None
    return tuple(shape[0] // cut.num_layers * length for length in cut.lengths)


def _piece_types(aval: Any, rows: Lengths | None) -> list[jax.ShapeDtypeStruct]:
    if rows is None:
        weak = aval.weak_type
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)]
    return [jax.ShapeDtypeStruct((n, *aval.shape[1:]), aval.dtype) for n in rows]


def _piece_paths(
    paths: Sequence[str], rows: Sequence[Lengths | None]
) -> tuple[str, ...]:
    """`params['w'][0:6]` for the piece of rows 0 to 5."""
    found: list[str] = []
    for path, lengths in zip(paths, rows, strict=True):
        if lengths is None:
            found.append(path)
        else:
            borders = Cut(0, lengths).borders()
            found.extend(f"{path}[{first}:{end}]" for first, end in borders)
    return tuple(found)


def _output_cuts(graph: OpGraph, flow: PieceFlow) -> list[Cut | None]:
    """The cut of every result: that of the leaf it is the next value of, or its own."""
    cuts = [flow.cut_of(operand) for operand in graph.outputs]
    cuts = [cut if cut is not None and cut.dim == 0 else None for cut in cuts]
    for graph_input in graph.inputs:
        if graph_input.output is not None:
            cuts[graph_input.output] = flow.cut_of(graph_input.tensor)
    return cuts


def _pieced_roles(
    roles: Roles,
    inputs: Sequence[Lengths | None],
    outputs: Sequence[Lengths | None],
) -> Roles:
    first, position = [], 0
    for rows in outputs:
        first.append(position)
        position += len(rows) if rows else 1
    found, next_output = [], []
    for rows, role, output in zip(inputs, roles.roles, roles.next_output, strict=True):
        for piece in range(len(rows) if rows else 1):
            found.append(role)
            next_output.append(None if output is None else first[output] + piece)
    return Roles(tuple(found), tuple(next_output), roles.notes)
