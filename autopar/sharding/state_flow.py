"""What state is for: parameters are read by work on examples, the rest by the update.

Values flow through operators and into the bodies of loops and branches, but not around
a loop: what one iteration leaves for the next is told apart by what it does first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ..graph.build_graph import SCAN, SHARD_MAP, STRUCTURED, WHILE
from ..graph.op_graph import GraphColumns, Operator, OpGraph
from .ports import ports_of


@dataclass(frozen=True)
class StateFlow:
    """Tensors by what they are made of and what they are made for.

    `parameters` are arguments; the others are sets of tensors without a batch dim.
    `of_parameters` are made of parameters alone, for work on examples: casts, slices.
    `of_gradients` are made of sums over the batch, for no work on examples: gradients,
    and all that an update makes of them. `of_state` are made of no example.
    """

    parameters: frozenset[int]
    of_parameters: frozenset[int]
    of_gradients: frozenset[int]
    of_state: frozenset[int]


def state_flow(graph: OpGraph, per_example: Collection[int]) -> StateFlow:
    """How state flows in a step, given the tensors that have a batch dim."""
    flow = Flow(graph)
    state = [i.tensor for i in graph.inputs if i.role == "state"]
    from_examples, for_examples = flow.made_of(per_example), flow.makers_of(per_example)
    from_state = flow.made_of(state)
    parameters = frozenset(t for t in state if t in for_examples)
    from_parameters = flow.made_of(parameters)
    examples = frozenset(per_example)
    return StateFlow(
        parameters,
        frozenset((from_parameters & for_examples) - from_examples - examples),
        frozenset(from_examples - for_examples - examples),
        frozenset(from_state - from_examples - examples),
    )


class Flow:
    """What the tensors of a graph are made of, and made for."""

    def __init__(self, graph: OpGraph) -> None:
        self._graph, (self._sources, self._targets) = graph, _flow(graph)

    def made_of(self, tensors: Iterable[int]) -> set[int]:
        """The tensors, and all that is made of them."""
        return _reached(tensors, *self._following)

    def makers_of(
        self, tensors: Iterable[int], *, around_loops: bool = False
    ) -> set[int]:
        """The tensors, and all that they are made of; also in earlier iterations."""
        preceding = self._preceding_around if around_loops else self._preceding
        return _reached(tensors, *preceding)

    @cached_property
    def _following(self) -> tuple[list[int], list[int]]:
        return self._neighbours(self._sources, self._targets)

    @cached_property
    def _preceding(self) -> tuple[list[int], list[int]]:
        return self._neighbours(self._targets, self._sources)

    @cached_property
    def _preceding_around(self) -> tuple[list[int], list[int]]:
        around = np.array([*_around_loops(self._graph)], np.intp).reshape(-1, 2)
        return self._neighbours(
            np.append(self._targets, around[:, 1]),
            np.append(self._sources, around[:, 0]),
        )

    def _neighbours(
        self, tensors: np.ndarray, others: np.ndarray
    ) -> tuple[list[int], list[int]]:
        """Where those of each tensor begin, and the neighbours."""
        order = np.argsort(tensors, kind="stable")
        all_tensors = np.arange(len(self._graph.tensors) + 1)
        begin = np.searchsorted(tensors[order], all_tensors)
        return begin.tolist(), others[order].tolist()


def _around_loops(graph: OpGraph) -> Iterator[tuple[int, int]]:
    """What an iteration leaves, and what the next one has it as."""
    columns = graph.columns
    is_loop = columns.where(lambda op: op.kind in (SCAN, WHILE))
    for op in map(columns.operators.__getitem__, np.flatnonzero(is_loop).tolist()):
        body = graph.blocks[op.bodies[-1]]
        is_scan = op.kind == SCAN
        first = op.params["num_consts" if is_scan else "body_nconsts"]
        count = op.params["num_carry"] if is_scan else len(body.outputs)
        carried = body.inputs[first : first + count]
        for left, next_one in zip(body.outputs, carried, strict=False):
            if isinstance(left, int):
                yield left, next_one


def _reached(
    starts: Iterable[int], begin: Sequence[int], neighbours: Sequence[int]
) -> set[int]:
    found = set(starts)
    left = list(found)
    while left:
        tensor = left.pop()
        for each in neighbours[begin[tensor] : begin[tensor + 1]]:
            if each not in found:
                found.add(each)
                left.append(each)
    return found


def _flow(graph: OpGraph) -> tuple[np.ndarray, np.ndarray]:
    """Each tensor and one that is made of it, as two columns in executed order."""
    columns = graph.columns
    ports = [
        (k, *pair)
        for k in np.flatnonzero(columns.where(_is_by_ports)).tolist()
        for pair in _port_flow(graph, columns.operators[k])
    ]
    rows = _flow_of_rows(columns)
    if ports:
        rows = np.concatenate([rows, np.array(ports, np.intp).T], axis=1)
        rows = rows[:, np.argsort(rows[0], kind="stable")]
    return rows[1], rows[2]


@lru_cache(maxsize=4)
def _flow_of_rows(columns: GraphColumns) -> np.ndarray:
    """(row, what it reads, what it makes of that) [3, n] of all that have no ports."""
    row = columns.rows_of_results
    counts = np.diff(columns.operand_start)[row]
    before = np.cumsum(counts) - counts
    place = np.arange(counts.sum()) + np.repeat(
        columns.operand_start[row] - before, counts
    )
    source, target = columns.operands[place], np.repeat(columns.results, counts)
    row = np.repeat(row, counts)
    kept = (source >= 0) & ~columns.where(_is_by_ports)[row]
    return np.stack([row[kept], source[kept], target[kept]])


def _is_by_ports(op: Operator) -> bool:
    return op.kind in STRUCTURED and op.kind != SHARD_MAP


def _port_flow(graph: OpGraph, op: Operator) -> Iterator[tuple[int, int]]:
    for port in ports_of(graph, op):
        for source, _, site in port.reads:
            for target, _ in port.writes:
                if site[0] == "operand" or target in op.results:
                    yield source, target
