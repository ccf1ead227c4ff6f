"""The figures of a report, as plotly's JSON: data and layout as they are drawn.

Colours of text and lines are left out: the page sets those of its light or dark theme.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ..plans.plan import Prediction
from .findings import MemoryCurve

_KIND_COLOURS = {
    "forward": "#3b7dd8",
    "backward": "#d9822b",
    "weight": "#9467bd",
    "apply": "#2e9e6b",
}
_LINES = ("#3b7dd8", "#d9822b", "#2e9e6b", "#9467bd", "#c4499b", "#8c7a2b")
_GRAY, _BUDGET = "#8a8f98", "#d0433f"
_IN_SIGHT = 2.5  # a budget above as many peaks is said, not drawn
_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


@dataclass(frozen=True)
class Figure:
    """What plotly draws; names of its traces stand above it, with their colours."""

    name: str
    data: Sequence[dict[str, Any]]
    layout: dict[str, Any]

    @property
    def legend(self) -> list[tuple[str, str]]:
        """Name and colour of each trace."""
        return [
            (each["name"], (each.get("line") or each["marker"])["color"])
            for each in self.data
        ]

    @property
    def json(self) -> str:
        """What a script element may hold."""
        document = {"data": self.data, "layout": self.layout}
        return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")


def packed_plotly() -> str:
    """The plotting library's JavaScript, compressed, as base64.

    Raises:
      ImportError: plotly is not installed.
    """
    code = (files("plotly") / "package_data" / "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(code, 6, mtime=0)).decode()


def memory_figure(curves: Sequence[MemoryCurve], budget_bytes: int) -> Figure:
    """Bytes of one device in executed order, with the peak and the budget."""
    highest = max(curves, key=lambda each: max(each.bytes))
    peak = max(highest.bytes)
    unit, size = _unit(peak, _BYTES)
    data, is_one = [], len(curves) == 1
    if is_one:
        base, number = curves[0].base_bytes / size, len(curves[0].bytes)
        data.append(_line("arguments and results", [0, number], [base] * 2, _GRAY, 1))
        data[0] |= {"fill": "tozeroy", "fillcolor": "rgba(128,128,128,0.28)"}
    for number, curve in enumerate(curves):
        heights = [each / size for each in (*curve.bytes, curve.bytes[-1])]
        name = "all that is held" if is_one else curve.title
        colour = _LINES[number % len(_LINES)]
        trace = _line(name, [*range(len(heights))], heights, colour, 2)
        trace["line"]["shape"] = "hv"
        trace["customdata"] = [_label(x) for x in (*curve.labels, curve.labels[-1])]
        trace["hovertemplate"] = f"%{{y:.4g}} {unit}<br>%{{customdata}}<extra></extra>"
        if is_one:
            trace |= {"fill": "tonexty", "fillcolor": "rgba(59,125,216,0.25)"}
        data.append(trace)
    width = max(len(curve.bytes) for curve in curves)
    top = peak / size
    at_peak = _line(f"peak {top:.4g} {unit}", [highest.peak], [top], "#1a7f4b", 2)
    at_peak |= {"mode": "markers", "marker": {"color": "#1a7f4b", "size": 9}}
    data.append(at_peak)
    if 0 < budget_bytes <= _IN_SIGHT * peak:
        budget = budget_bytes / size
        name = f"budget {budget:.4g} {unit}"
        data.append(_line(name, [0, width], [budget] * 2, _BUDGET, 2))
        data[-1]["line"]["dash"] = "dash"
        top = max(top, budget)
    layout = _layout(330, "executed order", f"{unit} on one device")
    layout["yaxis"]["range"] = [0, top * 1.1]
    layout["xaxis"] |= {"showticklabels": False, "showgrid": False}
    return Figure("memory", data, layout)


def _line(
    name: str, x: list[Any], y: list[float], colour: str, width: int
) -> dict[str, Any]:
    line: dict[str, Any] = {"color": colour, "width": width}
    return {
        **{"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y},
        **{"line": line, "hoverinfo": "skip"},
    }


def timeline_figure(times: Sequence[Any]) -> Figure:
    """What each submesh runs when; numbers are microbatches."""
    unit, size = _unit(max(task.end for task in times), _SECONDS)
    data: list[dict[str, Any]] = []
    for kind, colour in _KIND_COLOURS.items():
        tasks = [each for each in times if each.task.kind == kind]
        microbatches = [each.task.microbatch for each in tasks]
        numbers = ["" if number is None else str(number) for number in microbatches]
        bar = _bar(kind, [f"{t.submesh}" for t in tasks], colour)
        data.append(
            bar
            | {
                "base": [task.start / size for task in tasks],
                "x": [(task.end - task.start) / size for task in tasks],
                "text": numbers,
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "constraintext": "none",
                "textfont": {"color": "white"},
                "customdata": [
                    (str(t.task), t.start / size, t.end / size) for t in tasks
                ],
                "hovertemplate": "%{customdata[0]}: %{customdata[1]:.4g} to "
                f"%{{customdata[2]:.4g}} {unit}<extra>{kind}</extra>",
            }
        )
    number = len({task.submesh for task in times})
    layout = _layout(90 + 40 * number, f"{unit} since the start of the step", "submesh")
    layout |= {"barmode": "overlay", "bargap": 0.25}
    layout["uniformtext"] = {"mode": "hide", "minsize": 9}
    layout["yaxis"] |= {"autorange": "reversed", "showgrid": False, "type": "category"}
    return Figure("timeline", [bar for bar in data if bar["y"]], layout)


def waiting_seconds(predicted: Prediction) -> float:
    """What is left of a step beside compute and communication."""
    spent = predicted.compute_seconds + predicted.collective_seconds
    return max(0.0, predicted.step_seconds - spent)


def _bar(name: str, y: list[str], colour: str) -> dict[str, Any]:
    marker = {"color": colour, "line": {"width": 0.5}}
    return {"type": "bar", "orientation": "h", "name": name, "y": y, "marker": marker}


def _layout(height: int, x_title: str, y_title: str) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 12, "b": 8},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "xaxis": _axis(x_title),
        "yaxis": _axis(y_title),
    }


def _axis(title: str) -> dict[str, Any]:
    words = {"text": title, "font": {"size": 13}, "standoff": 8}
    return {"title": words, "automargin": True, "zeroline": False}


def _unit(largest: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit that the value fills."""
    return next((unit for unit in units if largest >= unit[1]), units[-1])


def _label(text: str) -> str:
    """A label for plotly, which reads markup in it."""
    short = text if len(text) <= 120 else f"{text[:117]}..."
    short = short.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return short.replace("\n", "<br>")
