"""Prints a plan so that a person can judge it: what is split how, and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from html import escape
from io import StringIO
from math import isclose
from typing import get_args

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..sharding.spec import format_spec
from .leaf_groups import common_path, group_leaves, without_numbers
from .plan import ShardingPlan, TaskKind
from .plan_view import (
    CollectiveView,
    Decision,
    LeafView,
    OperatorView,
    PlanView,
    ProgramView,
    format_source,
    grouped,
)
from .staged_plan import StagedPlan

Rows = Iterable[tuple[str, str]]  # names and answers
WIDTH = 100  # columns where there is no terminal to ask
MOST_OF_GROUPS = 72  # letters
_MOST_LINES = 4  # source lines that are named for a stage


def as_text(parts: Iterable[RenderableType]) -> str:
    """What is printed, as lines of 100 columns."""
    text = StringIO()
    console = Console(file=text, width=WIDTH, color_system=None)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def show(parts: Iterable[RenderableType]) -> None:
    """Print, as wide as the terminal is."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for part in parts:
        console.print(part)


def plan_parts(
    decision: Decision, operators: bool, answers: Rows = ()
) -> Iterator[RenderableType]:
    """What is printed of a plan, part by part; `answers` come first."""
    view = PlanView(decision)
    yield _summary(view, answers)
    if view.stages is not None:
        yield _stage_table(view, view.stages)
        yield _transfer_table(view.stages)
        yield _schedule(view.stages)
    for program in view.programs if operators or view.stages is None else ():
        if program.stage is not None:
            yield Text(f"\nstage {program.stage}, {program.kind}", style="bold")
            yield _header(program.sharding, program)
        yield _leaf_table(program.leaves)
        yield _operator_table(program) if operators else _heavy_table(program)
        yield _collective_table(program)


def format_summary(decision: Decision, answers: Rows = ()) -> str:
    """The first lines of what is printed: answers, devices, seconds, memory."""
    return as_text([_summary(PlanView(decision), answers)])


def plan_html(decision: Decision, answers: Rows = ()) -> str:
    """What a notebook shows: the summary, and how the state is split."""
    view = PlanView(decision)
    state = [leaf for leaf in view.leaves if leaf.role == "state"]
    parts = [_summary(view, answers), _leaf_table(state)]
    return f"<pre>{escape(as_text(parts))}</pre>"


def _summary(view: PlanView, answers: Rows) -> RenderableType:
    if view.stages is not None:
        return _stages_header(view.stages, answers)
    return _header(view.programs[0].sharding, view.programs[0], answers)


def _grid(answers: Rows) -> Table:
    grid = Table.grid(padding=(0, 2))
    for name, answer in answers:
        grid.add_row(name, Text(answer))
    return grid


def _header(
    plan: ShardingPlan, program: ProgramView, answers: Rows = ()
) -> RenderableType:
    predicted = plan.predicted
    mesh = f"{plan.mesh} ({plan.mesh.size} devices), cluster {plan.cluster}"
    split = (
        f"{format_seconds(predicted.compute_seconds)} compute + "
        f"{format_seconds(predicted.collective_seconds)} collectives"
    )
    if predicted.host_seconds:
        split += f" + {format_seconds(predicted.host_seconds)} host transfers"
    memory = (
        f"{format_bytes(predicted.peak_bytes)} a device at the peak, "
        f"{format_bytes(plan.state_bytes())} of it state"
    )
    rest = ", none twice" if predicted.split_flops_fraction == 1 else ""
    words = f"{predicted.split_flops_fraction:.1%} of the heavy flops"
    words += rest or "; devices repeat the rest"
    has_heavy = any(op.is_heavy for op in program.operators)
    host = (
        f"{format_bytes(predicted.host_bytes)} a device of state, moved for the update "
        f"in {format_seconds(predicted.host_seconds)}"
    )
    rows = (
        ("mesh", mesh),
        ("predicted", f"{format_seconds(predicted.step_seconds)} = {split}"),
        ("collectives", f"{format_bytes(predicted.collective_bytes)} a device"),
        ("memory", memory),
        (
            "remat",
            f"{plan.remat}: what the backward pass makes again" * bool(plan.remat),
        ),
        ("padding", plan.padding_words()),
        ("host memory", host * bool(predicted.host_bytes)),
        ("gap", predicted.gap_words),
        ("split", words if has_heavy else "the step has no heavy operators"),
    )
    grid = _grid((*answers, *(row for row in rows if row[1])))
    return Group(Text(f"plan of {plan.function}, for one step", style="bold"), grid)


