"""What changes from one plan to another: by cost, by leaf, by operator, by collective.

Leaves go by path, operators and collectives by source line, so that the layers of a
deep model that change alike are one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite

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
from .plan_view import (
    CollectiveView,
    Decision,
    LeafView,
    OperatorView,
    PlanView,
    format_source,
    split_words,
)
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
    """What one source line does in two plans: words with their number, and the sums."""

    what: str
    source: str
    before: tuple[tuple[str, int], ...]
    after: tuple[tuple[str, int], ...]
    before_sum: float
    after_sum: float


@dataclass(frozen=True)
class PlanDiff:
    """What changes from the plan `before` to the plan `after`; prints as tables."""

    before: PlanView
    after: PlanView

    @cached_property
    def is_equal(self) -> bool:
        """Whether the plans are the same in all that they decide and predict."""
        same = self.before.decision == self.after.decision
        return same or (self.has_same_decisions and not any(self._figures(True)))

    @cached_property
    def has_same_decisions(self) -> bool:
        """Whether both run the same program, whatever it is predicted to take."""
        mine, other = self.before.decision, self.after.decision
        return decision_only(mine) == decision_only(other)

    @cached_property
    def leaves(self) -> tuple[ChangedLeaf, ...]:
        """The leaves that lie elsewhere, or are in one plan only."""
        paths = dict.fromkeys([*self._leaves[0], *self._leaves[1]])
        changed = (self._leaf(path) for path in paths)
        return tuple(each for each in changed if each is not None)

    @cached_property
    def operators(self) -> tuple[ChangedLine, ...]:
        """The lines whose products and convolutions split otherwise, dearest first."""
        return self._operator_lines(lambda op: op.is_heavy)

    @cached_property
    def light_operators(self) -> tuple[ChangedLine, ...]:
        """The lines whose other operators split otherwise, dearest first."""
        return self._operator_lines(lambda op: not op.is_heavy)

    @cached_property
    def collectives(self) -> tuple[ChangedLine, ...]:
        """The lines that send other collectives, those of the most bytes first."""
        latest = {_name(e): e.source for e in self.after.collectives if e.tensor}
        lines: dict[tuple[str, str], _Sides] = {}
        for side, view in enumerate((self.before, self.after)):
            for each in view.collectives:
                source = latest.get(_name(each), each.source) or each.source
                words = f"{each.plan.name} over {each.axes}"
                place = "", format_source(source) or each.tensor
                row = lines.setdefault(place, ([], []))
                row[side].append((words, each.count, float(each.bytes)))
        return _changed(lines)

    def _leaf(self, path: str) -> ChangedLeaf | None:
        sides = [by_path.get(path, []) for by_path in self._leaves]
        some = sides[1] or sides[0]
        specs = [", ".join(sorted(map(_home, side))) or _ABSENT for side in sides]
        before, after = (max((x.bytes for x in side), default=0) for side in sides)
        if specs[0] == specs[1] and before == after:
            return None
        role = next((leaf.role for leaf in some if leaf.role == "state"), some[0].role)
        shape = some[0].shape
        return ChangedLeaf(path, role, shape, (specs[0], specs[1]), before, after)

    @cached_property
    def _leaves(self) -> tuple[dict[str, list[LeafView]], dict[str, list[LeafView]]]:
        """By path, of both plans: one for each stage that has it."""
        found: tuple[dict[str, list[LeafView]], ...] = ({}, {})
        for view, by_path in zip((self.before, self.after), found, strict=True):
            for leaf in view.leaves:
                by_path.setdefault(leaf.path, []).append(leaf)
        return found[0], found[1]

    def _operator_lines(
        self, is_wanted: Callable[[OperatorView], bool]
    ) -> tuple[ChangedLine, ...]:
        latest = {(_name(op), op.plan.kind): op.line for op in self.after.operators}
        lines: dict[tuple[str, str], _Sides] = {}
        for side, view in enumerate((self.before, self.after)):
            for op in filter(is_wanted, view.operators):
                place = op.title, latest.get((_name(op), op.plan.kind), op.line)
                names = op.program.sharding.mesh.axis_names
                specs = op.plan.result_specs
                words = split_words(specs[0], names) if specs else ""
                row = lines.setdefault(place, ([], []))
                row[side].append((words, 1, op.seconds))
        return _changed(lines)

    def _figures(self, only_changed: bool) -> Iterator[tuple[str, str, str, str]]:
        """Each figure in words: its name, before, after and what it changes by."""
        mine, other = self.before.predicted, self.after.predicted
        states = self.before.state_bytes, self.after.state_bytes
        rows: list[tuple[str, float, float, Callable[[float], str]]] = [
            *((n, getattr(mine, f), getattr(other, f), w) for n, f, w in _FIGURES),
            ("  of it state", *states, format_bytes),
        ]
        for name, was, now, words in rows:
            if was != now or not only_changed:
                yield name, words(was), words(now), _change(was, now, words)
        gaps = mine.optimality_gap, other.optimality_gap
        if gaps[0] != gaps[1] and not only_changed:
            yield "gap", _share(gaps[0]), _share(gaps[1]), ""

    def print(self) -> None:
        """Print the difference, as wide as the terminal is."""
        show(self._printed())

    def __str__(self) -> str:
        return as_text(self._printed())

    def _printed(self) -> Iterator[RenderableType]:
        title = f"from one plan of {self.before.decision.function} to another"
        if self.before.decision.function != self.after.decision.function:
            title = (
                f"from a plan of {self.before.decision.function} to one of "
                f"{self.after.decision.function}"
            )
        yield Text(title, style="bold")
        if self.is_equal:
            yield Text("the plans are equal")
            return
        yield self._figure_table()
        if self.has_same_decisions:
            yield Text("\nboth split everything alike and run the same program")
            return
        yield from self._leaf_table()
        yield from _line_tables(
            "products and convolutions", self.operators, format_seconds
        )
        yield from _line_tables("collectives, a step", self.collectives, format_bytes)
        yield from self._rest()

    def _figure_table(self) -> RenderableType:
        grid = table("", ">before", ">after", ">change")
        words = (
            ("mesh", _meshes(self.before), _meshes(self.after)),
            ("form", self.before.form, self.after.form),
            ("cluster", self.before.decision.cluster, self.after.decision.cluster),
        )
        for name, was, now in words:
            if was != now:
                grid.add_row(name, Text(was), Text(now), "")
        for row in self._figures(False):
            grid.add_row(*row)
        return grid

    def _leaf_table(self) -> Iterator[RenderableType]:
        if not self.leaves:
            return
        groups = sorted(
            group_leaves(self.leaves), key=lambda g: -abs(g.bytes - _before(g.leaves))
        )
        grid = table("leaf", ">leaves", "shape", "before", "after", ">bytes a device")
        for group in groups[:_MOST_ROWS]:
            also = f" and in {', '.join(group.mirrors)}" if group.mirrors else ""
            was = _before(group.leaves)
            grid.add_row(
                Text(f"{group.path}{also}"),
                str(len(group.leaves)),
                Text(str(list(group.first.shape))),
                Text(group.first.spec[0]),
                Text(group.first.spec[1]),
                f"{format_bytes(was)} -> {format_bytes(group.bytes)}",
            )
        yield section("leaves that lie elsewhere", _shortened(grid, len(groups)))

    def _rest(self) -> Iterator[RenderableType]:
        """Elementwise operators and the like, which are many, in one line."""
        number = sum(map(_number_changed, self.light_operators))
        if self.light_operators:
            was = sum(each.before_sum for each in self.light_operators)
            now = sum(each.after_sum for each in self.light_operators)
            yield Text(
                f"\nother operators: {number} on {len(self.light_operators)} lines "
                f"differ; these lines take {format_seconds(was)} -> "
                f"{format_seconds(now)}"
            )


def diff_plans(before: Decision, after: Decision) -> PlanDiff:
    """What changes from one plan to the other."""
    return PlanDiff(PlanView(before), PlanView(after))


_Sides = tuple[list[tuple[str, int, float]], list[tuple[str, int, float]]]


def _name(each: OperatorView | CollectiveView) -> str:
    """What both plans call an operator, or the tensor of a collective."""
    own = each.plan.name if isinstance(each, OperatorView) else each.tensor
    return f"{each.program.name} {own}"


def _home(leaf: LeafView) -> str:
    stage = "" if leaf.stage is None else f"stage {leaf.stage} "
    return f"{stage}{leaf.spec_text}"


def _meshes(view: PlanView) -> str:
    return " | ".join(map(str, view.meshes))


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


def _share(value: float) -> str:
    return f"{value:.3%}" if isfinite(value) else "no bound"


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


def _before(leaves: Iterable[ChangedLeaf]) -> int:
    return sum(leaf.before_bytes for leaf in leaves)


def _changed(lines: Mapping[tuple[str, str], _Sides]) -> tuple[ChangedLine, ...]:
    """The lines on which the two sides differ, those that change most first."""
    found = []
    for (what, source), sides in lines.items():
        counts: list[Counter[str]] = [Counter(), Counter()]
        for side, count in zip(sides, counts, strict=True):
            for words, times, _ in side:
                count[words] += times
        before, after = (tuple(sorted(count.items())) for count in counts)
        sums = [sum(amount for _, _, amount in side) for side in sides]
        if before != after or (not what and sums[0] != sums[1]):
            found.append(ChangedLine(what, source, before, after, *sums))
    found.sort(key=lambda line: -abs(line.after_sum - line.before_sum))
    return tuple(found)


def _number_changed(line: ChangedLine) -> int:
    """How many operators of a line are not as before, or not there before."""
    before, after = Counter(dict(line.before)), Counter(dict(line.after))
    return max((before - after).total(), (after - before).total())


def _line_tables(
    title: str, lines: tuple[ChangedLine, ...], words: Callable[[float], str]
) -> Iterator[RenderableType]:
    if not lines:
        return
    has_what = any(line.what for line in lines)
    columns = ("operator",) if has_what else ()
    grid = table(*columns, "line", "before", "after", ">change")
    for line in lines[:_MOST_ROWS]:
        cells = (Text(line.what),) if has_what else ()
        grid.add_row(
            *cells,
            Text(line.source),
            Text(_listed(line.before)),
            Text(_listed(line.after)),
            f"{words(line.before_sum)} -> {words(line.after_sum)}",
        )
    yield section(title, _shortened(grid, len(lines)))


def _listed(counted: tuple[tuple[str, int], ...]) -> str:
    parts = [f"{words} x{n}" if n > 1 else words for words, n in counted]
    return "\n".join(parts) or _ABSENT


def _shortened(grid: Table, number: int) -> RenderableType:
    rest = number - _MOST_ROWS
    return Group(grid, Text(f"and {rest} more", style="dim")) if rest > 0 else grid
