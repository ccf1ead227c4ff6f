"""The figures of a report, as plotly's JSON."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any

from ..plans.staged_plan import StagedPlan
from .findings import Alternative, MemoryCurve
from .task_times import TaskTimes, kinds_used

KIND_COLOURS = {
    "forward": "#3b7dd8",
    "backward": "#d9822b",
    "weight": "#9467bd",
    "apply": "#2e9e6b",
}
_COMPUTE, _COLLECTIVE = "#3b7dd8", "#d9822b"
_LINES = ("#3b7dd8", "#d9822b", "#2e9e6b", "#9467bd", "#c4499b", "#8c7a2b")
_BASE, _BUDGET = "rgba(128,128,128,0.28)", "#d0433f"
_IN_SIGHT = 2.5  # a budget above as many peaks is said, not drawn


def packed_plotly() -> str:
    """The plotting library's JavaScript, compressed, as base64.

    Raises:
      ImportError: plotly is not installed.
    """
    code = _plotly("offline").get_plotlyjs()
    return base64.b64encode(gzip.compress(code.encode(), 9, mtime=0)).decode()


def memory_figure(curves: Sequence[MemoryCurve], budget_bytes: int) -> str:
    """Bytes of one device in executed order, with the budget."""
    go = _plotly("graph_objects")
    peak = max(max(curve.bytes) for curve in curves)
    unit, size = _unit(peak, (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)))
    figure = go.Figure()
    if len(curves) == 1:
        base, number = curves[0].base_bytes / size, len(curves[0].bytes)
        figure.add_scatter(
            x=[0, number],
            y=[base] * 2,
            name="arguments and results",
            mode="lines",
            fill="tozeroy",
            fillcolor=_BASE,
            line={"color": "gray", "width": 1},
            hoverinfo="skip",
        )
    for number, curve in enumerate(curves):
        colour = _LINES[number % len(_LINES)]
        is_one = len(curves) == 1
        figure.add_scatter(
            x=list(range(len(curve.bytes) + 1)),
            y=[each / size for each in (*curve.bytes, curve.bytes[-1])],
            name="all that is held" if is_one else curve.title,
            mode="lines",
            fill="tonexty" if is_one else "none",
            fillcolor="rgba(59,125,216,0.25)",
            line={"color": colour, "width": 2, "shape": "hv"},
            customdata=[_cut(x) for x in (*curve.labels, curve.labels[-1])],
            hovertemplate=f"%{{y:.4g}} {unit}<br>%{{customdata}}<extra></extra>",
        )
    top = peak / size
    if 0 < budget_bytes <= _IN_SIGHT * peak:
        budget = budget_bytes / size
        top = max(top, budget)
        figure.add_hline(
            y=budget,
            line={"color": _BUDGET, "dash": "dash", "width": 2},
            annotation={"text": f"budget {budget:.4g} {unit}", "font_color": _BUDGET},
            annotation_position="top left",
        )
    _add_peak(figure, curves, size, unit)
    figure.update_layout(_layout(360, "executed order", f"{unit} on one device"))
    figure.update_yaxes(range=[0, top * 1.16])
    figure.update_xaxes(showticklabels=False, showgrid=False)
    return _to_json(figure)


def _add_peak(figure: Any, curves: Sequence[MemoryCurve], size: int, unit: str) -> None:
    curve = max(curves, key=lambda each: max(each.bytes))
    height = max(curve.bytes) / size
    is_left = curve.peak < len(curve.bytes) / 2
    figure.add_annotation(
        x=curve.peak,
        y=height,
        text=f"peak {height:.4g} {unit}",
        showarrow=True,
        arrowhead=2,
        arrowcolor="gray",
        ax=80 if is_left else -80,
        ay=44,
    )


def timeline_figure(plan: StagedPlan, times: TaskTimes) -> str:
    """What each submesh runs when; numbers are microbatches."""
    go = _plotly("graph_objects")
    unit, size = _unit(times.seconds, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))
    figure = go.Figure()
    for kind in kinds_used(times):
        tasks = [task for task in times.tasks if task.kind == kind]
        figure.add_bar(
            y=[f"submesh {task.submesh}" for task in tasks],
            base=[task.start / size for task in tasks],
            x=[(task.end - task.start) / size for task in tasks],
            name=kind,
            orientation="h",
            marker={"color": KIND_COLOURS[kind], "line": {"width": 0.5}},
            text=["" if t.microbatch is None else str(t.microbatch) for t in tasks],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            constraintext="none",
            textfont={"color": "white"},
            customdata=[
                (task.name, task.start / size, task.end / size) for task in tasks
            ],
            hovertemplate=(
                f"%{{customdata[0]}}: %{{customdata[1]:.4g}} to "
                f"%{{customdata[2]:.4g}} {unit}<extra>{kind}</extra>"
            ),
        )
    height = 130 + 44 * len(plan.rows)
    figure.update_layout(_layout(height, f"{unit} since the start of the step", ""))
    figure.update_layout(barmode="overlay", bargap=0.25, uniformtext_minsize=9)
    figure.update_layout(uniformtext_mode="hide")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return _to_json(figure)


def alternatives_figure(rows: Sequence[Alternative]) -> str:
    """Compute and communication of each plan, one bar a plan."""
    go = _plotly("graph_objects")
    plans = [(_cut(row.name), row.predicted) for row in rows if row.predicted]
    longest = max(predicted.step_seconds for _, predicted in plans)
    unit, size = _unit(longest, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))
    names = [name for name, _ in plans]
    parts = (
        ("compute", _COMPUTE, [p.compute_seconds for _, p in plans]),
        ("communication", _COLLECTIVE, [p.collective_seconds for _, p in plans]),
        (
            "waiting and transfers",
            "#999999",
            [
                max(0.0, p.step_seconds - p.compute_seconds - p.collective_seconds)
                for _, p in plans
            ],
        ),
    )
    figure = go.Figure()
    for name, colour, seconds in parts:
        if any(each > 1e-9 * longest for each in seconds):
            figure.add_bar(
                y=names,
                x=[each / size for each in seconds],
                name=name,
                orientation="h",
                marker={"color": colour},
                hovertemplate=f"%{{x:.4g}} {unit}<extra>{name}</extra>",
            )
    figure.update_layout(_layout(120 + 30 * len(plans), f"{unit} a step", ""))
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return _to_json(figure)


def _layout(height: int, x_title: str, y_title: str) -> dict[str, Any]:
    """Without colours of its own: the page sets those of its light or dark theme."""
    return {
        "height": height,
        "margin": {"l": 8, "r": 16, "t": 36, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {
            "orientation": "h",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "x": 0,
            "traceorder": "normal",
        },
        "xaxis": _axis(x_title),
        "yaxis": _axis(y_title),
        "template": "none",
    }


def _axis(title: str) -> dict[str, Any]:
    words = {"text": title, "font": {"size": 13}, "standoff": 8}
    return {"title": words, "automargin": True, "zeroline": False}


def _unit(largest: float, units: Sequence[tuple[str, float]]) -> tuple[str, Any]:
    """The largest unit that the value fills."""
    return next((unit for unit in units if largest >= unit[1]), units[-1])


def _cut(label: str) -> str:
    """A label for plotly, which reads markup in it."""
    short = label if len(label) <= 90 else f"{label[:87]}..."
    return short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _to_json(figure: Any) -> str:
    """What a script element may hold."""
    document = json.loads(figure.to_json())
    shown = {"data": document["data"], "layout": document["layout"]}
    return json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")


def _plotly(module: str) -> Any:
    try:
        import plotly.graph_objects
        import plotly.offline
    except ImportError as error:
        raise ImportError(
            "A report is drawn by plotly, which is not installed; "
            "pip install 'autopar[report]'."
        ) from error
    return {"graph_objects": plotly.graph_objects, "offline": plotly.offline}[module]
