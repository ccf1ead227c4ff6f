"""Examples that a source gives by number, and the rows of batches made of them.

They are numbered through all epochs, each of which is shuffled for itself. Rows of a
leaf may be read by who uses them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np

from .batch_tree import BatchTree
from .distributed_array import DistributedArray, ReadWhenAsked

_MOST_SHUFFLED = 1 << 32  # 32 GiB of numbers; endless sources have more


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of a source as rows of batches of a tree.

    Those that arrays hold are taken from these leaf by leaf, others as whole examples.
    `length` is the number of one epoch; without a `seed` they come in order.

    Raises:
      ValueError: arrays of different lengths, fewer examples than a batch, or more than
        can be shuffled.
    """

    source: Any
    tree: BatchTree
    seed: int | None

    def __post_init__(self) -> None:
        if self.length < self.tree.size:
            raise ValueError(
                f"A batch takes {self.tree.size} examples, but the source has "
                f"{self.length}; plan the step for a smaller batch."
            )
        if self.seed is not None and self.length > _MOST_SHUFFLED:
            raise ValueError(
                f"An epoch is shuffled with `seed` in memory, at most "
                f"{_MOST_SHUFFLED} examples, but the source has {self.length}; leave "
                f"`seed` out and shuffle in the source, before it is repeated."
            )

    @cached_property
    def length(self) -> int:
        """The number of examples in an epoch."""
        return _length(self.source)

    def rows(
        self, first: int, wanted: Mapping[int, np.ndarray]
    ) -> dict[int, np.ndarray]:
        """Rows of some leaves, by their numbers, of the batch from an example on.

        Raises:
          ValueError: examples of another tree, shape or dtype.
          Exception: what the source raised, with a note that says for which example.
        """
        if is_tree_of_arrays(self.source):
            leaves = self.tree.leaves_of(self.source, "the source")
            return {
                leaf: self.tree.typed(leaf, self._taken(leaves[leaf], first + rows))
                for leaf, rows in wanted.items()
            }
        every = np.unique(np.concatenate([*wanted.values()]))
        examples = [self._example(i) for i in self._shuffled(first + every).tolist()]
        return {
            leaf: self.tree.typed(
                leaf,
                _stacked(
                    self.tree.paths[leaf],
                    [examples[i][leaf] for i in np.searchsorted(every, rows)],
                ),
            )
            for leaf, rows in wanted.items()
        }

    def _taken(self, array: Any, numbers: np.ndarray) -> np.ndarray:
        numbers = self._shuffled(numbers)
        with _noted(f"examples {numbers.min()} to {numbers.max()}"):
            return np.asarray(array[numbers])

    def _example(self, number: int) -> list[Any]:
        with _noted(f"example {number}"):
            example = self.source[number]
        if example is None:
            raise ValueError(
                f"A source gives an example for each number below its length, but "
                f"example {number} is None, as what a filter left out; give batches of "
                f"what is left (with grain, source.to_iter_dataset().batch(...))."
            )
        return self.tree.leaves_of(example, f"example {number}")

    def _shuffled(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers in the source of examples as they are numbered here."""
        epochs, found = np.divmod(numbers, self.length)
        if self.seed is not None:
            for epoch in np.unique(epochs).tolist():
                order = _order(self.seed, epoch, self.length)
                found[epochs == epoch] = order[found[epochs == epoch]]
        return found


@dataclass(frozen=True, eq=False)
class HostSource:
    """Examples that hosts read for themselves: `packed` is what they are sent, once.

    They read `num_ahead` batches ahead, and no example from `end` on.
    """

    examples: Examples
    packed: bytes
    num_ahead: int
    end: int | None

    def batch(self, first: int) -> Any:
        """The batch from an example on, none of which is read here."""
        leaves = [
            DistributedArray((LoadedRows(self, first, i),))
            for i, _ in enumerate(self.examples.tree.kinds)
        ]
        return jax.tree.unflatten(self.examples.tree.structure, leaves)


@dataclass(frozen=True, eq=False)
class LoadedRows(ReadWhenAsked):
    """Rows of one leaf of a batch, which whoever uses them reads from the source.

    Of the batch from example `first` on, row `start` and every `stride`-th after it. It
    is a chunk of a `DistributedArray`.
    """

    source: HostSource
    first: int
    leaf: int
    start: int = 0
    stride: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of these rows."""
        kind = self.source.examples.tree.kinds[self.leaf]
        return (kind.shape[0] // self.stride, *kind.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype."""
        return np.dtype(self.source.examples.tree.kinds[self.leaf].dtype)

    @property
    def sharding(self) -> str:
        """Where it is, in words."""
        return f"examples of a {type(self.source.examples.source).__name__}"

    def every(self, stride: int, start: int) -> LoadedRows:
        """Of a whole leaf, one row of so many, from one on."""
        return replace(self, start=start, stride=stride)

    def values(self) -> np.ndarray:
        rows = self.start + self.stride * np.arange(self.shape[0])
        return self.source.examples.rows(self.first, {self.leaf: rows})[self.leaf]


def microbatches_of(leaf: Any, number: int) -> list[DistributedArray]:
    """A leaf cut minor: microbatch m has its rows i with i mod `number` = m.

    Empty unless whoever uses it reads it from a source.
    """
    chunk = leaf.chunks[0] if isinstance(leaf, DistributedArray) else None
    if not isinstance(chunk, LoadedRows):
        return []
    return [DistributedArray((chunk.every(number, m),)) for m in range(number)]


def is_tree_of_arrays(source: Any) -> bool:
    """Whether a source is arrays with all examples: one, or a dict or tuple of them."""
    if not isinstance(source, np.ndarray | jax.Array | Mapping | tuple):
        return False
    leaves = jax.tree.leaves(source)
    return bool(leaves) and all(getattr(leaf, "ndim", 0) for leaf in leaves)


def _length(source: Any) -> int:
    if not is_tree_of_arrays(source):
        return len(source)
    lengths = {leaf.shape[0] for leaf in jax.tree.leaves(source)}
    if len(lengths) > 1:
        raise ValueError(
            f"The arrays of a source hold the same examples along dim 0, but they are "
            f"{sorted(lengths)} long."
        )
    return lengths.pop()


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, length: int) -> np.ndarray:
    """The examples of an epoch as they come."""
    return np.random.default_rng((seed, epoch)).permutation(length)


@contextmanager
def _noted(what: str) -> Iterator[None]:
    """Adds to what a source raises for which of its examples it did."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised by the source of data for {what}")
        raise


def _stacked(path: str, leaves: Sequence[Any]) -> np.ndarray:
    try:
        return np.stack([np.asarray(leaf) for leaf in leaves])
    except ValueError as error:
        raise ValueError(
            f"The examples of a batch have one shape, but {path} does not: {error}."
        ) from error
