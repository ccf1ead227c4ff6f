"""Prints why one tensor or operator is as it is, and what else it could be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from typing import Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..plans.explain import (
    format_bytes,
    format_seconds,
    is_rounding,
    section,
    table,
)
from ..plans.plan import OperatorPlan, Prediction, ShardingPlan, TensorPlan
from ..plans.plan_view import (
    Decision,
    PlanView,
    ProgramView,
    format_source,
    grouped,
    split_words,
)
from ..plans.staged_plan import StagedPlan
from ..sharding.pins import spellings
from ..sharding.spec import Spec, format_spec, local_shape
from .reasons import PlanSource, Reasons, nearest_names

_MOST_READERS = 6
_MOST_PRODUCTS, _MOST_COLLECTIVES = 1, 2  # choices that are weighed
_PLACED = (
    "The operators of this plan were placed one by one, on one device each: there is "
    "no other split of them to price."
)
_WITHOUT_STEP = (
    "A plan file does not hold the step, so readers, pins and the runner-up are not "
    "known here: name the step, `autopar explain plan.json --target MODULE:NAME`, or "
    "ask the plan that step.plan(...) returns."
)


def choice_parts(
    noun: Literal["tensor", "op"],
    name: str,
    decision: Decision,
    source: PlanSource | None,
) -> Iterator[RenderableType]:
    """What is printed of a tensor, by argument path or maker, or of an operator.

    Raises:
      ValueError: the plan has none of that name; names those that are like it.
    """
    asked = _Asked(decision, source)
    if noun == "tensor":
        for found in asked.find(noun, name, lambda plan: plan.tensors):
            tensor = found.plan.tensors[found.index]
            yield from _tensor(found, tensor, asked.reasons("tensor", found))
    else:
        for found in asked.find(noun, name, lambda plan: plan.operators):
            op = found.plan.operators[found.index]
            yield from _operator(found, op, asked.reasons("operator", found))
    yield from asked.notes()


@dataclass(frozen=True)
class WeighedChoice:
    """A choice of a plan and its runner-up; `after` is None where there is none."""

    title: str
    program: str
    chosen: str
    runner_up: str
    holders: tuple[str, ...]
    before: Prediction
    after: Prediction | None


def largest_choices(
    decision: Decision,
    source: PlanSource | None,
) -> Iterator[WeighedChoice]:
    """The dearest product and collectives, with what was next best.

    Those of one line that are alike count as one. Nothing where the step is not at
    hand. Each is solved for anew, so they are few.
    """
    asked = _Asked(decision, source)
    view = PlanView(decision)
    heavy = [op for op in view.operators if op.is_heavy]
    works = grouped(heavy, lambda op: (op.program.name, op.line, op.title, op.splits))
    works.sort(key=lambda same: -sum(op.seconds for op in same))
    for op in (same[0] for same in works[:_MOST_PRODUCTS]):
        found = _Found(view, op.program, op.index)
        chosen = _factors(op.plan, op.program.sharding)
        yield from asked.weighed("operator", found, f"{op.title} at {op.line}", chosen)
    sent = [each for each in view.collectives if each.tensor]
    sums = grouped(sent, lambda e: (e.program.name, e.line, e.plan.name, e.axes))
    sums.sort(key=lambda same: -sum(each.bytes for each in same))
    for each in (same[0] for same in sums[:_MOST_COLLECTIVES]):
        tensors = each.program.sharding.tensors
        places = [i for i, t in enumerate(tensors) if t.name == each.tensor]
        for index in places[:1]:
            tensor, names = tensors[index], each.program.sharding.mesh.axis_names
            title = f"{tensor.name}, which takes {each.plan.name} over {each.axes}"
            chosen = format_spec(tensor.spec, len(tensor.shape), names)
            found = _Found(view, each.program, index)
            yield from asked.weighed("tensor", found, title, chosen)


@dataclass(frozen=True)
class _Found:
    """Where a name is: its place in a program of a plan."""

    view: PlanView
    program: ProgramView
    index: int

    @property
    def plan(self) -> ShardingPlan:
        """That of the program."""
        return self.program.sharding

    @property
    def where(self) -> str:
        """The stage program, if there are several."""
        return f", {self.program.name}" if self.program.name else ""

    @property
    def noun(self) -> str:
        """What is planned again for a runner-up."""
        return "plan" if self.view.stages is None else "stage"

    def prices(self, plan: Decision) -> Prediction:
        """Of a plan of the step, what is told: in a pipeline, of the stage asked."""
        if self.program.stage is None or isinstance(plan, ShardingPlan):
            return plan.predicted
        return plan.predicted_on(self.program.stage)


@dataclass(frozen=True)
class _Asked:
    """A plan, and its step if that is at hand."""

    decision: Decision
    source: PlanSource | None

    def find(
        self,
        noun: str,
        name: str,
        named: Callable[[ShardingPlan], Sequence[TensorPlan | OperatorPlan]],
    ) -> list[_Found]:
        """Where a name is."""
        view = PlanView(self.decision)
        found, known = [], []
        for program in view.programs:
            names = [each.name for each in named(program.sharding)]
            known += names
            found += [
                _Found(view, program, index)
                for index, each in enumerate(names)
                if name in spellings(each)
            ]
        if not found:
            like = nearest_names(name, list(dict.fromkeys(known)))
            known_words = ", ".join(like) or "(nothing is like it)"
            raise ValueError(
                f"`{noun}` must be one of the {len(known)} names in the plan of "
                f"{self.decision.function!r}, but got {name!r}; like it are: "
                f"{known_words}."
            )
        return found

    def reasons(
        self, noun: Literal["tensor", "operator"], found: _Found
    ) -> Reasons | None:
        """Why it is so, if the step is at hand and can be planned again."""
        if self.source is None or self._is_placed:
            return None
        is_tensor = noun == "tensor"
        asked = self.source
        ask = asked.tensor_reasons if is_tensor else asked.operator_reasons
        return ask(self.decision, found.index, found.program.index)

    def weighed(
        self,
        noun: Literal["tensor", "operator"],
        found: _Found,
        title: str,
        chosen: str,
    ) -> Iterator[WeighedChoice]:
        """The choice beside its runner-up, if it can be planned again."""
        reasons = self.reasons(noun, found)
        for each in () if reasons is None else reasons.alternatives[:1]:
            yield WeighedChoice(
                *(title, found.program.name, chosen, each.choice or each.refusal),
                () if reasons is None else reasons.holders,
                found.prices(self.decision),
                None if each.plan is None else found.prices(each.plan),
            )

    @property
    def _is_placed(self) -> bool:
        """Whether its operators were placed one by one, and not by a solver."""
        decision = self.decision
        return isinstance(decision, StagedPlan) and decision.is_placed

    def notes(self) -> Iterator[RenderableType]:
        """Why there is no more to tell, if there is not."""
        if self.source is None:
            yield Text(f"\n{_WITHOUT_STEP}", style="dim")
        elif self._is_placed:
            yield Text(f"\n{_PLACED}", style="dim")


def _tensor(
    found: _Found, tensor: TensorPlan, reasons: Reasons | None
) -> Iterator[RenderableType]:
    plan, where = found.plan, found.where
    names, rank = plan.mesh.axis_names, len(tensor.shape)
    title = f"{tensor.name}, {tensor.dtype}{list(tensor.shape)}{where}"
    yield Text(title, style="bold")
    grid = Table.grid(padding=(0, 2))
    local = list(local_shape(tensor.shape, tensor.spec, plan.mesh.axis_sizes))
    lies = f"{format_spec(tensor.spec, rank, names)} on {plan.mesh}, {local} a device"
    grid.add_row("is made as", Text(lies))
    maker = next((op for op in plan.operators if _makes(op, tensor.name)), None)
    argument = next((i for i in plan.inputs if i.path == tensor.name), None)
    if argument is not None:
        role = f"an argument ({argument.role}), {format_bytes(argument.bytes)} a device"
        grid.add_row("comes from", Text(role))
    elif maker is not None:
        grid.add_row("comes from", Text(_maker_text(maker, plan)))
    if tensor.block:
        times = plan.trip_counts[tensor.block]
        grid.add_row("inside", f"block {tensor.block}, run {times} times a step")
    for copy in tensor.conversions:
        pair = (format_spec(s, rank, names) for s in (copy.source, copy.target))
        grid.add_row("is copied", Text(" -> ".join(pair)))
    for text in _collectives(found.program, tensor.name):
        grid.add_row("which sends", Text(text))
    if reasons is not None:
        _add_reasons(grid, reasons, found.noun)
    yield grid
    if reasons is not None:
        yield from _alternatives(found, reasons, "spec")


def _operator(
    found: _Found, op: OperatorPlan, reasons: Reasons | None
) -> Iterator[RenderableType]:
    names = found.plan.mesh.axis_names
    yield Text(f"{op.name}, {op.kind}{found.where}", style="bold")
    grid = Table.grid(padding=(0, 2))
    grid.add_row("at", Text(format_source(op.source)))
    factors = _factors(op, found.plan)
    grid.add_row("splits", Text(factors or "nothing: its operands and results decide"))
    grid.add_row("reads", Text(_listed(op.operand_specs, names)))
    grid.add_row("makes", Text(_listed(op.result_specs, names)))
    takes = f"{format_seconds(op.seconds)} a step, {op.flops:,.0f} flops in all"
    grid.add_row("takes", f"{takes}, divided over {op.split} devices")
    if reasons is not None:
        _add_reasons(grid, reasons, found.noun)
    yield grid
    if reasons is not None:
        yield from _alternatives(found, reasons, "factors")


def _listed(specs: Sequence[Spec], names: Sequence[str]) -> str:
    """Specs in order, those that repeat with how often."""
    words = (split_words(spec, names) for spec in specs)
    runs = [(each, len(list(same))) for each, same in groupby(words)]
    parts = [f"{each} x{number}" if number > 1 else each for each, number in runs]
    return "; ".join(parts) or "nothing"


def _add_reasons(grid: Table, reasons: Reasons, chosen: str) -> None:
    specs: dict[str, list[str]] = {}
    for name, spec in reasons.readers:
        specs.setdefault(spec, []).append(name)
    for spec, readers in specs.items():
        rest = len(readers) - _MOST_READERS
        more = f" and {rest} more" if rest > 0 else ""
        words = f"{', '.join(readers[:_MOST_READERS])}{more}: as {spec}"
        grid.add_row("is read by", Text(words))
    for holder in reasons.holders:
        grid.add_row("held by", Text(holder))
    if not reasons.holders:
        grid.add_row("held by", f"nothing: the cheapest {chosen} has it so")


def _alternatives(
    found: _Found, reasons: Reasons, noun: str
) -> Iterator[RenderableType]:
    if not reasons.alternatives:
        return
    rows = table("", noun, ">step", ">compute", ">collectives", ">peak memory")
    here = found.prices(found.view.decision)
    rows.add_row("this plan", "", *_figures(here))
    gaps = [here.optimality_gap]
    for each in reasons.alternatives:
        if each.plan is None:
            rows.add_row(Text(each.title), Text(each.refusal), "", "", "", "")
            continue
        there = found.prices(each.plan)
        gaps.append(there.optimality_gap)
        priced = changes(here, there)
        rows.add_row(Text(each.title), Text(each.choice), *priced)
    yield section("what else it could be, and its price", rows)
    words = (
        f"The runner-up is the best {found.noun} with other {noun} here; all else may "
        f"change. Every row is solved anew"
    )
    if found.view.stages is not None:
        words = (
            f"Seconds of the step are the whole pipeline's, the rest the stage's own; "
            f"other stages stay. "
            f"{words}, by its work on a microbatch"
        )
    if isfinite(max(gaps)):
        words += f", up to {format_seconds(round(max(gaps) * here.step_seconds, 12))}"
    yield Text(f"{words}.", style="dim")


def _figures(predicted: Prediction) -> Sequence[str]:
    return (
        format_seconds(predicted.step_seconds),
        format_seconds(predicted.compute_seconds),
        format_seconds(predicted.collective_seconds),
        format_bytes(predicted.peak_bytes),
    )


def changes(here: Prediction, other: Prediction) -> Iterator[str]:
    """What step, compute, collectives and peak change by: `+12 us`."""
    pairs = (
        (here.step_seconds, other.step_seconds, format_seconds),
        (here.compute_seconds, other.compute_seconds, format_seconds),
        (here.collective_seconds, other.collective_seconds, format_seconds),
        (here.peak_bytes, other.peak_bytes, format_bytes),
    )
    for was, now, words in pairs:
        sign = "+" if now > was else "-"
        yield "0" if is_rounding(was, now) else f"{sign}{words(abs(now - was))}"


def _makes(op: OperatorPlan, tensor: str) -> bool:
    name, _, position = tensor.rpartition(":")
    return op.name == tensor or (op.name == name and position.isdigit())


def _factors(op: OperatorPlan, plan: ShardingPlan) -> str:
    pairs = zip(plan.mesh.axis_names, op.factors, strict=False)
    return ", ".join(f"{name} {factor}" for name, factor in pairs)


def _maker_text(op: OperatorPlan, plan: ShardingPlan) -> str:
    factors = _factors(op, plan)
    splits = f", which splits {factors}" if factors else ""
    return f"{op.kind} at {format_source(op.source)}{splits}"


def _collectives(program: ProgramView, tensor: str) -> Iterator[str]:
    """The collectives of a tensor's copies, each with its bytes of a step."""
    for each in program.collectives:
        if each.tensor == tensor:
            times = f" x{each.plan.count}" if each.plan.count > 1 else ""
            total = format_bytes(each.plan.total_bytes)
            yield f"{each.plan.name} over {each.axes}{times}, {total}"
