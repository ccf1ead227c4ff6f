"""The middle sections of a report: arguments, compute, traffic and memory."""

from __future__ import annotations

from math import isclose

from ..graph.build_graph import ASSUMED_TRIPS
from ..plans.explain import format_bytes, format_seconds
from ..plans.plan_view import format_source
from ..plans.staged_plan import StagedPlan
from .figures import memory_figure
from .findings import MemoryCurve
from .html_elements import (
    Cell,
    Child,
    Column,
    Html,
    axes_text,
    bytes_cell,
    count_cell,
    missing_note,
    path_text,
    seconds_cell,
    spec_text,
    states_text,
    table,
    tag,
)
from .html_summary import figure_slot, legend
from .leaf_tree import Branch, Leaf
from .report import Report


def arguments_section(report: Report) -> Html:
    """Parameters, optimizer state and batch by path, with their specs and bytes."""
    opened = tag(
        "p",
        tag("button", "open all", type="button", data_open="arguments"),
        " ",
        tag("button", "close all", type="button", data_close="arguments"),
        class_="buttons",
    )
    trees = [_branch_details(tree, "", 2) for tree in report.trees]
    return tag(
        "section",
        tag("h2", "Arguments and how they are split"),
        legend(report),
        opened,
        tag("div", trees, class_="tree"),
        id="arguments",
    )


def _branch_details(branch: Branch, above: str, open_levels: int) -> Html:
    """A branch; its `open_levels` first levels are open."""
    leaves = branch.all_leaves()
    name = branch.path.removeprefix(above) or branch.name
    sizes = (
        f"{len(leaves):,} {'leaf' if len(leaves) == 1 else 'leaves'}, "
        f"{format_bytes(branch.whole_bytes)} in all, "
        f"{format_bytes(branch.device_bytes)} a device"
    )
    summary = tag("summary", tag("code", name), " ", tag("span", sizes, class_="sizes"))
    inside: list[Child] = []
    if branch.leaves:
        inside.append(_leaf_table(branch))
    inside += [
        _branch_details(below, branch.path, max(open_levels - 1, 0))
        for below in branch.branches
    ]
    return tag("details", summary, tag("div", inside), open=open_levels > 0)


def _leaf_table(branch: Branch) -> Html:
    has_stages = any(leaf.stage is not None for leaf in branch.leaves)
    columns = [
        Column("leaf"),
        *([Column("stage", True)] if has_stages else []),
        Column("shape"),
        Column("type"),
        Column("split over"),
        Column("bytes in all", True),
        Column("bytes a device", True),
    ]
    rows = [_leaf_row(leaf, branch.path, has_stages) for leaf in branch.leaves]
    name = f"leaves of {branch.path or branch.name}"
    return table(name, columns, rows, caption=name)


def _leaf_row(leaf: Leaf, prefix: str, has_stages: bool) -> list[Cell]:
    stage = [Cell("" if leaf.stage is None else str(leaf.stage))] if has_stages else []
    return [
        Cell(path_text(leaf.path, prefix)),
        *stage,
        Cell(f"[{', '.join(map(str, leaf.shape))}]"),
        Cell(leaf.dtype),
        Cell(spec_text(leaf.spec, len(leaf.shape), leaf.mesh)),
        bytes_cell(leaf.whole_bytes),
        bytes_cell(leaf.device_bytes),
    ]


def compute_section(report: Report) -> Html:
    """Where compute goes, and how the work of each line is split."""
    lines = report.compute
    total = sum(line.seconds for line in lines) or 1.0
    in_programs = any(line.program for line in lines)
    columns = [
        Column("source line"),
        *([Column("program")] if in_programs else []),
        Column("operator"),
        Column("result's dims"),
        Column("number", True, "operators in the program"),
        Column("seconds", True, "predicted, of one step on one device"),
        Column("part", True, "of all compute"),
    ]
    rows = []
    for line in lines:
        short = format_source(line.source) or "–"
        rows.append(
            [
                Cell(tag("code", short, title=line.source), short),
                *([Cell(line.program)] if in_programs else []),
                Cell(line.operator),
                Cell("" if line.spec is None else states_text(line.spec, line.mesh)),
                count_cell(line.count),
                seconds_cell(line.seconds),
                Cell(f"{line.seconds / total:.1%}", line.seconds),
            ]
        )
    words = "all stages together" if in_programs else "a device"
    caption = f"Products, convolutions and the like, {words}; a heading sorts"
    body = table("compute-lines", columns, rows, caption=caption, is_sortable=True)
    title = tag("h2", "Compute by source line, and how it is split")
    return tag("section", title, body, id="compute")


