"""What other plans hold where one plan is fullest, as rows for the solver.

At a point of a program is live, of every plan of the problem,

  a value  as its vertex makes it: bytes by choice
  a copy   from its first reader to its last, where it is not just cut out of what it is
           made of: bytes by the choices of both ends of the edge
  an argument  always, as its home has it

What is fused, and in which order kernels run, is taken from the plan that the point is
of. A constant makes the row exact for that plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from autopar.solver.budget_constraints import BudgetRow

from ..costs.memory import MemoryProfile, Value
from ..sharding.spec import is_cut_out
from .sharding_problem import ShardingProblem
from .spec_choices import SpecChoices
from .vertices import NO_SITE, OPERAND, OUTPUT

STRETCHES = 8  # of the outermost block, each of which may have its fullest point told
NEARLY_FULL = 0.8  # of the peak, what a point must hold to be told
_Held = tuple[SpecChoices, int, float]  # by specs, of so many bytes, times a factor


class MemoryRows:
    """The rows of plans of one problem."""

    def __init__(self, problem: ShardingProblem) -> None:
        self.problem, self.columns = problem, problem.columns
        self._held: dict[tuple[_Held, ...], np.ndarray] = {}
        self._copied: dict[tuple[object, ...], np.ndarray] = {}
        reads, graph = self.columns.reads, problem.graph
        self._tensor = reads.tensor[problem.edge_reads]  # [edges]
        self._block = graph.columns.block_of_tensors[self._tensor]

    def of(
        self, profile: MemoryProfile, choices: Sequence[int]
    ) -> tuple[BudgetRow, ...]:
        """The rows of a plan's fullest points; the fullest comes first."""
        spans = self._spans(profile)
        rows = []
        for position in fullest(profile.blocks[0].bytes, STRETCHES):
            path = tuple(profile.path_to(position))
            rows.append(self._row(profile, path, spans, choices))
        return tuple(rows)

    def _row(
        self,
        profile: MemoryProfile,
        path: Sequence[tuple[int, int]],
        spans: np.ndarray,
        choices: Sequence[int],
    ) -> BudgetRow:
        factor = profile.factor
        held: dict[int, list[_Held]] = defaultdict(list)
        is_live = np.zeros(len(self._tensor), bool)
        for block, position in path:
            memory = profile.blocks[block]
            own = self._block == block
            is_live |= own & (spans[0] <= position) & (spans[1] >= position)
            for value in memory.live(position):
                if not value.is_copy and value.tensor in self.problem.write_of:
                    vertex, key = self._of_value(value)
                    held[vertex].append((*key, factor))
        for vertex, key in self._homes:
            held[vertex].append((*key, 1.0))
        edges = np.flatnonzero(is_live)
        nodes = np.array(sorted(held), np.intp)
        row = BudgetRow(
            nodes,
            [self._sum(tuple(held[vertex])) for vertex in nodes.tolist()],
            edges,
            [self._copy_bytes(edge, factor) for edge in edges.tolist()],
        )
        used = row.used(self.problem.choice_graph, choices)
        return replace(row, constant=profile.bytes_at(path[0][1]) - used)

    def _of_value(self, value: Value) -> tuple[int, tuple[SpecChoices, int]]:
        """Who makes a value, and which bytes that is by its choices."""
        vertex, access = self.problem.writer(value.tensor)
        return vertex, (access.choices, self._bytes[value.tensor])

    @cached_property
    def _bytes(self) -> list[int]:
        return [tensor.type.bytes for tensor in self.problem.graph.tensors]

    @cached_property
    def _homes(self) -> list[tuple[int, tuple[SpecChoices, int]]]:
        """The homes of arguments on the device, and of results that are no state."""
        columns, reads = self.columns, self.columns.reads
        is_result = np.array([each.kind == "result" for each in columns.patterns])
        found = []
        for k in np.flatnonzero(is_result[columns.pattern[reads.vertex]]).tolist():
            key = columns.choices[reads.choices[k]], self._bytes[reads.tensor[k]]
            found.append((int(reads.vertex[k]), key))
        for each in self.problem.graph.inputs:
            if each.memory == "device":
                vertex, access = self.problem.writer(each.tensor)
                found.append((vertex, (access.choices, self._bytes[each.tensor])))
        return found

    def _sum(self, parts: tuple[_Held, ...]) -> np.ndarray:
        """[choices] the bytes of all that a vertex holds at a point."""
        if parts not in self._held:
            own = [each.fractions * (size * factor) for each, size, factor in parts]
            self._held[parts] = np.sum(own, axis=0)
        return self._held[parts]

    def _copy_bytes(self, edge: int, factor: float) -> np.ndarray:
        """[source specs, target specs] the bytes of a copy for the reader."""
        problem, columns = self.problem, self.columns
        write, read = problem.edge_writes[edge], problem.edge_reads[edge]
        sources = columns.choices[columns.writes.choices[write]]
        targets = columns.choices[columns.reads.choices[read]]
        size = self._bytes[self._tensor[edge]]
        key = sources, targets, size, factor
        if key not in self._copied:
            held = np.zeros(len(targets.distinct))
            held[targets.classes] = targets.fractions * (size * factor)
            is_made = [
                [not is_cut_out(source, target) for target in targets.distinct]
                for source in sources.distinct
            ]
            self._copied[key] = np.where(is_made, held, 0.0)
        return self._copied[key]

    def _spans(self, profile: MemoryProfile) -> np.ndarray:
        """[2, edges] the first and last position where a copy would be live."""
        graph, reads = self.problem.graph, self.columns.reads
        none, rows = np.iinfo(np.intp).max, len(graph.operators())
        first, last = np.full(rows, none), np.full(rows, -1)
        row_of = {op.index: row for row, op in enumerate(graph.operators())}
        ends = np.zeros(len(graph.blocks), np.intp)
        for block, memory in profile.blocks.items():
            ends[block] = len(memory.operators) - 1
            for index, (begin, end) in memory.runs.items():
                first[row_of[index]], last[row_of[index]] = begin, end
        kind, place, _ = reads.site.T
        at = np.array([row_of.get(each, 0) for each in place.tolist()], np.intp)
        is_operand = kind == OPERAND
        begin = np.where(is_operand, first[at], none)
        end = np.where(is_operand, last[at], -1)
        is_output = kind == OUTPUT
        block_end = ends[np.where(is_output, place, 0)]
        begin = np.where(is_output, block_end, begin)
        end = np.where(is_output, block_end, end)
        relayed = np.full((2, len(graph.tensors)), none)
        relayed[1] = -1
        is_own = kind != NO_SITE
        np.minimum.at(relayed[0], reads.tensor[is_own], begin[is_own])
        np.maximum.at(relayed[1], reads.tensor[is_own], end[is_own])
        # Who reads it in a spec last may read the copy that who read it first made.
        begin = relayed[0][reads.tensor]
        end = np.where(is_own, end, relayed[1][reads.tensor])
        tied = self._tied_reads
        begin[tied], end[tied] = none, -1
        return np.stack([begin, end])[:, self.problem.edge_reads]

    @cached_property
    def _tied_reads(self) -> np.ndarray:
        """Bool [reads] of homes: the next value of state lies where the old one did."""
        homes = {vertex for vertex, _ in self._homes}
        return np.isin(self.columns.reads.vertex, sorted(homes))


def fullest(used: np.ndarray, stretches: int) -> list[int]:
    """The fullest position of each stretch that is nearly full, fullest first.

    `used` [positions] are the bytes.
    """
    count, peak = len(used), used.max(initial=0)
    borders = np.linspace(0, count, min(stretches, count) + 1).astype(int)
    found = [
        int(low + used[low:high].argmax())
        for low, high in zip(borders[:-1], borders[1:], strict=True)
    ]
    near = [each for each in found if used[each] >= NEARLY_FULL * peak]
    return sorted(near, key=lambda each: -used[each])
