"""Collects the vertices of a sharding problem, those of operators all at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..graph.op_graph import GraphInput, Operand, OpGraph
from ..graph.ports import Site
from .spec_choices import SpecChoices
from .vertices import NO_SITE, OPERAND, OUTPUT, Accesses, Pattern, VertexColumns

_SITES = {"operand": OPERAND, "output": OUTPUT}
_NONE = (NO_SITE, 0, 0)


class VertexBuilder:
    """Patterns, and vertices with their tensors.

    Vertices lie in the order of `place`: -1 for what comes before every operator, an
    operator's row, or their number for what comes after; relays are added at the end.
    """

    def __init__(self, graph: OpGraph) -> None:
        self.graph, self.columns = graph, graph.columns
        self.patterns: list[Pattern] = []
        self.choices: list[SpecChoices] = []
        self._number: dict[int, int] = {}
        self._written: list[tuple[int, ...]] = []  # choices by pattern
        self._read: list[tuple[int, ...]] = []
        self._place: list[int] = []
        self._pattern: list[int] = []
        self._names: dict[int, str] = {}
        self._writes: list[tuple[int, int]] = []
        self._reads: list[tuple[int, ...]] = []

    def add_pattern(self, pattern: Pattern) -> int:
        """The number of a new pattern."""
        self.patterns.append(pattern)
        self._written.append(tuple(map(self._number_of, pattern.writes)))
        self._read.append(tuple(map(self._number_of, pattern.reads)))
        return len(self.patterns) - 1

    def _number_of(self, choices: SpecChoices) -> int:
        number = self._number.setdefault(id(choices), len(self.choices))
        if number == len(self.choices):
            self.choices.append(choices)
        return number

    def add(
        self,
        place: int,
        pattern: int,
        writes: Iterable[int],
        reads: Iterable[tuple[int, Site | None]],
        name: str = "",
    ) -> None:
        """One vertex; a port has a `name` of its own."""
        vertex = len(self._place)
        self._place.append(place)
        self._pattern.append(pattern)
        self._writes.extend([(vertex, tensor) for tensor in writes])
        for tensor, site in reads:
            kind = _NONE if site is None else (_SITES[site[0]], *site[1:])
            self._reads.append((vertex, tensor, *kind))
        if name:
            self._names[vertex] = name

    def add_homes(
        self,
        patterns: Sequence[int],
        inputs: Sequence[GraphInput],
        outputs: Sequence[Operand],
    ) -> None:
        """The homes of arguments; that of state reads its next value, an output."""
        first = len(self._place)
        self._place += [-1] * len(patterns)
        self._pattern += patterns
        self._writes += [(k, each.tensor) for k, each in enumerate(inputs, first)]
        for vertex, each in enumerate(inputs, first):
            after = None if each.output is None else outputs[each.output]
            if isinstance(after, int) and each.output is not None:
                self._reads.append((vertex, after, OUTPUT, 0, each.output))

    def build(self, rows: np.ndarray, pattern: np.ndarray) -> VertexColumns:
        """What was added, and the operators `rows` [n] with their `pattern` [n]."""
        columns, count = self.columns, len(self._place)
        place = np.concatenate([np.array(self._place, np.intp), rows])
        order = np.argsort(place, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        vertex_of_row = np.full(len(columns.operators), -1)
        vertex_of_row[rows] = rank[count:]
        row = np.concatenate([np.full(count, -1), rows])[order]
        self.pattern = np.concatenate([np.array(self._pattern, np.intp), pattern])[
            order
        ]
        return VertexColumns(
            self.graph,
            tuple(self.patterns),
            self.pattern,
            row,
            self._write_accesses(rank, vertex_of_row),
            self._read_accesses(rank, vertex_of_row),
            tuple(self.choices),
            {int(rank[vertex]): name for vertex, name in self._names.items()},
        )

    def _write_accesses(self, rank: np.ndarray, vertex_of_row: np.ndarray) -> Accesses:
        columns = self.columns
        own = np.array(self._writes, np.intp).reshape(-1, 2)
        vertex = vertex_of_row[columns.rows_of_results]
        kept = vertex >= 0
        vertex = np.concatenate([rank[own[:, 0]], vertex[kept]])
        tensor = np.concatenate([own[:, 1], columns.results[kept]])
        site = np.broadcast_to(np.array(_NONE), (len(vertex), 3))
        return self._accesses(vertex, tensor, site, self._written)

    def _read_accesses(self, rank: np.ndarray, vertex_of_row: np.ndarray) -> Accesses:
        columns = self.columns
        own = np.array(self._reads, np.intp).reshape(-1, 5)
        row = columns.rows_of_operands
        position = np.arange(len(row)) - columns.operand_start[row]
        kept = (vertex_of_row[row] >= 0) & (columns.operands >= 0)
        row, position = row[kept], position[kept]
        site = np.stack([np.full(len(row), OPERAND), columns.index[row], position], 1)
        return self._accesses(
            np.concatenate([rank[own[:, 0]], vertex_of_row[row]]),
            np.concatenate([own[:, 1], columns.operands[kept]]),
            np.concatenate([own[:, 2:], site]),
            self._read,
        )

    def _accesses(
        self,
        vertex: np.ndarray,
        tensor: np.ndarray,
        site: np.ndarray,
        of_patterns: Sequence[tuple[int, ...]],
    ) -> Accesses:
        order = np.argsort(vertex, kind="stable")
        vertex, tensor, site = vertex[order], tensor[order], site[order]
        counts = np.bincount(vertex, minlength=len(self.pattern))
        start = np.concatenate([[0], np.cumsum(counts)])
        nth = np.arange(len(vertex)) - start[vertex]
        choices = _nth_choices(of_patterns, self.pattern[vertex], nth)
        return Accesses(start, vertex, tensor, choices, site)

    def with_relays(
        self, vertices: VertexColumns, tensors: np.ndarray, pattern: np.ndarray
    ) -> VertexColumns:
        """A relay more for each of `tensors` [n], which reads and writes it."""
        first = len(vertices)
        self.pattern = np.concatenate([vertices.pattern, pattern])
        own = np.arange(first, first + len(tensors))
        site = np.broadcast_to(np.array(_NONE), (len(own), 3))

        def extended(old: Accesses, of_patterns: Sequence[tuple[int, ...]]) -> Accesses:
            choices = _nth_choices(of_patterns, pattern, np.zeros(len(own), np.intp))
            return Accesses(
                np.concatenate([old.start, len(old.vertex) + 1 + np.arange(len(own))]),
                np.concatenate([old.vertex, own]),
                np.concatenate([old.tensor, tensors]),
                np.concatenate([old.choices, choices]),
                np.concatenate([old.site, site]),
            )

        return VertexColumns(
            self.graph,
            tuple(self.patterns),
            self.pattern,
            np.concatenate([vertices.row, np.full(len(own), -1)]),
            extended(vertices.writes, self._written),
            extended(vertices.reads, self._read),
            tuple(self.choices),
            vertices.port_names,
        )


def _nth_choices(
    of_patterns: Sequence[tuple[int, ...]], pattern: np.ndarray, nth: np.ndarray
) -> np.ndarray:
    """[n] the choices of each pattern's `nth` access."""
    flat = np.array([number for each in of_patterns for number in each], np.intp)
    begin = np.cumsum([0, *map(len, of_patterns)])
    return flat[begin[pattern] + nth]