def _leaf_table(leaves: Iterable[LeafView]) -> RenderableType:
    groups = group_leaves(leaves)
    tree = next((group.tree for group in groups if group.mirrors), "")
    rows = table("leaf", ">leaves", "shape", "split over", ">bytes a device")
    for group in groups:
        first = group.first
        is_short = group.tree and group.tree == tree
        rows.add_row(
            Text(f"..{group.path[len(tree) :]}" if is_short else group.path),
            str(len(group.leaves)),
            Text(str(list(first.shape))),
            Text(first.spec_text),
            format_bytes(group.bytes),
        )
    if tree:
        mirrors = dict.fromkeys(mirror for group in groups for mirror in group.mirrors)
        note = f".. is {tree}, counted with what is split alike in {', '.join(mirrors)}"
        return Group(section("state and batch", rows), Text(note, style="dim"))
    return section("state and batch", rows)


def _heavy_table(program: ProgramView) -> RenderableType:
    """Products and convolutions; those of one line that are split alike are one row."""
    operators = program.operators
    heavy = [op for op in operators if op.is_heavy]
    total = sum(op.plan.seconds for op in operators) or 1.0
    title = (
        f"heavy operators ({len(heavy)} of {len(operators)}): the dim of the "
        "result that each axis splits"
    )
    names = program.sharding.mesh.axis_names
    rows = table("operator", "line", *names, ">compute")

    def key(op: OperatorView) -> tuple[str, str, tuple[str, ...]]:
        return op.title, op.line, op.splits

    for same in grouped(heavy, key):
        first, times = same[0], f" x{len(same)}" if len(same) > 1 else ""
        seconds = sum(op.plan.seconds for op in same)
        rows.add_row(
            f"{first.title}{times}",
            Text(first.line),
            *first.splits,
            f"{seconds / total:.1%}",
        )
    return section(title, rows)


def _operator_table(program: ProgramView) -> RenderableType:
    """Every operator, one a row."""
    title = "operators: the factor each axis splits, and the specs it makes"
    rows = table("operator", "line", "factors", "makes", ">seconds")
    plan = program.sharding
    ranks = {tensor.name: len(tensor.shape) for tensor in plan.tensors}
    names = plan.mesh.axis_names
    for op in plan.operators:
        factors = (f"{n}:{f}" for n, f in zip(names, op.factors, strict=False))
        single = len(op.result_specs) == 1
        specs = [
            format_spec(spec, ranks[op.name if single else f"{op.name}:{i}"], names)
            for i, spec in enumerate(op.result_specs)
        ]
        rows.add_row(
            Text(op.name),
            Text(format_source(op.source)),
            Text(" ".join(factors) or "-"),
            Text(", ".join(specs)),
            format_seconds(op.seconds),
        )
    return section(title, rows)


def _collective_table(program: ProgramView) -> RenderableType:
    if not program.collectives:
        return Text("\nno collectives: every device works on its own")

    def key(each: CollectiveView) -> tuple[str, str, str]:
        return without_numbers(each.line), each.plan.name, each.axes

    def sent(same: list[CollectiveView]) -> int:
        return sum(each.plan.total_bytes for each in same)

    rows = table("line", "collective", "over", ">count", ">bytes")
    groups = grouped(program.collectives, key)
    for same in sorted(groups, key=lambda same: -sent(same)):
        rows.add_row(
            Text(common_path([each.line for each in same])),
            same[0].plan.name,
            Text(_in_short(same[0].axes)),
            f"{sum(each.plan.count for each in same):,}",
            format_bytes(sent(same)),
        )
    return section("collectives, a device a step", rows)


def _in_short(groups: str) -> str:
    is_long = len(groups) > MOST_OF_GROUPS
    return f"{groups[: MOST_OF_GROUPS - 3]}..." if is_long else groups


