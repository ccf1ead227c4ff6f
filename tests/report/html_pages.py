"""Reads a page of ours without a browser: elements, tables, and data in scripts."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img", "input", "hr"}


@dataclass
class Page(HTMLParser):
    """What stands in a page.

    `elements` are names with their attributes; `texts` the whole text of each element
    of a name; `rows` those of each table, by its id, with the heading first.
    """

    text: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    text_by_id: dict[str, str] = field(default_factory=dict)
    rows: dict[str, list[list[str]]] = field(default_factory=dict)
    unclosed: list[str] = field(default_factory=list)
    _values: dict[str, list[list[str | None]]] = field(default_factory=dict)
    _open: list[tuple[str, dict[str, str | None], list[str]]] = field(
        default_factory=list
    )
    _tables: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.text)
        self.close()
        self.unclosed = [name for name, _, _ in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append((tag, found))
        if tag == "table":
            self._tables.append(found.get("id") or "")
            self.rows[self._tables[-1]] = []
        if tag == "tr" and self._tables:
            self.rows[self._tables[-1]].append([])
            self._values.setdefault(self._tables[-1], []).append([])
        if tag in ("td", "th") and self._tables:
            self._values[self._tables[-1]][-1].append(found.get("data-value"))
        if tag not in VOID:
            self._open.append((tag, found, []))

    def handle_data(self, data: str) -> None:
        for _, _, parts in self._open:
            parts.append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1][0] == tag, f"</{tag}> closes nothing"
        name, attributes, parts = self._open.pop()
        text = "".join(parts)
        self.texts.setdefault(name, []).append(text)
        if attributes.get("id"):
            self.text_by_id[str(attributes["id"])] = text
        if tag in ("td", "th") and self._tables:
            self.rows[self._tables[-1]][-1].append(text)
        if tag == "table":
            self._tables.pop()

    def value(self, name: str) -> str:
        """The exact value of the `data` element with an id."""
        return next(
            str(found["value"])
            for tag, found in self.elements
            if tag == "data" and found.get("id") == name
        )

    def numbers(self, table: str, heading: str) -> list[float]:
        """The exact values of the cells below a heading."""
        place = self.rows[table][0].index(heading)
        return [float(row[place] or "nan") for row in self._values[table][1:]]

    def column(self, table: str, heading: str) -> list[str]:
        """The cells below a heading."""
        head, *rows = self.rows[table]
        place = head.index(heading)
        return [row[place] for row in rows]
