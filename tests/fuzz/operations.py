"""The table of operations: each writes one line of Python from values that fit it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.scope import Scope

# Text of a line's right side, and how many values it makes.
Written = str | tuple[str, int]
Writer = Callable[[Scope], Written]


@dataclass(frozen=True)
class Operation:
    """How often it is drawn relative to others, and what writes it.

    `smooth` operations can be differentiated in reverse; `topic` groups them.
    """

    name: str
    topic: str
    write: Writer
    weight: int
    smooth: bool


OPERATIONS: dict[str, Operation] = {}


def operation(
    topic: str, weight: int = 1, *, smooth: bool = True
) -> Callable[[Writer], Writer]:
    """Make the decorated writer an operation, named as it is."""

    def decorate(write: Writer) -> Writer:
        name = write.__name__.rstrip("_")
        assert name not in OPERATIONS, name
        OPERATIONS[name] = Operation(name, topic, write, weight, smooth)
        return write

    return decorate