def _stages_header(plan: StagedPlan, answers: Rows) -> RenderableType:
    predicted = plan.predicted
    on = f"{len(plan.meshes)} submeshes of cluster {plan.cluster}"
    form = f"{plan.num_microbatches}, {plan.microbatch_semantics}, {plan.schedule}"
    seconds = (
        f"{format_seconds(predicted.step_seconds)}, of which the busiest submesh has "
        f"{format_seconds(predicted.compute_seconds)} compute and "
        f"{format_seconds(predicted.collective_seconds)} collectives"
    )
    rows = (
        ("stages", f"{plan.num_stages} on {on}"),
        ("microbatches", form),
        ("predicted", seconds),
        ("bubble", f"{predicted.bubble_fraction:.1%} of the time"),
        ("collectives", f"{format_bytes(predicted.collective_bytes)} a device at most"),
        ("transfers", f"{format_bytes(plan.transfer_bytes)} in all"),
        ("memory", f"{format_bytes(predicted.peak_bytes)} a device at the peak"),
        ("gap", predicted.gap_words),
    )
    title = f"plan of {plan.function}, a pipeline, for one step"
    return Group(Text(title, style="bold"), _grid((*answers, *rows)))


def _stage_table(view: PlanView, plan: StagedPlan) -> RenderableType:
    used = {each.kind for each in plan.programs}
    kinds: list[TaskKind] = [
        kind for kind in get_args(TaskKind) if kind != "weight" or kind in used
    ]
    rows = table("stage", "mesh", *kinds, "peak", "products")
    for stage in range(plan.num_stages):
        submesh = stage % len(plan.meshes)
        rows.add_row(
            str(stage),
            Text(f"{submesh}: {plan.mesh(stage)}"),
            *(format_seconds(plan.task_seconds(stage, kind)) for kind in kinds),
            format_bytes(plan.peak_bytes[submesh]),
            Text(products(view, stage)),
        )
    title = "stages: seconds of one microbatch, bytes of one device"
    return section(title, rows)


def products(view: PlanView, stage: int) -> str:
    """The lines of a stage's forward products with how often each comes, the first."""
    lines = [
        op.line
        for program in view.programs
        if (program.stage, program.kind) == (stage, "forward")
        for op in program.operators
        if op.is_heavy
    ]
    words = [
        f"{same[0]} x{len(same)}" if len(same) > 1 else same[0]
        for same in grouped(lines, str)
    ]
    rest = len(words) - _MOST_LINES
    return ", ".join(words[:_MOST_LINES]) + (f" and {rest} more" if rest > 0 else "")


def _transfer_table(plan: StagedPlan) -> RenderableType:
    if not plan.transfers:
        return Text("\nno transfers: the stages share one submesh")
    rows = table("from", "to", "value", "bytes", "times", "total")
    for each in sorted(plan.transfers, key=lambda each: -each.total_bytes):
        rows.add_row(
            str(each.source),
            str(each.target),
            Text(each.slot),
            format_bytes(each.bytes),
            str(each.count),
            format_bytes(each.total_bytes),
        )
    return section("transfers, a step", rows)


def _schedule(plan: StagedPlan) -> RenderableType:
    rows = [f"submesh {i}: {row}" for i, row in enumerate(plan.rows)]
    return section("schedule", Text("\n".join(rows)))


def section(title: str, rows: RenderableType) -> RenderableType:
    """Rows below a title."""
    return Group(Text(f"\n{title}", style="bold"), rows)


def table(*columns: str) -> Table:
    """A table without lines; columns that begin with `>` are flush right."""
    made = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        if column.startswith(">"):
            made.add_column(Text(column[1:]), justify="right", no_wrap=True)
        else:
            made.add_column(Text(column), overflow="fold")
    return made


def format_seconds(seconds: float) -> str:
    """Three digits and a unit: `1.23 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:  # as three digits are rounded up to it
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0 s"


def is_rounding(was: float, now: float) -> bool:
    """Whether two figures are one, whose sums were taken in another order."""
    return isclose(was, now, rel_tol=1e-9)


def format_bytes(num_bytes: float) -> str:
    """Three digits or more and a unit: `1.5 MiB`."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if num_bytes >= 1024**power:
            return f"{num_bytes / 1024**power:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"
