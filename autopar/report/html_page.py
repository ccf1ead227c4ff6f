"""The whole page: sections, style, script and the plotting library, in one file."""

from __future__ import annotations

from importlib.resources import files

from .figures import packed_plotly
from .html_comparisons import alternatives_section, audit_section
from .html_details import (
    arguments_section,
    collectives_section,
    compute_section,
    memory_section,
)
from .html_elements import Html, join, tag
from .html_summary import cautions_section, devices_section, headline
from .report import Report

# Nothing is fetched: whatever the page tried would be refused.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "img-src data:"
)
_LINKS = (
    ("headline", "Headline"),
    ("cautions", "Warnings"),
    ("devices", "Devices"),
    ("arguments", "Arguments"),
    ("compute", "Compute"),
    ("collectives", "Communication"),
    ("memory", "Memory"),
    ("alternatives", "Alternatives"),
    ("audit", "Audit"),
)


def page_of(report: Report) -> str:
    """The page as text.

    Raises:
      ImportError: plotly is not installed.
    """
    title = f"autopar: plan of {report.decision.function}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", _part("report.css")),
    )
    links = [tag("a", words, href=f"#{name}") for name, words in _LINKS]
    main = tag(
        "main",
        headline(report),
        cautions_section(report),
        devices_section(report),
        arguments_section(report),
        compute_section(report),
        collectives_section(report),
        memory_section(report),
        alternatives_section(report),
        audit_section(report),
    )
    body = tag(
        "body",
        tag("nav", links, aria_label="sections"),
        main,
        tag("footer", _FOOTER),
        tag("script", Html(packed_plotly()), type="text/plain", id="plotly"),
        tag("script", _part("report.js")),
    )
    return join(Html("<!doctype html>"), tag("html", head, body, lang="en"), "\n")


_FOOTER = (
    "Seconds and bytes are predictions of autopar's cost model: seconds of one step, "
    "bytes of one device, unless a heading says otherwise."
)


def _part(name: str) -> Html:
    return Html((files(__package__ or "") / name).read_text(encoding="utf-8"))
