"""HTML as nested calls: text is escaped unless it is `Html` already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

from ..plans.explain import format_bytes, format_seconds
from ..plans.plan_view import state_words
from ..sharding.mesh import MeshShape
from ..sharding.spec import Spec, axes_of_dim

_VOID = ("br", "meta")
NUM_COLOURS = 6


class Html(str):
    """Text that is markup: it stands in a page as it is."""


Child: TypeAlias = "str | Iterable[Child]"


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool) -> Html:
    """An element; `class_` is its class, `aria_label` its aria-label."""
    written = "".join(
        f" {_attribute(key)}"
        if value is True
        else f' {_attribute(key)}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Children one after the other."""
    parts = []
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(escape(child))
        else:
            parts.append(join(*child))
    return Html("".join(parts))


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


@dataclass(frozen=True)
class Column:
    """A column's heading; numbers are set to the right. `hint` explains the heading."""

    title: str
    is_number: bool = False
    hint: str = ""


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and what it is sorted by."""

    content: Child
    value: str | float = ""


def table(
    name: str,
    columns: Sequence[Column],
    rows: Iterable[Sequence[Cell]],
    *,
    caption: str,
    is_sortable: bool = False,
    has_row_heads: bool = True,
) -> Html:
    """A table that scrolls by itself where it is too wide, also by keyboard."""
    heads = [_head(column, is_sortable) for column in columns]
    lines = []
    for row in rows:
        cells = [
            _cell(cell, column, is_head=has_row_heads and number == 0)
            for number, (cell, column) in enumerate(zip(row, columns, strict=True))
        ]
        lines.append(tag("tr", cells))
    body = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", heads)),
        tag("tbody", lines),
        id=name,
        class_="sortable" if is_sortable else "plain",
    )
    return tag("div", body, class_="scroll", tabindex=0, role="region", aria_label=name)


def _head(column: Column, is_sortable: bool) -> Html:
    title: Child = column.title
    if is_sortable:
        title = tag("button", column.title, type="button")
    return tag(
        "th",
        title,
        scope="col",
        class_="number" if column.is_number else "words",
        **({"title": column.hint} if column.hint else {}),
    )


def _cell(cell: Cell, column: Column, is_head: bool) -> Html:
    kind = "number" if column.is_number else "words"
    sorted_by = {} if cell.value == "" else {"data_value": cell.value}
    if is_head:
        return tag("th", cell.content, scope="row", class_=kind, **sorted_by)
    return tag("td", cell.content, class_=kind, **sorted_by)


def seconds_cell(seconds: float | None) -> Cell:
    """Seconds in a unit that fits; a dash where they are not known."""
    return Cell("–") if seconds is None else Cell(format_seconds(seconds), seconds)


def bytes_cell(num_bytes: int) -> Cell:
    """Bytes in a unit that fits."""
    return Cell(format_bytes(num_bytes), num_bytes)


def count_cell(count: int) -> Cell:
    """A whole number."""
    return Cell(f"{count:,}", count)


def path_text(path: str, prefix: str = "") -> Html:
    """The path, of which what is known from around is only read out and found."""
    if prefix and path.startswith(prefix) and path != prefix:
        hidden = tag("span", prefix, class_="hidden")
        return tag("code", hidden, path[len(prefix) :], title=path)
    return tag("code", path)


def axis_chip(mesh: MeshShape, axis: int) -> Html:
    """The name of a mesh axis in its colour."""
    colour = axis % NUM_COLOURS
    return tag("span", mesh.axis_names[axis], class_=f"axis a{colour}")


def axes_text(axes: str, mesh: MeshShape) -> Html:
    """Axes with commas between, each in its colour; other text stays as it is."""
    names = axes.split(",")
    if not all(name in mesh.axis_names for name in names):
        return join(axes)
    return tag("span", [axis_chip(mesh, mesh.index_of(n)) for n in names])


def spec_text(spec: Spec, rank: int, mesh: MeshShape) -> Html:
    """A spec such as `[data, -]`, each axis in its colour."""
    parts: list[Html | str] = []
    for dim in range(rank):
        axes = axes_of_dim(spec, dim)
        chips: list[Html | str] = []
        for axis in axes:
            chips += [*(["+"] if chips else []), axis_chip(mesh, axis)]
        parts += [*([", "] if parts else []), *(chips or ["-"])]
    return tag("code", "[", parts, "]", class_="spec")


def states_text(spec: Spec, mesh: MeshShape) -> Html:
    """What each mesh axis does to a tensor: `x dim 0`, `y sum`."""
    parts: list[Child] = []
    for axis, state in enumerate(spec):
        parts.append((axis_chip(mesh, axis), f" {state_words(state)}  "))
    return tag("span", parts, class_="spec")


def missing_note(reason: str) -> Html:
    """Why there is nothing to show, and how to get it."""
    return tag("p", tag("strong", "Not shown: "), reason, class_="missing")
