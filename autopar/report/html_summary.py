"""The first sections of a report: headline, devices and stages, cautions."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from ..costs.compute import is_heavy
from ..lowering.programs import TaskKind
from ..plans.explain import format_bytes, format_seconds
from ..plans.plan import ShardingPlan
from ..plans.plan_view import format_source
from ..plans.staged_plan import StagedPlan
from .device_grid import DeviceGrid
from .figures import timeline_figure
from .html_elements import (
    NUM_COLOURS,
    Cell,
    Child,
    Column,
    Html,
    axis_chip,
    bytes_cell,
    count_cell,
    join,
    missing_note,
    path_text,
    seconds_cell,
    table,
    tag,
)
from .report import Report
from .task_times import TaskTimes

_KINDS: tuple[TaskKind, ...] = ("forward", "backward", "weight", "apply")
_MOST_LINES = 3


def headline(report: Report) -> Html:
    """Step time by part, memory against the budget, gap, and what was planned."""
    predicted = report.decision.predicted
    step = predicted.step_seconds or 1.0
    of = "of the busiest submesh" if report.times else "a device"
    sent = format_bytes(predicted.collective_bytes)
    compute, sending = predicted.compute_seconds, predicted.collective_seconds
    part = f"{compute / step:.0%} of the step, {of}"
    sent_part = f"{sending / step:.0%} of the step, {sent} {of}"
    hidden = report.sent_seconds - report.waited_seconds
    if report.is_priced and hidden > 1e-3 * report.sent_seconds:
        sent_part += f"; {format_seconds(hidden)} more is hidden beside compute"
    tiles = [
        _seconds_tile("step time", "step", predicted.step_seconds, "predicted"),
        _seconds_tile("compute", "compute", compute, part),
        _seconds_tile("communication", "collectives", sending, sent_part),
        _memory_tile(report),
        _gap_tile(report),
    ]
    return tag(
        "section",
        tag("h1", "Plan of ", tag("code", report.decision.function)),
        tag("div", tiles, class_="tiles"),
        _time_bar(report),
        _facts(report),
        id="headline",
        aria_label="headline",
    )


def _tile(title: str, name: str, words: str, value: float, note: Child) -> Html:
    """A figure in large print; `value` is what it is exactly."""
    shown = tag("data", words, value=repr(value), id=f"predicted-{name}")
    return tag(
        "div",
        tag("div", title, class_="title"),
        tag("div", shown, class_="figure"),
        tag("div", note, class_="note"),
        class_="tile",
    )


def _seconds_tile(title: str, name: str, seconds: float, note: str) -> Html:
    return _tile(title, name, format_seconds(seconds), seconds, note)


def _memory_tile(report: Report) -> Html:
    predicted = report.decision.predicted
    budget, peak = predicted.budget_bytes, predicted.peak_bytes
    note: Child = "a device at the peak; no budget is known"
    if budget:
        part = peak / budget
        level = "over" if peak > budget else "near" if part > 0.9 else "fits"
        filled = tag("i", "", style=f"width:{min(part, 1):.1%}", class_=level)
        share = f"{part:.0%}" if part >= 0.01 else "less than 1%"
        note = (
            tag("span", filled, class_="gauge", aria_hidden="true"),
            f"{share} of the budget of ",
            tag("data", format_bytes(budget), value=budget, id="predicted-budget"),
            " a device",
        )
    return _tile("memory", "peak", format_bytes(peak), peak, note)


def _gap_tile(report: Report) -> Html:
    predicted = report.decision.predicted
    gap = predicted.optimality_gap
    words, note = "no bound", "how far the optimum may be is not known"
    if not predicted.step_seconds:
        words, note = "none", predicted.gap_words
    elif isfinite(gap):
        words, note = f"≤ {gap:.3%}", "slower than the best plan there is on this mesh"
    return _tile("optimality gap", "gap", words, gap, note)


def _time_bar(report: Report) -> Html:
    """The step as one bar: compute, communication, and what is left."""
    predicted = report.decision.predicted
    step = predicted.step_seconds
    if not step:
        return Html("")
    rest = step - predicted.compute_seconds - predicted.collective_seconds
    parts = [
        ("compute", predicted.compute_seconds),
        ("communication", predicted.collective_seconds),
        *([("waiting", rest)] if rest > 1e-6 * step else []),
    ]
    bars = [
        tag(
            "span",
            f"{name} {format_seconds(seconds)}" if seconds > 0.09 * step else "",
            class_=f"part {name}",
            style=f"flex-grow:{seconds / step:.4f}",
            title=f"{name} {format_seconds(seconds)}",
        )
        for name, seconds in parts
    ]
    words = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts)
    return tag("div", bars, class_="timebar", role="img", aria_label=words)


def _facts(report: Report) -> Html:
    decision, predicted = report.decision, report.decision.predicted
    method = report.findings.method or report.findings.missing.get("method", "")
    facts: list[tuple[str, Child]] = [("method", method)]
    facts.append(("cluster", decision.cluster))
    if isinstance(decision, StagedPlan):
        where = f"{decision.num_stages} stages on {len(decision.meshes)} submeshes, "
        facts.append(("pipeline", where + decision.schedule))
        number = f"{decision.num_microbatches}, {decision.microbatch_semantics}"
        facts.append(("microbatches", number))
        bubble = f"{predicted.bubble_fraction:.1%} of the submeshes' time is waiting"
        facts.append(("bubble", bubble))
        sent = f"{format_bytes(decision.transfer_bytes)} between submeshes in a step"
        facts.append(("transfers", sent))
    else:
        mesh = decision.mesh
        chips = [
            (axis_chip(mesh, i), f" {size}  ") for i, size in enumerate(mesh.axis_sizes)
        ]
        facts.append(("mesh", (*chips, f"= {mesh.size} devices")))
        facts.append(("state", f"{format_bytes(decision.state_bytes())} a device"))
    split = f"{predicted.split_flops_fraction:.1%} of the heavy flops are done once"
    has_heavy = any(line.source for line in report.compute)
    facts.append(("work", split if has_heavy else "no heavy operators"))
    rows = [(tag("dt", name), tag("dd", words)) for name, words in facts]
    return tag("dl", rows, class_="facts")


def cautions_section(report: Report) -> Html:
    """Warnings and fallbacks, or that there are none."""
    items: Child = [tag("li", each) for each in report.cautions]
    body = tag("ul", items) if report.cautions else tag("p", "None.")
    title = tag("h2", "Warnings and fallbacks")
    return tag("section", title, body, id="cautions")


def devices_section(report: Report) -> Html:
    """The mesh or meshes drawn, and the stages of a pipeline."""
    decision = report.decision
    grids = [tag("div", _grid(grid), class_="device-grid") for grid in report.grids]
    hosts = {c.host for g in report.grids for s in g.slices for r in s.rows for c in r}
    words = "One cell is one device. "
    if None in hosts:
        words += "The cluster is no preset, so hosts are not known here."
    elif len(hosts) > 1:
        words += "Cells of one host have one shade; its number stands above them."
    else:
        words += "All are on one host."
    parts: list[Child] = [
        tag("h2", "Devices" if report.times is None else "Stages and their devices"),
        tag("p", words, class_="lead"),
        tag("div", grids, class_="grids"),
    ]
    if isinstance(decision, StagedPlan) and report.times is not None:
        parts += [
            _stage_table(decision, report.times),
            _timeline(decision, report.times),
            _schedule(decision, report.times),
            _transfers(decision),
        ]
    return tag("section", parts, id="devices")


def _grid(grid: DeviceGrid) -> Iterator[Html]:
    mesh = grid.mesh
    column = mesh.num_axes - 1
    for each in grid.slices:
        heads: list[Child] = [tag("th", "", class_="corner")]
        for index in range(len(each.rows[0])):
            heads.append(tag("th", axis_chip(mesh, column), f" {index}", scope="col"))
        rows = [tag("tr", heads)]
        for index, cells in enumerate(each.rows):
            head: Child = ""
            if grid.row_axis:
                head = (axis_chip(mesh, column - 1), f" {index}")
            drawn = [
                tag(
                    "td",
                    tag("b", str(c.device)),
                    "" if c.host is None else tag("small", f"host {c.host}"),
                    class_="host" if c.host is None else f"host h{c.host % 4}",
                )
                for c in cells
            ]
            rows.append(tag("tr", tag("th", head, scope="row"), drawn))
        title = f"{grid.name} ({mesh})" + (f", {each.title}" if each.title else "")
        yield tag("table", tag("caption", title), tag("tbody", rows), class_="mesh")
    if not grid.is_whole:
        yield tag("p", f"Only the first of {mesh.size} devices are drawn.")


def _stage_table(plan: StagedPlan, times: TaskTimes) -> Html:
    used = {each.kind for each in plan.programs}
    kinds: list[TaskKind] = [kind for kind in _KINDS if kind in used]
    columns = [
        Column("stage"),
        Column("submesh", True),
        Column("mesh"),
        *(Column(kind, True, f"seconds of one {kind} task") for kind in kinds),
        Column("in flight", True, "the most microbatches held at once"),
        Column("peak", True, "bytes of one device of the submesh"),
        Column("products from"),
    ]
    rows = []
    for stage in range(plan.num_stages):
        submesh = stage % len(plan.meshes)
        rows.append(
            [
                Cell(str(stage), stage),
                count_cell(submesh),
                Cell(str(plan.mesh(stage))),
                *(seconds_cell(plan.task_seconds(stage, kind)) for kind in kinds),
                count_cell(times.most_in_flight(submesh)),
                bytes_cell(plan.peak_bytes[submesh]),
                Cell(_products(plan, stage)),
            ]
        )
    caption = "Stages: seconds of one microbatch, bytes of one device"
    return table("stages", columns, rows, caption=caption)


def _products(plan: StagedPlan, stage: int) -> str:
    """Where the products of a stage's forward program come from, the first few."""
    lines = [
        format_source(op.source)
        for each in plan.of_stage(stage)
        if each.kind == "forward"
        for op in each.sharding.operators
        if is_heavy(op.kind)
    ]
    words = [f"{line} ×{lines.count(line)}" for line in dict.fromkeys(lines)]
    more = [f"and {len(words) - _MOST_LINES} more"] * (len(words) > _MOST_LINES)
    return ", ".join([*words[:_MOST_LINES], *more])


