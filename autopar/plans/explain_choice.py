"""Prints why one tensor or operator is as it is, and what else it could be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import isfinite

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..sharding.group_names import GroupNames
from ..sharding.pins import spellings
from ..sharding.spec import Spec, format_spec, local_shape
from .explain import (
    format_bytes,
    format_seconds,
    format_source,
    is_rounding,
    section,
    split_words,
    table,
)
from .plan import OperatorPlan, Prediction, ShardingPlan, TensorPlan
from .reasons import PlanSource, Reasons, nearest_names
from .staged_plan import StagedPlan

_MOST_READERS = 6
_WITHOUT_STEP = (
    "A plan file does not hold the step, so readers, pins and the runner-up are not "
    "known here: name the step, `autopar explain plan.json --target MODULE:NAME`, or "
    "ask the plan that step.plan(...) returns."
)
_OF_PIPELINE = (
    "The runner-up of a choice in a pipeline is not priced, as stages share their "
    "values; plan.what_if(pins=...) prices other specs of arguments."
)


def tensor_parts(
    decision: ShardingPlan | StagedPlan, name: str, source: PlanSource | None
) -> Iterator[RenderableType]:
    """What is printed of a tensor, by argument path or by the operator that makes it.

    Raises:
      ValueError: the plan has no such tensor; names those that are like it.
    """
    found = _find(decision, name, lambda plan: [t.name for t in plan.tensors], "tensor")
    for where, plan, index in found:
        reasons = None if source is None else source.tensor_reasons(plan, index)
        yield from _tensor(plan, plan.tensors[index], where, reasons)
    yield from _note(decision, source)


def operator_parts(
    decision: ShardingPlan | StagedPlan, name: str, source: PlanSource | None
) -> Iterator[RenderableType]:
    """What is printed of an operator, by its name in the plan.

    Raises:
      ValueError: the plan has no such operator; names those that are like it.
    """
    found = _find(decision, name, lambda plan: [o.name for o in plan.operators], "op")
    for where, plan, index in found:
        reasons = None if source is None else source.operator_reasons(plan, index)
        yield from _operator(plan, plan.operators[index], where, reasons)
    yield from _note(decision, source)


def _find(
    decision: ShardingPlan | StagedPlan,
    name: str,
    names_of: Callable[[ShardingPlan], list[str]],
    noun: str,
) -> list[tuple[str, ShardingPlan, int]]:
    """Where a name is: the stage program if there are several, its plan, the index."""
    programs = [("", decision)] if isinstance(decision, ShardingPlan) else []
    if isinstance(decision, StagedPlan):
        programs = [
            (f", stage {each.stage} {each.kind}", each.sharding)
            for each in decision.programs
        ]
    found, known = [], []
    for where, plan in programs:
        names = names_of(plan)
        known += names
        found += [(where, plan, i) for i, n in enumerate(names) if name in spellings(n)]
    if not found:
        like = nearest_names(name, list(dict.fromkeys(known)))
        known_words = ", ".join(like) or "(nothing is like it)"
        raise ValueError(
            f"`{noun}` must be one of the {len(known)} names in the plan of "
            f"{decision.function!r}, but got {name!r}; like it are: {known_words}."
        )
    return found


def _note(
    decision: ShardingPlan | StagedPlan, source: PlanSource | None
) -> Iterator[RenderableType]:
    if isinstance(decision, StagedPlan):
        yield Text(f"\n{_OF_PIPELINE}", style="dim")
    elif source is None:
        yield Text(f"\n{_WITHOUT_STEP}", style="dim")


def _tensor(
    plan: ShardingPlan, tensor: TensorPlan, where: str, reasons: Reasons | None
) -> Iterator[RenderableType]:
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
    for text in _collectives(plan, tensor.name, maker):
        grid.add_row("which sends", Text(text))
    if reasons is not None:
        _add_reasons(grid, reasons)
    yield grid
    if reasons is not None:
        yield from _alternatives(plan, reasons, "spec")


def _operator(
    plan: ShardingPlan, op: OperatorPlan, where: str, reasons: Reasons | None
) -> Iterator[RenderableType]:
    names = plan.mesh.axis_names
    yield Text(f"{op.name}, {op.kind}{where}", style="bold")
    grid = Table.grid(padding=(0, 2))
    grid.add_row("at", Text(format_source(op.source)))
    pairs = zip(names, op.factors, strict=False)
    factors = ", ".join(f"{name} {factor}" for name, factor in pairs)
    grid.add_row("splits", Text(factors or "nothing: its operands and results decide"))
    grid.add_row("reads", Text(_listed(op.operand_specs, names)))
    grid.add_row("makes", Text(_listed(op.result_specs, names)))
    takes = f"{format_seconds(op.seconds)} a step, {op.flops:,.0f} flops in all"
    grid.add_row("takes", f"{takes}, divided over {op.split} devices")
    if reasons is not None:
        _add_reasons(grid, reasons)
    yield grid
    if reasons is not None:
        yield from _alternatives(plan, reasons, "factors")


def _listed(specs: Sequence[Spec], names: Sequence[str]) -> str:
    """Specs in order, those that repeat with how often."""
    words = (split_words(spec, names) for spec in specs)
    runs = [(each, len(list(same))) for each, same in groupby(words)]
    parts = [f"{each} x{number}" if number > 1 else each for each, number in runs]
    return "; ".join(parts) or "nothing"


def _add_reasons(grid: Table, reasons: Reasons) -> None:
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
        grid.add_row("held by", "nothing: the cheapest plan has it so")


def _alternatives(
    plan: ShardingPlan, reasons: Reasons, noun: str
) -> Iterator[RenderableType]:
    if not reasons.alternatives:
        return
    rows = table("", noun, ">step", ">compute", ">collectives", ">peak memory")
    here = plan.predicted
    rows.add_row("this plan", "", *_figures(here))
    gaps = [here.optimality_gap]
    for each in reasons.alternatives:
        if each.plan is None:
            rows.add_row(Text(each.title), Text(each.refusal), "", "", "", "")
            continue
        gaps.append(each.plan.predicted.optimality_gap)
        changes = _changes(here, each.plan.predicted)
        rows.add_row(Text(each.title), Text(each.choice), *changes)
    yield section("what else it could be, and its price", rows)
    words = (
        f"The runner-up is the best plan with other {noun} here; all else may change. "
        f"Every row is solved anew"
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


def _changes(here: Prediction, other: Prediction) -> Iterator[str]:
    """What each figure changes by: `+12 us`."""
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


def _maker_text(op: OperatorPlan, plan: ShardingPlan) -> str:
    names = zip(plan.mesh.axis_names, op.factors, strict=False)
    factors = ", ".join(f"{name} {factor}" for name, factor in names)
    splits = f", which splits {factors}" if factors else ""
    return f"{op.kind} at {format_source(op.source)}{splits}"


def _collectives(
    plan: ShardingPlan, tensor: str, maker: OperatorPlan | None
) -> Iterator[str]:
    """The collectives of a tensor's copies, each with its bytes of a step."""
    groups = GroupNames(plan.mesh.size, plan.mesh)
    own = f"{tensor} {maker.source if maker else ''}".strip()
    for each in plan.collectives:
        if each.source == own:
            axes = groups.name(each.kind, each.groups)
            times = f" x{each.count}" if each.count > 1 else ""
            yield f"{each.name} over {axes}{times}, {format_bytes(each.total_bytes)}"
