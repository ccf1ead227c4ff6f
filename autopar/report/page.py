"""The whole page in one file: the template filled in, with the plotting library."""

from __future__ import annotations

from importlib.resources import files
from math import inf, isclose, isfinite
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

from ..graph.build_graph import ASSUMED_TRIPS
from ..planner.explain_choice import changes
from ..planner.memory_users import MemoryUser
from ..plans.explain import format_bytes, format_seconds, products
from ..plans.plan import TaskKind
from ..plans.plan_view import format_source, state_words
from ..plans.staged_plan import StagedPlan
from ..sharding.mesh import MeshShape
from ..sharding.spec import Spec, axes_of_dim
from .figures import (
    memory_figure,
    packed_plotly,
    timeline_figure,
    waiting_seconds,
)
from .findings import MemoryCurve
from .report import Arguments, Report

if TYPE_CHECKING:
    from markupsafe import Markup

NUM_COLOURS = 6
MOST_USERS = 25
_LETTERS = {"F": "forward", "B": "backward", "W": "weight", "A": "apply"}
_NUMBERS = ("seconds", "bytes", "count", "part", "ratio")


def page_of(report: Report) -> str:
    """The page as text.

    Raises:
      ImportError: jinja2 or plotly is not installed.
    """
    try:
        import jinja2
        import plotly as plotly
    except ImportError as error:
        raise ImportError(
            f"A report is written by jinja2 and plotly, but {error.name} is not "
            f"installed; pip install 'autopar[report]'."
        ) from error
    page = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    page.filters |= {"bytes": format_bytes, "seconds": format_seconds}
    page.globals |= {
        "numbers": _NUMBERS,
        "td": _td,
        "chip": _chip,
        "users_of": users_of,
        "group_rows": group_rows,
        "stage_rows": stage_rows,
        "choice_rows": choice_rows,
        "alternative_rows": alternative_rows,
        "waiting_seconds": waiting_seconds,
        "memory_figure": memory_figure,
        "timeline_figure": timeline_figure,
        "kind_of": lambda task: _LETTERS[task.lstrip("0123456789")[0]],
        "is_finite": isfinite,
        "is_close": lambda a, b: isclose(a, b, rel_tol=1e-3),
        "assumed_trips": ASSUMED_TRIPS,
        "plotly": packed_plotly,
    }
    text = (files(__package__ or "") / "report.html").read_text(encoding="utf-8")
    return page.from_string(text).render(
        report=report,
        view=report.view,
        plan=report.view.decision,
        stages=report.view.stages,
        predicted=report.view.predicted,
        found=report.findings,
    )


def group_rows(found: Arguments) -> list[SimpleNamespace]:
    """What groups of arguments show: leaves that are alike, and trees that mirror."""
    return [
        SimpleNamespace(
            path=f"{each.path}{''.join(f' and {m}..' for m in each.mirrors)}",
            number=len(each.leaves),
            stages=", ".join(sorted({str(leaf.stage) for leaf in each.leaves})),
            shape=each.first.shape,
            local_shape=each.first.local_shape,
            spec=each.first.spec,
            mesh=each.first.mesh,
            bytes=each.bytes,
        )
        for each in found.groups
    ]


def stage_rows(report: Report, plan: StagedPlan) -> list[SimpleNamespace]:
    """What a stage's row shows; seconds of a task by its kind."""
    number, in_flight = len(plan.meshes), dict(enumerate(report.findings.in_flight))
    return [
        SimpleNamespace(
            stage=str(stage),
            submesh=stage % number,
            mesh=plan.mesh(stage),
            in_flight=in_flight.get(stage % number),
            peak=plan.peak_bytes[stage % number],
            products=products(report.view, stage),
            **{kind: plan.task_seconds(stage, kind) for kind in get_args(TaskKind)},
        )
        for stage in range(plan.num_stages)
    ]


