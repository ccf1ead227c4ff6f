"""Sources of data: examples by number, or batches one after the other.

A reader gives the next batch with the position behind it, as JSON has it, and starts at
such a position.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..state.examples import Examples
from .placing import Placing

Position = dict[str, Any]


@dataclass(eq=False)
class ExampleReader:
    """Batches of examples that a source gives by number; each is the next of them.

    `batch_at` makes the one from an example on; there are none from `end` on.
    """

    examples: Examples
    batch_at: Callable[[int], Any]
    end: int | None
    next_example: int = 0

    @staticmethod
    def at(
        examples: Examples,
        batch_at: Callable[[int], Any],
        end: int | None,
        position: Mapping[str, Any] | None,
    ) -> ExampleReader:
        """At a position that one gave, or at the start.

        Raises:
          ValueError: the position is of another source.
        """
        reader = ExampleReader(examples, batch_at, end)
        if position is not None:
            expected = {**reader.position, "samples": position.get("samples")}
            if expected != position or expected["samples"] is None:
                raise _of_another_source(position, expected)
            reader.next_example = position["samples"]
        return reader

    @property
    def position(self) -> Position:
        examples, first = self.examples, self.next_example
        return {"samples": first, "of": examples.length, "seed": examples.seed}

    def read(self) -> Any:
        first, size = self.next_example, self.examples.tree.size
        if self.end is not None and first + size > self.end:
            raise StopIteration
        batch = self.batch_at(first)
        self.next_example += size
        return batch


@dataclass(eq=False)
class BatchReader:
    """Batches that an iterator gives: all rows, or those of this process."""

    source: Iterator[Any]
    placing: Placing
    num_batches: int = 0

    @property
    def position(self) -> Position:
        state = getattr(self.source, "get_state", None)
        kept = {} if state is None else {"state": _as_json(state())}
        return {"batches": self.num_batches, **kept}

    def read(self) -> Any:
        batch = next(self.source)
        leaves = self.placing.tree.leaves_of(batch, f"batch {self.num_batches}")
        # A source may use its memory again, and JAX take it as it is.
        found = self.placing.placed([np.array(leaf) for leaf in leaves])
        self.num_batches += 1
        return found


Reader = ExampleReader | BatchReader


def is_by_number(source: Any) -> bool:
    """Whether a source gives its examples by number."""
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def batch_reader(
    source: Any, placing: Placing, position: Mapping[str, Any] | None
) -> BatchReader:
    """A reader of what is iterated, at a position that one gave, or at the start.

    Raises:
      TypeError: it is no source.
      ValueError: the position is of another source, or behind its end.
    """
    try:
        batches = iter(source)
    except TypeError:
        raise TypeError(
            f"A source of data gives examples by number, source[i] and len(source), or "
            f"is iterated for batches, but got a {type(source).__name__}."
        ) from None
    reader = BatchReader(batches, placing)
    if position is not None:
        _forward(reader, position)
    return reader


def _forward(reader: BatchReader, position: Mapping[str, Any]) -> None:
    """Goes to a position: by the source's own state, else batch by batch.

    Raises:
      ValueError: it is of another source, or behind the end of this one.
    """
    number, source = position.get("batches"), reader.source
    has_state = hasattr(source, "set_state")
    if number is None or has_state != ("state" in position):
        raise _of_another_source(position, reader.position)
    if has_state:
        source.set_state(_from_json(position["state"]))  # type: ignore[attr-defined]
    else:
        for skipped in range(number):
            try:
                next(source)
            except StopIteration:
                raise ValueError(
                    f"The source goes on behind the {number} batches that were taken, "
                    f"but ended after {skipped}; give the one that was interrupted, as "
                    f"it was at its start."
                ) from None
    reader.num_batches = number


def _of_another_source(position: Any, expected: Any) -> ValueError:
    return ValueError(
        f"A source goes on at a position of its own, such as {expected}, but got "
        f"{position}; give the source, and the seed, that were interrupted."
    )


def _as_json(state: Any) -> Any:
    """The state of an iterator; bytes as text."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return state


def _from_json(state: Any) -> Any:
    is_bytes = isinstance(state, dict) and state.keys() == {"base64"}
    return base64.b64decode(state["base64"]) if is_bytes else state
