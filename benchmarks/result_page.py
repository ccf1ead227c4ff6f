"""Results as one HTML page that needs nothing else: a table and bars for each suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite

from benchmarks.results import NOISE, Result, ResultFile

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 70em; }
table { border-collapse: collapse; margin: 0 0 2em; }
td, th { padding: 2px 12px 2px 0; text-align: right; vertical-align: top; }
td { white-space: nowrap; }
td:first-child, th:first-child { text-align: left; }
td:last-child { text-align: left; max-width: 30em; white-space: normal; }
svg { display: block; margin: 4px 0 12px; }
rect { fill: #4477aa; }
text { font: 12px system-ui, sans-serif; }
"""
_BAR, _ROW, _LABEL = 360, 18, 380  # widths and heights in pixels


def page(file: ResultFile) -> str:
    """The page's text."""
    suites = dict.fromkeys(each.suite for each in file.results)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>autopar bench</title><style>{_STYLE}</style></head><body>",
        f"<h1>autopar bench</h1><p>{escape(str(file.machine))}</p>",
    ]
    for suite in suites:
        results = [each for each in file.results if each.suite == suite]
        parts.append(f"<h2>{escape(suite)}</h2>")
        parts.append(_table(results))
        parts += _plots(results)
    return "\n".join([*parts, "</body></html>\n"])


def _columns(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(n for r in results for n in (*r.values, *r.timed)))


def _table(results: Sequence[Result]) -> str:
    columns = _columns(results)
    names = (escape(name).replace("_", "_<wbr>") for name in columns)
    head = "".join(f"<th>{name}</th>" for name in ("case", *names, "note"))
    rows = []
    for each in results:
        numbers = {**each.values, **each.timed}
        cells = [_text(numbers[n]) if n in numbers else "" for n in columns]
        texts = (each.case, *cells, each.note)
        rows.append("".join(f"<td>{escape(text)}</td>" for text in texts))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(value: float) -> str:
    """Bytes and counts in full, other numbers in four digits."""
    if not isfinite(value):
        return "unknown"
    if abs(value) <= NOISE:
        return "0"
    is_whole = abs(value) >= 1 and value == int(value)
    return f"{value:,.0f}" if is_whole else f"{value:.4g}"


def _plots(results: Sequence[Result]) -> Iterator[str]:
    """Bars of each number that two cases have or more, from zero."""
    for name in _columns(results):
        pairs = [
            (each.case, {**each.values, **each.timed}[name])
            for each in results
            if name in each.values or name in each.timed
        ]
        pairs = [(case, value) for case, value in pairs if isfinite(value)]
        most = max((value for _, value in pairs), default=0.0)
        if len(pairs) < 2 or most <= NOISE:
            continue
        lines = []
        for row, (case, value) in enumerate(pairs):
            top, width = row * _ROW, max(value, 0.0) / most * _BAR
            behind = _LABEL + width + 6
            lines.append(
                f"<text x='{_LABEL - 8}' y='{top + 13}' text-anchor='end'>"
                f"{escape(case)}</text>"
                f"<rect x='{_LABEL}' y='{top + 3}' width='{width:.1f}' height='12'/>"
                f"<text x='{behind:.1f}' y='{top + 13}'>{_text(value)}</text>"
            )
        height = len(pairs) * _ROW
        yield (
            f"<h3>{escape(name)}</h3><svg width='{_LABEL + _BAR + 90}' "
            f"height='{height}'>{''.join(lines)}</svg>"
        )