def alternative_rows(report: Report) -> list[SimpleNamespace]:
    """What other plans cost; of one that cannot be, why."""
    step = report.view.predicted.step_seconds or 1.0
    rows = []
    for each in report.alternatives:
        found = None if each.plan is None else each.plan.predicted
        gap = inf if found is None else found.optimality_gap
        rows.append(
            SimpleNamespace(
                title=each.title,
                where=each.choice or each.refusal,
                found=found,
                ratio=None if found is None else found.step_seconds / step,
                gap=f"{gap:.2%}" if isfinite(gap) else "–",
            )
        )
    return rows


def choice_rows(report: Report) -> list[SimpleNamespace]:
    """The largest choices, and what their runners-up would add."""
    rows = []
    for each in report.choices:
        priced = ("",) * 4 if each.after is None else changes(each.before, each.after)
        names = ("step", "compute", "collectives", "memory")
        figures = dict(zip(names, priced, strict=True))
        held_by = "; ".join(each.holders) or "nothing: the cheapest"
        rows.append(SimpleNamespace(**vars(each), **figures, held_by=held_by))
    return rows


def users_of(curve: MemoryCurve) -> list[MemoryUser]:
    """What is held at the peak, with all that is not listed as one: they add up."""
    users = curve.users[:MOST_USERS]
    rest = max(curve.bytes) - sum(user.bytes for user in users)
    listed = [MemoryUser(user.name, user.bytes, _short(user.note)) for user in users]
    words = "smaller values and results, and what the model is corrected by"
    return [*listed, *([MemoryUser("all else", rest, words)] if rest else [])]


def _short(note: str) -> str:
    """A note whose source line is short."""
    kind, comma, source = note.rpartition(", ")
    return f"{kind}{comma}{format_source(source)}" if comma else note


def _td(row: Any, column: tuple[str, str, str], is_head: bool) -> Markup:
    """A cell of a table: `column` has its heading, its kind, and what it shows."""
    from markupsafe import Markup

    heading, kind, path = column
    value: Any = row
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    shown, sorted_by = value, None
    if kind in _NUMBERS:
        words = {
            "seconds": format_seconds,
            "bytes": format_bytes,
            "count": "{:,}".format,
            "part": "{:.1%}".format,
            "ratio": "{:.2f}".format,
        }
        shown, sorted_by = ("–", None) if value is None else (words[kind](value), value)
    elif kind == "code":
        shown = Markup("<code>{}</code>").format(value)
    elif kind == "shape":
        shown = f"[{', '.join(map(str, value))}]"
    elif kind == "spec":
        shown = _spec(value, len(row.shape), row.mesh)
    elif kind == "states":
        words = [
            Markup("{} {}").format(_chip(row.mesh, axis), state_words(state))
            for axis, state in enumerate(value or ())
        ]
        shown = (
            Markup("<span>{}</span>").format(Markup(" ").join(words)) if words else ""
        )
    elif kind == "axes":
        mesh: MeshShape = row.mesh
        if all(name in mesh.axis_names for name in value.split(",")):
            axes = map(mesh.index_of, value.split(","))
            chips = Markup("").join(_chip(mesh, axis) for axis in axes)
            shown = Markup("<span>{}</span>").format(chips)
    name = Markup("th scope=row" if is_head else "td")
    attributes = Markup("" if sorted_by is None else f' data-value="{sorted_by!r}"')
    css = "number" if kind in _NUMBERS else "words"
    start = Markup('<{} class="{}" data-label="{}"{}>').format(
        name, css, heading, attributes
    )
    return start + Markup("{}</{}>").format(shown, "th" if is_head else "td")


def _chip(mesh: MeshShape, axis: int) -> Markup:
    """The name of a mesh axis in its colour."""
    from markupsafe import Markup

    name, colour = mesh.axis_names[axis], axis % NUM_COLOURS
    return Markup('<span class="axis a{}">{}</span>').format(colour, name)


def _spec(spec: Spec, rank: int, mesh: MeshShape) -> Markup:
    """A spec such as `[data, -]`, each axis in its colour."""
    from markupsafe import Markup

    dims = [
        Markup("+").join(_chip(mesh, axis) for axis in axes_of_dim(spec, dim)) or "-"
        for dim in range(rank)
    ]
    return Markup('<code class="spec">[{}]</code>').format(Markup(", ").join(dims))
