"""One node of a JSON document, read with its place, so that an error can name it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..clusters.hardware import nearest
from ..errors import PlanFileError

_NON_FINITE = {"inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Record:
    """A value of a document; `field` is the way to it, such as `tensors[3].shape`.

    Every method that finds something else than it is asked for raises `PlanFileError`
    with the document's name, the field and the reason.
    """

    where: str
    field: str
    value: Any

    def fail(self, reason: str) -> NoReturn:
        """Raises PlanFileError for this field."""
        raise PlanFileError(
            f"{self.where}: `{self.field}` {reason}; plan again, or undo the edit."
        )

    def fields(
        self, names: Collection[str], optional: Collection[str] = ()
    ) -> Mapping[str, Record]:
        """The members of an object that has `names` and no others but `optional`."""
        if not isinstance(self.value, dict):
            self.fail(f"must be an object, but got {_short(self.value)}")
        prefix = f"{self.field}." if self.field else ""
        for name in self.value:
            if name not in names and name not in optional:
                known = (*names, *optional)
                Record(self.where, f"{prefix}{name}", None).fail(
                    f"is unknown{nearest(name, known)}"
                )
        for name in names:
            if name not in self.value:
                Record(self.where, f"{prefix}{name}", None).fail("is missing")
        return {
            name: Record(self.where, f"{prefix}{name}", value)
            for name, value in self.value.items()
        }

    def member(self, name: str) -> Record:
        """A member of an object, which may have others."""
        return self.fields([name], self.value)[name]

    def items(self) -> Iterator[Record]:
        """The members of a list."""
        if not isinstance(self.value, list):
            self.fail(f"must be a list, but got {_short(self.value)}")
        for index, value in enumerate(self.value):
            yield Record(self.where, f"{self.field}[{index}]", value)

    def text(self, allowed: Collection[str] = ()) -> str:
        """A string, one of `allowed` if any are given."""
        if not isinstance(self.value, str):
            self.fail(f"must be a string, but got {_short(self.value)}")
        if allowed and self.value not in allowed:
            self.fail(f"must be one of {', '.join(allowed)}, but got {self.value!r}")
        return self.value

    def integer(self, least: int = 0, below: int | None = None) -> int:
        """A whole number in `[least, below)`."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(f"must be an integer >= {least}, but got {_short(value)}")
        if below is not None and value >= below:
            self.fail(f"must be below {below}, but got {value}")
        return value

    def integers(self, least: int = 0, below: int | None = None) -> tuple[int, ...]:
        """A list of whole numbers."""
        return tuple(item.integer(least, below) for item in self.items())

    def number(self) -> float:
        """A float; infinities are written as strings."""
        if isinstance(self.value, str) and self.value in _NON_FINITE:
            return _NON_FINITE[self.value]
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            self.fail(f"must be a number, but got {_short(self.value)}")
        return float(self.value)

    def flag(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.fail(f"must be true or false, but got {_short(self.value)}")
        return self.value


def read_json(text: str, where: str) -> Record:
    """The root of a JSON document.

    Raises:
      PlanFileError: the text is no JSON; says where it stops to be.
    """
    try:
        return Record(where, "", json.loads(text))
    except json.JSONDecodeError as error:
        raise PlanFileError(
            f"{where}: the file is no JSON, or truncated, at line {error.lineno}, "
            f"column {error.colno}: {error.msg}; save the plan again."
        ) from None


def number_to_json(value: float) -> float | str:
    """A number as strict JSON can say it; `Record.number` reads it back equal."""
    assert not math.isnan(value), "a plan holds no NaN"
    return float(value) if math.isfinite(value) else str(float(value))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
