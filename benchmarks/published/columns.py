"""Names of columns and their entries, as published tables write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from benchmarks.published.machines import table_of

TFLOPS = "_tflops"
_MEANT, _SYSTEM = (
    {name: key.strip("_") for key, names in table.items() for name in names.split()}
    for table in (table_of("columns")["columns"], table_of("columns")["systems"])
)
_UNIT = re.compile(r"[\s_(\[,:]*(?:tflops?|teraflops?)(?:\b|_|$|/).*")
_NOT_MEASURED = ("", "-", "–", "—", "n/a", "na", "nan", "none")
_OUT_OF_MEMORY = ("oom", "x", "×", "✗", "0", "0.0", "-1", "-1.0", "out of memory")
_WHOLE = re.compile(r"\d+(,\d{3})*(\.0+)?")


@dataclass(frozen=True)
class Cell:
    """A measured number, in Tflop/s a GPU; a starred one was projected by its authors.

    None: it ran out of memory.
    """

    column: str
    tflops: float | None
    is_projected: bool


def column_name(text: str) -> str:
    """`alpa_tflops` of `Alpa (TFLOPS/GPU)`, `tp` of `Tensor model-parallel size`.

    Other units than Tflop/s are left out. A column that names no system is `_tflops`.
    """
    name = text.strip().lower()
    measured = _UNIT.search(name)
    name = name[: measured.start()] if measured else name.split("(")[0]
    name = "_".join(re.findall(r"[^\W_]+", name))
    if measured:
        return _SYSTEM.get(name, name) + TFLOPS
    for system in set(_SYSTEM.values()) - {""}:
        if name.startswith(f"{system}_"):
            rest = name.removeprefix(f"{system}_")
            return f"{system}_{_MEANT.get(rest, rest)}"
    return _MEANT.get(name, name)


def nearest(column: str, names: Sequence[str]) -> str:
    """Who a missing column may be: `; is it 'layrs'?`, or nothing."""
    by_lower = {column_name(name): name for name in names}
    close = get_close_matches(column, by_lower, 1, 0.7)
    return f"; is it {by_lower[close[0]]!r}?" if close else ""


def cell_of(name: str, text: str) -> Cell | None:
    """The entry of a column of Tflop/s; None if nothing was measured."""
    number, column = text.strip().lower(), name.removesuffix(TFLOPS)
    if number in _NOT_MEASURED:
        return None
    if number in _OUT_OF_MEMORY:
        return Cell(column, None, False)
    is_projected = number.endswith("*")
    return Cell(column, positive(name, number.removesuffix("*")), is_projected)


def whole(record: Mapping[str, str], column: str, default: int = 0) -> int:
    """A column's whole number above 0; `default`, if there is one, where it is blank.

    Raises:
      KeyError: there is no such column.
      ValueError: it is none.
    """
    if default and not record.get(column, "").strip():
        return default
    text = record[column].strip()
    number = int(float(text.replace(",", ""))) if _WHOLE.fullmatch(text) else 0
    if not number:
        raise ValueError(f"`{column}` is a whole number above 0, but got {text!r}.")
    return number


def positive(column: str, text: str) -> float:
    """A number above 0; raises ValueError if it is none."""
    number = 0.0
    if re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text.strip().lower()):
        number = float(text)
    if not number:
        raise ValueError(f"`{column}` is a number above 0, but got {text!r}.")
    return number