def _timeline(plan: StagedPlan, times: TaskTimes) -> Html:
    words = "When each submesh runs what, as predicted; numbers are microbatches. "
    if times.num_waiting:
        words += f"{times.num_waiting} tasks are left out: what they wait for is lost. "
    elif not times.has_transfers:
        words += "The cluster is no preset, so values are drawn to arrive at once. "
    end = times.seconds
    if abs(end - plan.predicted.step_seconds) > 1e-3 * plan.predicted.step_seconds:
        words += (
            f"It is drawn from rows and seconds of the plan and ends at "
            f"{format_seconds(end)}; the step was simulated to take "
            f"{format_seconds(plan.predicted.step_seconds)}."
        )
    return tag(
        "figure",
        tag("figcaption", words),
        figure_slot("timeline", timeline_figure(plan, times)),
    )


def _schedule(plan: StagedPlan, times: TaskTimes) -> Html:
    longest = max(len(times.row(i)) for i in range(len(plan.rows)))
    columns = [Column("submesh"), *(Column(str(i + 1)) for i in range(longest))]
    rows = []
    for submesh in range(len(plan.rows)):
        cells = [
            Cell(tag("span", task.name, class_=f"task {task.kind}"))
            for task in times.row(submesh)
        ]
        empty = [Cell("")] * (longest - len(cells))
        rows.append([Cell(str(submesh)), *cells, *empty])
    caption = (
        "Tasks of each submesh in their order: stage, F(orward), B(ackward), W(eight) "
        "or A(pply), microbatch"
    )
    grid = table("schedule", columns, rows, caption=caption)
    title = f"The schedule {plan.schedule}, task by task"
    return tag("details", tag("summary", title), grid)


