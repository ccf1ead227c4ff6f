"""Prints a plan of a pipeline: its stages, what crosses between them, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..costs.compute import is_heavy
from ..lowering.programs import TaskKind
from .explain import (
    as_text,
    format_bytes,
    format_seconds,
    format_source,
    plan_parts,
    show,
    table,
)
from .plan import ShardingPlan
from .staged_plan import StagedPlan

_MOST_LINES = 4  # source lines that are named for a stage


def format_plan(plan: StagedPlan, *, operators: bool = False) -> str:
    """The plan as text of 100 columns.

    Args:
      plan: the plan.
      operators: show the plan of every stage program too.
    """
    return as_text(_parts(plan, operators))


def print_plan(plan: StagedPlan, *, operators: bool = False) -> None:
    """Print the plan, as wide as the terminal is; see `format_plan`."""
    show(_parts(plan, operators))


def _parts(plan: StagedPlan, operators: bool) -> Iterator[RenderableType]:
    yield _header(plan)
    yield _stage_table(plan)
    yield _transfer_table(plan)
    yield _schedule(plan)
    for each in plan.programs if operators else ():
        yield Text(f"\nstage {each.stage}, {each.kind}", style="bold")
        yield from plan_parts(each.sharding, operators)


def _header(plan: StagedPlan) -> RenderableType:
    predicted = plan.predicted
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        "stages",
        Text(
            f"{plan.num_stages} on {len(plan.meshes)} submeshes of cluster "
            f"{plan.cluster}"
        ),
    )
    grid.add_row(
        "microbatches",
        f"{plan.num_microbatches}, {plan.microbatch_semantics}, {plan.schedule}",
    )
    grid.add_row(
        "predicted",
        f"{format_seconds(predicted.step_seconds)}, of which the busiest submesh has "
        f"{format_seconds(predicted.compute_seconds)} compute and "
        f"{format_seconds(predicted.collective_seconds)} collectives",
    )
    grid.add_row("bubble", f"{predicted.bubble_fraction:.1%} of the time")
    grid.add_row(
        "collectives", f"{format_bytes(predicted.collective_bytes)} a device at most"
    )
    grid.add_row("transfers", f"{format_bytes(plan.transfer_bytes)} in all")
    grid.add_row("memory", f"{format_bytes(predicted.peak_bytes)} a device at the peak")
    title = f"plan of {plan.function}, a pipeline, for one step"
    return Group(Text(title, style="bold"), grid)


def _stage_table(plan: StagedPlan) -> RenderableType:
    used = {each.kind for each in plan.programs}
    kinds: list[TaskKind] = [
        kind for kind in get_args(TaskKind) if kind != "weight" or kind in used
    ]
    rows = table("stage", "mesh", *kinds, "peak", "products")
    for stage in range(plan.num_stages):
        submesh = stage % len(plan.meshes)
        heavy = [
            line
            for each in plan.of_stage(stage)
            if each.kind == "forward"
            for line in _heavy_lines(each.sharding)
        ]
        rows.add_row(
            str(stage),
            Text(f"{submesh}: {plan.mesh(stage)}"),
            *(format_seconds(plan.task_seconds(stage, kind)) for kind in kinds),
            format_bytes(plan.peak_bytes[submesh]),
            Text(_some(heavy)),
        )
    title = "stages: seconds of one microbatch, bytes of one device"
    return Group(Text(f"\n{title}", style="bold"), rows)


def _heavy_lines(plan: ShardingPlan) -> list[str]:
    return [format_source(op.source) for op in plan.operators if is_heavy(op.kind)]


def _some(lines: list[str]) -> str:
    """Source lines with how often each comes, the first few."""
    times = {line: lines.count(line) for line in lines}
    words = [f"{line} x{n}" if n > 1 else line for line, n in times.items()]
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
    return Group(Text("\ntransfers, a step", style="bold"), rows)


def _schedule(plan: StagedPlan) -> RenderableType:
    rows = [f"submesh {i}: {row}" for i, row in enumerate(plan.rows)]
    return Group(Text("\nschedule", style="bold"), Text("\n".join(rows)))
