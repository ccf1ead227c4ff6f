"""The last sections of a report: other plans, pins, and the audit."""

from __future__ import annotations

from collections.abc import Iterator

from ..audit.audit import Audit
from ..plans.explain import format_bytes
from .figures import alternatives_figure
from .findings import Alternative
from .html_elements import (
    Cell,
    Child,
    Column,
    Html,
    bytes_cell,
    missing_note,
    path_text,
    seconds_cell,
    table,
    tag,
)
from .html_summary import figure_slot
from .report import Report, alternative


def alternatives_section(report: Report) -> Html:
    """What other plans and the pins cost."""
    found = report.findings
    parts: list[Child] = [tag("h2", "Alternatives and what they would cost")]
    if found.alternatives:
        rows = (alternative("this plan", report.decision), *found.alternatives)
        parts += [
            figure_slot("alternatives", alternatives_figure(rows)),
            _alternatives_table(rows),
        ]
    else:
        reason = found.missing.get("alternatives", "there are none.")
        parts.append(missing_note(reason))
    parts.append(tag("h3", "Pins"))
    if found.pins:
        parts.append(_pin_table(report))
    else:
        parts.append(tag("p", found.missing.get("pins", "nothing was pinned.")))
    return tag("section", parts, id="alternatives")


def _alternatives_table(rows: tuple[Alternative, ...]) -> Html:
    columns = [
        Column("plan"),
        Column("mesh"),
        Column("step", True),
        Column("times", True, "how many times the step time of this plan"),
        Column("compute", True),
        Column("communication", True),
        Column("sent", True, "bytes of collectives, a device a step"),
        Column("memory", True, "peak of one device"),
        Column("gap", True, "from the best plan of that method, at most"),
    ]
    first = rows[0].predicted
    assert first is not None
    lines = []
    for row in rows:
        found = row.predicted
        if found is None:
            refusal = tag("div", row.refusal, class_="refusal")
            lines.append([Cell((row.name, refusal), row.name), *[Cell("–")] * 8])
            continue
        ratio = found.step_seconds / first.step_seconds if first.step_seconds else 1.0
        is_bound = found.optimality_gap != float("inf")
        gap = f"{found.optimality_gap:.2%}" if is_bound else "–"
        lines.append(
            [
                Cell(row.name),
                Cell(row.mesh),
                seconds_cell(found.step_seconds),
                Cell(f"{ratio:.2f}", ratio),
                seconds_cell(found.compute_seconds),
                seconds_cell(found.collective_seconds),
                bytes_cell(found.collective_bytes),
                bytes_cell(found.peak_bytes),
                Cell(gap),
            ]
        )
    caption = "This plan beside others of the same step, on the same costs"
    name = "alternative-plans"
    return table(name, columns, lines, caption=caption, is_sortable=True)


def _pin_table(report: Report) -> Html:
    columns = [
        Column("pin"),
        Column("step without it", True),
        Column("it costs", True),
    ]
    rows = [
        [
            Cell(path_text(each.pin)),
            seconds_cell(each.seconds_without),
            seconds_cell(max(0.0, each.seconds - each.seconds_without)),
        ]
        for each in report.findings.pins
    ]
    return table("pins", columns, rows, caption="What each pin adds to a step")


def audit_section(report: Report) -> Html:
    """The plan's collectives beside those of its programs."""
    found = report.findings
    title = tag("h2", "Audit: planned beside what the program does")
    if not found.audits:
        note = missing_note(found.missing.get("audit", "the plan was not audited."))
        return tag("section", title, note, id="audit")
    bodies = [_audit(name, each, len(found.audits) == 1) for name, each in found.audits]
    num_wrong = sum(not each.ok for _, each in found.audits)
    words = "Every collective of the programs is as planned, or explained."
    if num_wrong:
        words = f"{num_wrong} of {len(bodies)} programs are not as planned."
    verdict = tag("p", words, class_="wrong" if num_wrong else "right")
    return tag("section", title, verdict, bodies, id="audit")


def _audit(name: str, audit: Audit, is_only: bool) -> Html:
    columns = [
        Column("collective"),
        Column("over axes"),
        Column("planned", True),
        Column("lowered", True),
        Column("compiled", True),
        Column("operations", True),
        Column("explanation"),
    ]
    rows = [
        [
            Cell(row.collective),
            Cell(row.axes),
            bytes_cell(row.planned_bytes),
            bytes_cell(row.lowered_bytes),
            Cell("–") if row.compiled_bytes is None else bytes_cell(row.compiled_bytes),
            Cell(row.operations or "–"),
            Cell(tag("strong", row.explanation) if row.is_wrong else row.explanation),
        ]
        for row in audit.rows
    ]
    verdict = "as planned" if audit.ok else "NOT as planned"
    caption = "Bytes of collectives, a device a step"
    body = table(f"audit {name}", columns, rows, caption=caption)
    inside = [body if rows else tag("p", "No collectives."), *_audited_memory(audit)]
    head = tag("summary", f"{name or 'the program'}: {verdict}")
    return tag("details", head, inside, open=is_only or not audit.ok)


def _audited_memory(audit: Audit) -> Iterator[Html]:
    if audit.memory is None:
        return
    words = f"Memory of the compiled program: {format_bytes(audit.memory.device_bytes)}"
    if audit.predicted_bytes:
        ratio = audit.memory.device_bytes / audit.predicted_bytes
        predicted = format_bytes(audit.predicted_bytes)
        words += f" a device, {ratio:.2f} of the {predicted} predicted"
    yield tag("p", f"{words}.")
