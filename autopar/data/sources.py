"""Sources of data: examples by number, or batches one after the other.

A reader gives the next batch with the position behind it, as JSON has it, and starts at
such a position.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from .placing import Placing

Position = dict[str, Any]


class Reader(Protocol):
    """Where batches come from; `position` is that of the next."""

    @property
    def position(self) -> Position: ...
    def read(self) -> Any:
        """The next batch, placed; raises StopIteration at the end."""


@dataclass(eq=False)
class ExampleReader:
    """Batches of examples that a source gives by number, `source[i]`.

    Examples are numbered through all epochs, each shuffled for itself; a batch is the
    next `size` of them. A process reads those that its devices hold.
    """

    source: Any
    placing: Placing
    length: int
    seed: int | None
    num_epochs: int | None
    next_example: int = 0

    @property
    def position(self) -> Position:
        return {"samples": self.next_example, "of": self.length, "seed": self.seed}

    def read(self) -> Any:
        first, size = self.next_example, self.placing.size
        if self.num_epochs and first + size > self.num_epochs * self.length:
            raise StopIteration
        numbers = self._shuffled(first + self.placing.rows)
        batch = self.placing.placed(self._examples(numbers))
        self.next_example += size
        return batch

    def _shuffled(self, examples: np.ndarray) -> np.ndarray:
        """The numbers in the source of examples as they are numbered here."""
        epochs, numbers = np.divmod(examples, self.length)
        if self.seed is None:
            return numbers
        found = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            order = np.random.default_rng((self.seed, epoch)).permutation(self.length)
            found[epochs == epoch] = order[numbers[epochs == epoch]]
        return found

    def _examples(self, numbers: np.ndarray) -> list[np.ndarray]:
        """A leaf for each of the batch, with the examples of these numbers."""
        if is_tree_of_arrays(self.source):
            leaves = self.placing.leaves_of(self.source, "the source")
            return [np.asarray(leaf[numbers]) for leaf in leaves]
        examples = [
            self.placing.leaves_of(self.source[int(i)], f"example {i}") for i in numbers
        ]
        leaves = list(zip(*examples, strict=True))
        return [
            _stacked(path, leaf)
            for path, leaf in zip(self.placing.paths, leaves, strict=True)
        ]


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
        leaves = self.placing.leaves_of(batch, f"batch {self.num_batches}")
        # A source may use its memory again, and JAX take it as it is.
        found = self.placing.placed([np.array(leaf) for leaf in leaves])
        self.num_batches += 1
        return found


def reader_of(
    source: Any,
    placing: Placing,
    seed: int | None,
    num_epochs: int | None,
    position: Mapping[str, Any] | None,
) -> Reader:
    """A reader of a source, at a position that it gave, or at the start.

    Raises:
      TypeError: it is no source.
      ValueError: it is too short, or the position is of another source.
    """
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        length = _length(source)
        if length < placing.size:
            raise ValueError(
                f"A batch takes {placing.size} examples, but the source has {length}; "
                f"plan the step for a smaller batch."
            )
        reader = ExampleReader(source, placing, length, seed, num_epochs)
        if position is not None:
            expected = {**reader.position, "samples": position.get("samples")}
            if expected != position or expected["samples"] is None:
                raise _of_another_source(position, expected)
            reader.next_example = position["samples"]
        return reader
    if seed is not None or num_epochs is not None:
        raise ValueError(
            f"seed= and num_epochs= are for a source with examples by number, but "
            f"{type(source).__name__} has no len() or no [i]; shuffle and repeat in it."
        )
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


def is_tree_of_arrays(source: Any) -> bool:
    """Whether a source is arrays with all examples: one, or a dict or tuple of them."""
    if not isinstance(source, np.ndarray | jax.Array | Mapping | tuple):
        return False
    leaves = jax.tree.leaves(source)
    return bool(leaves) and all(getattr(leaf, "ndim", 0) for leaf in leaves)


def _length(source: Any) -> int:
    """The number of examples.

    Raises:
      ValueError: arrays of different lengths.
    """
    if not is_tree_of_arrays(source):
        return len(source)
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(source)}
    if len(lengths) > 1:
        raise ValueError(
            f"The arrays of a source hold the same examples along dim 0, but they are "
            f"{sorted(lengths)} long."
        )
    return lengths.pop()


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


def _stacked(path: str, leaves: tuple[Any, ...]) -> np.ndarray:
    try:
        return np.stack([np.asarray(leaf) for leaf in leaves])
    except ValueError as error:
        raise ValueError(
            f"The examples of a batch have one shape, but {path} does not: {error}."
        ) from error


def _as_json(state: Any) -> Any:
    """The state of an iterator; bytes as text."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return state


def _from_json(state: Any) -> Any:
    is_bytes = isinstance(state, dict) and state.keys() == {"base64"}
    return base64.b64decode(state["base64"]) if is_bytes else state
