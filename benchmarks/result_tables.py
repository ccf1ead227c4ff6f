"""Results as tables in a terminal, one for each suite."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.results import Result, with_unit, without_unit


def suite_table(suite: str, results: Sequence[Result]) -> Group:
    """A row for each case with numbers; reasons and failures are lines below."""
    columns = list(dict.fromkeys(name for each in results for name in each.numbers))
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("case", overflow="fold")
    for name in columns:
        words = without_unit(name).replace(" ", "\n")
        table.add_column(words, justify="right", no_wrap=True)
    rows = [each for each in results if each.numbers]
    has_notes = any(each.note for each in rows)
    if has_notes:
        table.add_column("", overflow="fold")
    for each in rows:
        numbers = each.numbers
        cells = [with_unit(n, numbers[n]) if n in numbers else "" for n in columns]
        table.add_row(
            Text(each.case), *cells, *([Text(each.note)] if has_notes else [])
        )
    below = [Text(line) for line in _told(results)]
    return Group(Text(suite, style="bold"), *([table] if rows else []), *below)


def _told(results: Sequence[Result]) -> list[str]:
    lines = [
        f"{each.case}: refused: {each.note}"
        for each in results
        if each.note and not each.numbers
    ]
    lines += [
        f"{each.case}: failed: {each.failure.split('; ')[0]}"  # the rule, the value
        for each in results
        if each.failure
    ]
    return lines
