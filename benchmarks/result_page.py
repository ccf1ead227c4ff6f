"""Results as one HTML page that needs nothing else: a table and bars for each suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import isfinite

from benchmarks.comparison import Comparison
from benchmarks.results import NOISE, Result, ResultFile, with_unit, without_unit

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 76em;
  padding: 0 1em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 0 0 1em; }
td, th { padding: 2px 12px 2px 0; text-align: right; vertical-align: top; }
th { border-bottom: 1px solid #8888; }
td { white-space: nowrap; font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; }
td:last-child { text-align: left; min-width: 12em; white-space: normal; }
.plots { display: flex; flex-wrap: wrap; gap: 0 2em; }
figure { margin: 0 0 1.5em; }
figcaption { font-weight: 600; }
svg { display: block; max-width: 100%; height: auto; }
rect { fill: #4477aa; }
rect.ours { fill: #228833; }
line { stroke: currentColor; }
text { font: 12px system-ui, sans-serif; fill: currentColor; }
.regression { color: #cc3311; }
.better { color: #228833; }
"""
_OURS = ("solver", "autopar")  # the last word of a case: what others are beside
_BAR, _ROW, _CHARACTER, _VALUE = 320, 18, 7, 96  # widths and heights in pixels


def page(file: ResultFile, comparison: Comparison | None = None) -> str:
    """The page's text, with what changed since another file."""
    suites = dict.fromkeys(each.suite for each in file.results)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>autopar bench</title><style>{_STYLE}</style></head><body>",
        f"<h1>autopar bench</h1><p>{escape(str(file.machine))}</p>",
    ]
    origin = file.origin
    if origin.command:
        told = ", ".join(each for each in (origin.day, origin.commit) if each)
        parts.append(f"<p><code>{escape(origin.command)}</code> {escape(told)}</p>")
    if comparison is not None:
        parts.append(_comparison(comparison))
    for suite in suites:
        results = [each for each in file.results if each.suite == suite]
        parts.append(f"<h2>{escape(suite)}</h2>")
        parts.append(_table(results))
        plots = "".join(_plots(results))
        parts.append(f"<div class='plots'>{plots}</div>" if plots else "")
    return "\n".join([*parts, "</body></html>\n"])


def _comparison(found: Comparison) -> str:
    lines = [f"<li>{escape(each)}</li>" for each in found.warnings]
    lines += [
        f"<li class='better'>better: {escape(str(each))}</li>"
        for each in found.improvements
    ]
    lines += [
        f"<li class='regression'>regression: {escape(str(each))}</li>"
        for each in (*found.losses, *found.regressions)
    ]
    last = escape(str(found).splitlines()[-1])
    return f"<h2>since the other file</h2><ul>{''.join(lines)}</ul><p>{last}</p>"


def _columns(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(name for each in results for name in each.numbers))


def _table(results: Sequence[Result]) -> str:
    columns = _columns(results)
    names = (escape(name).replace("_", "_<wbr>") for name in columns)
    head = "".join(f"<th scope='col'>{name}</th>" for name in ("case", *names, "note"))
    rows = []
    for each in results:
        cells = [
            _text(each.numbers[name]) if name in each.numbers else ""
            for name in columns
        ]
        failure = f"failed: {each.failure}" if each.failure else ""
        texts = (each.case, *cells, each.note or failure)
        rows.append("".join(f"<td>{escape(text)}</td>" for text in texts))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='wide'>{table}</div>"


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
            (each.case, each.numbers[name])
            for each in results
            if isfinite(each.numbers.get(name, float("nan")))
        ]
        values = [value for _, value in pairs]
        if len(pairs) < 2 or max(values) <= NOISE or len(set(values)) == 1:
            continue
        yield _plot(name, pairs)


def _plot(name: str, pairs: Sequence[tuple[str, float]]) -> str:
    """One bar a case, the label before it and the number behind it."""
    most = max(value for _, value in pairs)
    label = _CHARACTER * max(len(case) for case, _ in pairs) + 8
    lines = []
    for row, (case, value) in enumerate(pairs):
        top, width = row * _ROW, max(value, 0.0) / most * _BAR
        kind = " class='ours'" if case.endswith(_OURS) else ""
        number = escape(with_unit(name, value))
        lines.append(
            f"<text x='{label - 8}' y='{top + 13}' text-anchor='end'>"
            f"{escape(case)}</text>"
            f"<rect{kind} x='{label}' y='{top + 3}' width='{width:.1f}' height='12'>"
            f"<title>{escape(case)}: {number}</title></rect>"
            f"<text x='{label + width + 6:.1f}' y='{top + 13}'>{number}</text>"
        )
    height, width = len(pairs) * _ROW, label + _BAR + _VALUE
    caption = escape(without_unit(name))
    axis = f"<line x1='{label}' y1='0' x2='{label}' y2='{height}'/>"
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f"<svg viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
        f"role='img' aria-label='{caption} of each case'>{axis}{''.join(lines)}</svg>"
        f"</figure>"
    )
