"""Look-up by name, with the nearest name suggested on a typo."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def look_up(kind: str, name: str, value_by_name: Mapping[str, Value]) -> Value:
    """Return the value called `name`.

    Raises:
        ValueError: if there is none; the text suggests the nearest `kind` by name.
    """
    if name in value_by_name:
        return value_by_name[name]
    known = ", ".join(value_by_name)
    nearest = difflib.get_close_matches(name.lower(), value_by_name, n=1)
    remedy = f"did you mean {nearest[0]!r}?" if nearest else "use one of them."
    raise ValueError(f"the {kind} must be one of {known}, but got {name!r}; {remedy}")
