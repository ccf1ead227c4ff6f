"""The vertices of a sharding problem, as arrays of what is theirs and what they share.

A deep model has few distinct vertices: what those of a kind share (their choices, what
they cost and the specs that they write and read) is one `Pattern`; the tensors and
operators of each are arrays. A `Vertex` is made when it is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from autopar.solver.choice_graph import TypedNodes
from autopar.solver.made_when_read import MadeWhenRead

from ..graph.op_graph import OpGraph
from ..sharding.ports import Site
from ..sharding.spec import Spec
from .equal_rows import equal_rows
from .spec_choices import SpecChoices
from .strategies import Strategies

VertexKind = Literal["operator", "home", "port", "relay", "result"]
NO_SITE, OPERAND, OUTPUT = 0, 1, 2
SITES = {"operand": OPERAND, "output": OUTPUT}
SITE_NAMES: tuple[Literal["operand", "output"], ...] = ("operand", "operand", "output")


@dataclass(frozen=True, eq=False)
class Access:
    """A tensor as one vertex writes or reads it: its spec under each choice.

    `site` says which operand or block output a read is; None for writes and relays.
    """

    tensor: int
    choices: SpecChoices
    site: Site | None = None


@dataclass(frozen=True, eq=False)
class Vertex:
    """One decision: cost and bytes of each choice, and what it writes and reads."""

    kind: VertexKind
    name: str
    seconds: np.ndarray
    bytes: np.ndarray
    writes: tuple[Access, ...]
    reads: tuple[Access, ...]
    operator: int | None = None
    strategies: Strategies | None = None


@dataclass(frozen=True, eq=False)
class Pattern:
    """What equal vertices share; writes and reads in the order of their tensors."""

    kind: VertexKind
    seconds: np.ndarray
    bytes: np.ndarray
    writes: tuple[SpecChoices, ...]
    reads: tuple[SpecChoices, ...]
    strategies: Strategies | None = None


@dataclass(frozen=True, eq=False)
class Accesses:
    """What vertices write, or read: those of vertex v are `start[v]` to `start[v + 1]`.

    [accesses] each: the vertex, the tensor, and the place of its `SpecChoices` among
    `VertexColumns.choices`. Reads have a site: what it is (`OPERAND`, `OUTPUT`,
    `NO_SITE`), of which operator or block, and the position there.
    """

    start: np.ndarray
    vertex: np.ndarray
    tensor: np.ndarray
    choices: np.ndarray
    site: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray, num_vertices: int) -> Accesses:
        """From (vertex, tensor, choices), and the site of reads, by vertex."""
        start = np.searchsorted(rows[:, 0], np.arange(num_vertices + 1))
        vertex, tensor, choices = rows[:, :3].T.copy()
        return cls(start, vertex, tensor, choices, rows[:, 3:])

    def tensors(self) -> Iterator[list[int]]:
        """Those of each vertex."""
        tensor = self.tensor.tolist()
        return (tensor[begin:end] for begin, end in pairwise(self.start.tolist()))


@dataclass(frozen=True, eq=False)
class VertexColumns(MadeWhenRead[Vertex]):
    """All vertices of a problem.

    `pattern` [vertices] are places in `patterns`; `row` [vertices] is the operator's
    place in `graph.operators()`, -1 for other vertices. `port_names` are by vertex.
    """

    graph: OpGraph
    patterns: tuple[Pattern, ...]
    pattern: np.ndarray
    row: np.ndarray
    writes: Accesses
    reads: Accesses
    choices: tuple[SpecChoices, ...]
    port_names: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.pattern)

    def with_seconds(
        self, seconds: Sequence[np.ndarray], kind: np.ndarray
    ) -> VertexColumns:
        """The same vertices, with other seconds of their choices.

        Those of vertex v are `seconds[kind[v]]`.
        """
        examples, pattern = equal_rows(self.pattern, kind)
        patterns = [
            replace(self.patterns[own], seconds=seconds[number])
            for own, number in zip(
                *(self.pattern[examples].tolist(), kind[examples].tolist()), strict=True
            )
        ]
        return replace(self, patterns=tuple(patterns), pattern=pattern)

    @property
    def nodes(self) -> TypedNodes:
        """What they are in a choice graph."""
        types = [(each.seconds, each.bytes) for each in self.patterns]
        return TypedNodes(types, self.pattern, self.name)

    def item(self, index: int) -> Vertex:
        """The vertex at an index."""
        pattern = self.patterns[self.pattern[index]]
        row = int(self.row[index])
        return Vertex(
            pattern.kind,
            self.name(index),
            pattern.seconds,
            pattern.bytes,
            tuple(self._accesses(self.writes, index)),
            tuple(self._accesses(self.reads, index)),
            None if row < 0 else self.graph.operators()[row].index,
            pattern.strategies,
        )

    def _accesses(self, of: Accesses, vertex: int) -> Iterator[Access]:
        for at in range(of.start[vertex], of.start[vertex + 1]):
            site = None
            if of.site.size and of.site[at, 0] != NO_SITE:
                kind, place, position = of.site[at].tolist()
                site = SITE_NAMES[kind], place, position
            yield Access(int(of.tensor[at]), self.choices[of.choices[at]], site)

    def name(self, index: int) -> str:
        """What a vertex is called: its operator, argument, port, copy or result."""
        row = self.row[index]
        if row >= 0:
            return self.graph.operators()[row].name
        if index in self.port_names:
            return self.port_names[index]
        kind = self.patterns[self.pattern[index]].kind
        if kind == "result":
            position = self.reads.site[self.reads.start[index], 2]
            return self.graph.output_paths[position]
        tensor = self.graph.tensors[self.writes.tensor[self.writes.start[index]]].name
        return f"copy of {tensor}" if kind == "relay" else tensor

    @cached_property
    def specs_by_choice(self) -> tuple[np.ndarray, np.ndarray, tuple[Spec, ...]]:
        """The spec of each choice of each of `choices`, one after the other.

        Where those of each begin, all of them as numbers, and the specs by number.
        """
        numbers: dict[Spec, int] = {}
        parts = [
            np.array([numbers.setdefault(s, len(numbers)) for s in each.distinct])[
                each.classes
            ]
            for each in self.choices
        ]
        ends = np.cumsum([len(part) for part in parts], dtype=np.intp)
        starts = np.concatenate([np.zeros(1, np.intp), ends[:-1]])
        return starts, np.concatenate([*parts, np.zeros(0, np.intp)]), tuple(numbers)

    def chosen_specs(
        self, of: Accesses, choices: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """[accesses] the spec of each under a choice per vertex, by number."""
        starts, numbers, _ = self.specs_by_choice
        chosen = np.asarray(choices, np.intp)
        return numbers[starts[of.choices] + chosen[of.vertex]]

    def __str__(self) -> str:
        return f"{len(self)} vertices of {len(self.patterns)} patterns"