def _transfers(plan: StagedPlan) -> Html:
    if not plan.transfers:
        return missing_note("the stages share one submesh, so nothing is transferred.")
    columns = [
        Column("value"),
        Column("from stage", True),
        Column("to stage", True),
        Column("bytes", True),
        Column("times a step", True),
        Column("bytes a step", True),
    ]
    rows = [
        [
            Cell(path_text(each.slot)),
            count_cell(each.source),
            count_cell(each.target),
            bytes_cell(each.bytes),
            count_cell(each.count),
            bytes_cell(each.total_bytes),
        ]
        for each in sorted(plan.transfers, key=lambda each: -each.total_bytes)
    ]
    total = format_bytes(plan.transfer_bytes)
    caption = f"Transfers between submeshes, {total} a step in all"
    body = table("transfers", columns, rows, caption=caption, is_sortable=True)
    title = f"{len(plan.transfers)} values cross between submeshes, {total} a step"
    return tag("details", tag("summary", title), body)


def figure_slot(name: str, figure: str) -> Html:
    """Where a figure is drawn; its numbers stand in a table near it."""
    data = tag("script", Html(figure), type="application/json", class_="figure-data")
    return tag("div", data, class_="plot", id=f"figure-{name}")


def legend(report: Report) -> Html:
    """The axes of all meshes in their colours."""
    seen: dict[tuple[str, int], Html] = {}
    decision = report.decision
    meshes = [decision.mesh] if isinstance(decision, ShardingPlan) else decision.meshes
    for mesh in meshes:
        for axis, name in enumerate(mesh.axis_names):
            seen[name, axis % NUM_COLOURS] = axis_chip(mesh, axis)
    chips = [join(chip, " ") for chip in seen.values()]
    return tag("p", "Axes: ", chips, "and - is not split.", class_="lead")