def collectives_section(report: Report) -> Html:
    """Every collective by the line of the user's code that it comes from."""
    lines = report.collectives
    total = sum(line.bytes for line in lines)
    title = tag("h2", "Communication by source line")
    if not lines:
        words = "There are no collectives: every device works on its own."
        return tag("section", title, tag("p", words), id="collectives")
    in_programs = any(line.program for line in lines)
    columns = [
        Column("source line"),
        *([Column("program")] if in_programs else []),
        Column("collective"),
        Column("over axes"),
        Column("type"),
        Column("times", True, "executions in a step"),
        Column("bytes", True, "result bytes of one device in a step"),
        Column("seconds", True, "predicted, of one step"),
    ]
    rows = []
    for line in lines:
        short = format_source(line.source) or "unknown"
        where = tag("code", short, title=line.source)
        marks = f" ({line.marks})" if line.marks else ""
        rows.append(
            [
                Cell(where, short),
                *([Cell(line.program)] if in_programs else []),
                Cell(line.collective + marks),
                Cell(axes_text(line.axes, line.mesh), line.axes),
                Cell(line.dtypes),
                count_cell(line.count),
                bytes_cell(line.bytes),
                seconds_cell(line.seconds),
            ]
        )
    words = f"{format_bytes(total)} a device in a step"
    if in_programs:
        words += ", all stages together"
    note: Child = ""
    if report.is_priced:
        words += f", {format_seconds(report.sent_seconds)}"
        note = _overlap_note(report)
    if "seconds" in report.findings.missing:
        note = missing_note(report.findings.missing["seconds"])
    caption = f"Collectives: {words}; a heading sorts"
    body = table("collective-lines", columns, rows, caption=caption, is_sortable=True)
    return tag("section", title, note, body, id="collectives")


def _overlap_note(report: Report) -> Child:
    """What of the collectives' seconds the step waits for, where that is not all."""
    sent, waited = report.sent_seconds, report.waited_seconds
    cluster = report.findings.cluster
    if cluster is None or isclose(sent, waited, rel_tol=1e-3):
        return ""
    why = []
    if cluster.visible_fraction < 1:
        why.append(
            f": {cluster.visible_fraction:.0%} of gathering parameters and reducing "
            f"gradients is taken to be exposed, the rest to run beside compute "
            f"(Cluster.visible_fraction)"
        )
    if any("unbounded" in line.marks for line in report.collectives):
        why.append(
            f"; loops of unknown length are taken to run {ASSUMED_TRIPS:g} times, and "
            f"stand here once"
        )
    return tag(
        "p",
        f"One after the other they take {format_seconds(sent)}, of which the step is "
        f"predicted to wait for ",
        tag("data", format_seconds(waited), value=repr(waited), id="waited-seconds"),
        *why,
        ".",
        class_="lead",
    )


def memory_section(report: Report) -> Html:
    """Memory over the step with the budget, and what is held at the peak."""
    predicted = report.decision.predicted
    title = tag("h2", "Memory over the step")
    curves = report.findings.curves
    if not curves:
        note = missing_note(report.findings.missing.get("memory", ""))
        words = (
            f"Predicted peak: {format_bytes(predicted.peak_bytes)} a device. The "
            f"largest arguments, which are held throughout:"
        )
        users = _argument_users(report)
        return tag("section", title, note, tag("p", words), users, id="memory")
    figure = figure_slot("memory", memory_figure(curves, predicted.budget_bytes))
    words = _memory_words(report, curves)
    users = [_user_table(curve, len(curves) == 1) for curve in curves]
    body = tag("figure", tag("figcaption", words), figure)
    return tag("section", title, body, users, id="memory")


def _memory_words(report: Report, curves: tuple[MemoryCurve, ...]) -> str:
    predicted = report.decision.predicted
    budget, peak = predicted.budget_bytes, predicted.peak_bytes
    if len(curves) == 1 and not isinstance(report.decision, StagedPlan):
        words = (
            f"What one device holds while the program's {curves[0].num_points:,} "
            f"kernels run, as the memory model sees it; loops are one kernel. "
        )
    else:
        words = (
            "What one device of each submesh holds while it runs its tasks; room for "
            "the largest program is kept throughout. "
        )
    if budget > 2.5 * peak:
        words += (
            f"The budget of {format_bytes(budget)} is {budget / peak:,.0f} times the "
            f"peak and not drawn."
        )
    elif not budget:
        words += "There is no budget to draw."
    return words


def _user_table(curve: MemoryCurve, is_open: bool) -> Html:
    columns = [
        Column("value"),
        Column("bytes", True),
        Column("part of the peak", True),
        Column("what it is"),
    ]
    peak = max(curve.bytes)
    rows = [
        [
            Cell(path_text(user.name)),
            bytes_cell(user.bytes),
            Cell(f"{user.bytes / peak:.1%}" if peak else "", user.bytes),
            Cell(_note_text(user.note)),
        ]
        for user in curve.users
    ]
    at = curve.labels[curve.peak]
    caption = f"Largest of what {curve.title} holds at the peak, {format_bytes(peak)}"
    name = f"users of {curve.title}"
    body = table(name, columns, rows, caption=f"{caption}, while it runs: {at}")
    return tag("details", tag("summary", caption), body, open=is_open)


def _note_text(note: str) -> str:
    """A note whose source line is short."""
    kind, comma, source = note.rpartition(", ")
    return f"{kind}{comma}{format_source(source)}" if comma else note


def _argument_users(report: Report) -> Html:
    leaves = sorted(
        (leaf for tree in report.trees for leaf in tree.all_leaves()),
        key=lambda leaf: -leaf.device_bytes,
    )
    columns = [Column("argument"), Column("bytes a device", True)]
    rows = [[Cell(path_text(x.path)), bytes_cell(x.device_bytes)] for x in leaves[:10]]
    return table("largest-arguments", columns, rows, caption="Largest arguments")
