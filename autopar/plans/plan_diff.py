"""What changes from one plan to another: by cost, by leaf, by operator, by collective.

Leaves go by path, operators and collectives by source line, so that the layers of a
deep model that change alike are one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .explain import (
    as_text,
    format_bytes,
    format_seconds,
    is_rounding,
    section,
    show,
    table,
)
from .leaf_groups import group_leaves
from .plan import Prediction
from .plan_view import Decision, LeafView, PlanView, split_words
from .staged_plan import StagedPlan

_MOST_ROWS = 20  # of a table; what is left out is counted
_ABSENT = "none"


@dataclass(frozen=True)
class ChangedLeaf:
    """A leaf as it lies in two plans; `spec` has both, "none" where it is not there."""

    path: str
    role: str
    shape: tuple[int, ...]
    spec: tuple[str, str]
    before_bytes: int
    bytes: int


@dataclass(frozen=True)
class ChangedLine:
    """What one source line does before and after: in words with their number, in all.

    `what` is a primitive, or "" where these are collectives.
    """

    what: str
    source: str
    counts: tuple[Counter[str], Counter[str]]
    sums: tuple[float, float]

    @property
    def number(self) -> int:
        """How many operators are not as before, or not there before."""
        before, after = self.counts
        return max((before - after).total(), (after - before).total())


@dataclass(frozen=True)
class PlanDiff:
    """What changes from the plan `before` to the plan `after`; prints as tables."""

    before: PlanView
    after: PlanView

    @cached_property
    def is_equal(self) -> bool:
        """Whether the plans are the same in all that they decide and predict."""
        if self.before.decision == self.after.decision:
            return True
        is_as_dear = all(was == now for _, was, now, _ in self._figures)
        return is_as_dear and self.has_same_decisions

    @cached_property
    def has_same_decisions(self) -> bool:
        """Whether both run the same program, whatever it is predicted to take."""
        mine, other = self.before.decision, self.after.decision
        return decision_only(mine) == decision_only(other)

    @cached_property
    def leaves(self) -> tuple[ChangedLeaf, ...]:
        """The leaves that lie elsewhere, or are in one plan only."""
        sides: tuple[dict[str, list[LeafView]], ...] = ({}, {})
        for view, by_path in zip((self.before, self.after), sides, strict=True):
            for leaf in view.leaves:
                by_path.setdefault(leaf.path, []).append(leaf)
        found = []
        for path in dict.fromkeys([*sides[0], *sides[1]]):
            own = [by_path.get(path, []) for by_path in sides]
            before, after = (", ".join(sorted(map(_home, e))) or _ABSENT for e in own)
            held = [max((leaf.bytes for leaf in each), default=0) for each in own]
            some = max(own[1] or own[0], key=lambda leaf: leaf.role == "state")
            if before != after or held[0] != held[1]:
                spec = before, after
                found.append(ChangedLeaf(path, some.role, some.shape, spec, *held))
        return tuple(found)

    @cached_property
    def operators(self) -> tuple[ChangedLine, ...]:
        """The lines whose products and convolutions split otherwise, dearest first."""
        return _changed(*(_operators(v, True) for v in (self.before, self.after)))

    @cached_property
    def light_operators(self) -> tuple[ChangedLine, ...]:
        """The lines whose other operators split otherwise, dearest first."""
        return _changed(*(_operators(v, False) for v in (self.before, self.after)))

    @cached_property
    def collectives(self) -> tuple[ChangedLine, ...]:
        """The lines that send other collectives, those of the most bytes first."""
        return _changed(*map(_collectives, (self.before, self.after)))

    @property
    def _figures(self) -> list[tuple[str, float, float, Callable[[float], str]]]:
        """Name, before, after, and how they are told."""
        mine, other = self.before.predicted, self.after.predicted
        states = self.before.state_bytes, self.after.state_bytes
        rows = [(n, getattr(mine, f), getattr(other, f), w) for n, f, w in _FIGURES]
        return [*rows, ("  of it state", *states, format_bytes)]

    def print(self) -> None:
        """Print the difference, as wide as the terminal is."""
        show(self._printed())

    def __str__(self) -> str:
        return as_text(self._printed())

    def _printed(self) -> Iterator[RenderableType]:
        names = self.before.decision.function, self.after.decision.function
        title = f"from a plan of {names[0]} to one of {names[1]}"
        if names[0] == names[1]:
            title = f"from one plan of {names[0]} to another"
        yield Text(title, style="bold")
        if self.is_equal:
            yield Text("the plans are equal")
            return
        yield self._figure_table()
        if self.has_same_decisions:
            yield Text("\nboth split everything alike and run the same program")
            return
        if self.leaves:
            yield section("leaves that lie elsewhere", self._leaf_table())
        if self.operators:
            rows = _line_table(self.operators, format_seconds)
            yield section("products and convolutions", rows)
        if self.collectives:
            rows = _line_table(self.collectives, format_bytes)
            yield section("collectives, a step", rows)
        if light := self.light_operators:
            was, now = map(sum, zip(*(each.sums for each in light), strict=True))
            yield Text(
                f"\nother operators: {sum(each.number for each in light)} on "
                f"{len(light)} lines differ; these lines take {format_seconds(was)} -> "
                f"{format_seconds(now)}"
            )

    def _figure_table(self) -> RenderableType:
        grid = table("", ">before", ">after", ">change")
        words = (
            (
                "mesh",
                *(" | ".join(map(str, v.meshes)) for v in (self.before, self.after)),
            ),
            ("form", self.before.form, self.after.form),
            ("cluster", self.before.decision.cluster, self.after.decision.cluster),
        )
        for name, was, now in words:
            if was != now:
                grid.add_row(name, Text(was), Text(now), "")
        for name, was, now, figure in self._figures:
            grid.add_row(name, figure(was), figure(now), _change(was, now, figure))
        gaps = self.before.predicted.optimality_gap, self.after.predicted.optimality_gap
        if gaps[0] != gaps[1]:
            shares = (f"{g:.3%}" if isfinite(g) else "no bound" for g in gaps)
            grid.add_row("gap", *shares, "")
        return grid

    def _leaf_table(self) -> RenderableType:
        rows = [
            (sum(leaf.before_bytes for leaf in group.leaves), group)
            for group in group_leaves(self.leaves)
        ]
        rows.sort(key=lambda row: -abs(row[1].bytes - row[0]))
        grid = table("leaf", ">leaves", "shape", "before", "after", ">bytes a device")
        for was, group in rows[:_MOST_ROWS]:
            also = f" and in {', '.join(group.mirrors)}" if group.mirrors else ""
            grid.add_row(
                Text(f"{group.path}{also}"),
                str(len(group.leaves)),
                Text(str(list(group.first.shape))),
                *map(Text, group.first.spec),
                f"{format_bytes(was)} -> {format_bytes(group.bytes)}",
            )
        return _shortened(grid, len(rows))


def diff_plans(before: Decision, after: Decision) -> PlanDiff:
    """What changes from one plan to the other."""
    return PlanDiff(PlanView(before), PlanView(after))


def _home(leaf: LeafView) -> str:
    stage = "" if leaf.stage is None else f"stage {leaf.stage} "
    return f"{stage}{leaf.spec_text}"


def decision_only(decision: Decision) -> Decision:
    """The plan without what it costs, and without names of files and lines.

    Plans that are equal so run the same program, whatever they were predicted to take.
    """
    nothing = Prediction(0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, 0.0)
    if isinstance(decision, StagedPlan):
        return replace(
            decision,
            function="",
            cluster="",
            predicted=nothing,
            peak_bytes=(),
            programs=tuple(
                replace(each, sharding=decision_only(each.sharding))
                for each in decision.programs
            ),
        )
    return replace(
        decision,
        function="",
        cluster="",
        predicted=nothing,
        collectives=(),
        operators=tuple(
            replace(op, source="", flops=0.0, seconds=0.0) for op in decision.operators
        ),
    )


_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("step", "step_seconds", format_seconds),
    ("  compute", "compute_seconds", format_seconds),
    ("  collectives", "collective_seconds", format_seconds),
    ("collectives send", "collective_bytes", format_bytes),
    ("peak memory", "peak_bytes", format_bytes),
)


def _change(was: float, now: float, words: Callable[[float], str]) -> str:
    """`+1.2 ms, +3.4%`, or nothing if nothing changes."""
    if not (isfinite(was) and isfinite(now)) or is_rounding(was, now):
        return ""
    sign = "+" if now > was else "-"
    part = f", {100 * (now - was) / was:+.1f}%" if was else ""
    return f"{sign}{words(abs(now - was))}{part}"


class _Entry(NamedTuple):
    """An operator or collective: what both plans call it, and what it does."""

    name: str
    what: str
    source: str
    words: str
    times: int
    amount: float


def _operators(view: PlanView, is_heavy: bool) -> Iterator[_Entry]:
    for op in view.operators:
        if op.is_heavy == is_heavy:
            names, specs = op.program.sharding.mesh.axis_names, op.plan.result_specs
            words = split_words(specs[0], names) if specs else ""
            name = f"{op.program.name} {op.plan.name}"
            yield _Entry(name, op.title, op.line, words, 1, op.seconds)


def _collectives(view: PlanView) -> Iterator[_Entry]:
    for each in view.collectives:
        name = f"{each.program.name} {each.tensor or each.line}"
        words = f"{each.plan.name} over {each.axes}"
        yield _Entry(name, "", each.line, words, each.count, each.bytes)


def _changed(
    before: Iterable[_Entry], after: Iterable[_Entry]
) -> tuple[ChangedLine, ...]:
    """The lines on which the two sides differ, those that change most first."""
    sides = [*before], [*after]
    latest = {each.name: each.source for each in sides[1]}
    counts: dict[tuple[str, str], tuple[Counter[str], Counter[str]]] = {}
    sums: dict[tuple[str, str], list[float]] = {}
    for side, entries in enumerate(sides):
        for each in entries:
            line = each.what, latest.get(each.name, each.source)
            counts.setdefault(line, (Counter(), Counter()))[side][each.words] += (
                each.times
            )
            sums.setdefault(line, [0.0, 0.0])[side] += each.amount
    found = [
        ChangedLine(*line, counts[line], (was, now))
        for line, (was, now) in sums.items()
        if counts[line][0] != counts[line][1] or (not line[0] and was != now)
    ]
    return tuple(sorted(found, key=lambda line: -abs(line.sums[1] - line.sums[0])))


def _line_table(
    lines: tuple[ChangedLine, ...], words: Callable[[float], str]
) -> RenderableType:
    columns = ("operator",) if lines[0].what else ()
    grid = table(*columns, "line", "before", "after", ">change")
    for line in lines[:_MOST_ROWS]:
        cells = [line.what] if line.what else []
        cells += [line.source, *map(_listed, line.counts)]
        grid.add_row(*map(Text, cells), " -> ".join(map(words, line.sums)))
    return _shortened(grid, len(lines))


def _listed(counted: Counter[str]) -> str:
    parts = [
        f"{words} x{n}" if n > 1 else words for words, n in sorted(counted.items())
    ]
    return "\n".join(parts) or _ABSENT


def _shortened(grid: Table, number: int) -> RenderableType:
    rest = number - _MOST_ROWS
    return Group(grid, Text(f"and {rest} more", style="dim")) if rest > 0 else grid
