"""Arrays that live on the workers of a Ray cluster, or are still made there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from autopar.errors import HostLostError
from autopar.lowering.exported_program import ShardedType
from autopar.state.distributed_array import DistributedArray, ReadWhenAsked

from .instructions import Held
from .stored_arrays import Digest, Writing
from .timeline import Timeline


@dataclass(frozen=True)
class StepEnd:
    """What of a step came to the driver; the timeline is empty if it was not wanted."""

    results: Mapping[Held, jax.Array]
    timeline: Timeline


class PendingStep:
    """A step under way.

    Arguments:
      finish: waits for the step.
    """

    def __init__(self, finish: Callable[[], StepEnd]) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._end: StepEnd | None = None

    def wait(self) -> StepEnd:
        """The end of the step."""
        with self._lock:
            if self._end is None:
                self._end = self._finish()
                del self._finish  # and what it refers to
            return self._end


class Keeper(Protocol):
    """The workers that keep arrays, as their handles see them."""

    lost: str | None
    lost_rank: int | None

    def fetch(self, number: int, group: int, type_: ShardedType) -> np.ndarray: ...
    def forget(self, number: int, group: int) -> None: ...
    def copy_out(self, arrays: Sequence[RemoteArray]) -> int: ...
    def write_out(
        self, ticket: int, writings: Sequence[tuple[int, Writing]]
    ) -> dict[str, Digest]: ...


class RemoteArray(ReadWhenAsked):
    """A handle to an array that one group of workers keeps under a number.

    Its memory there is freed when the handle is collected, with the next call that
    goes to the workers. `made_by` is the step that makes it.
    """

    def __init__(
        self,
        keeper: Keeper,
        group: int,
        number: int,
        type_: ShardedType,
        made_by: PendingStep | None = None,
    ) -> None:
        self.keeper, self.group, self.number, self.type = keeper, group, number, type_
        self.shape, self.dtype = type_.shape, np.dtype(type_.dtype)
        self._made_by = made_by
        self._taken_by: PendingStep | None = None
        self._is_deleted = False

    @property
    def sharding(self) -> str:
        """How it lies on which hosts, in words."""
        return f"{self.type}, group {self.group}"

    def values(self) -> np.ndarray:
        """All of it, sent here."""
        self.check()
        return self.keeper.fetch(self.number, self.group, self.type)

    def block_until_ready(self) -> RemoteArray:
        """Wait for the step that makes it."""
        if self._made_by is not None:
            self._made_by.wait()
        return self

    def is_deleted(self) -> bool:
        """Whether it was donated, deleted, or lost with its hosts."""
        self._wait_for_taker()
        return self._is_deleted or self.keeper.lost is not None

    def delete(self) -> None:
        """Free its memory on the workers."""
        if not self._is_deleted:
            self._is_deleted = True
            self.keeper.forget(self.number, self.group)

    def __del__(self) -> None:
        self.delete()

    def may_be_taken_by(self, step: PendingStep) -> None:
        """Note a step that was told to take its memory if it can."""
        self._taken_by = step

    def _wait_for_taker(self) -> None:
        if self._taken_by is not None and self.keeper.lost is None:
            self._taken_by.wait()
            self._taken_by = None

    def mark_donated(self) -> None:
        """Note that a step has taken its memory."""
        self._is_deleted = True

    def check(self) -> None:
        """Does nothing if it is there.

        Raises:
          HostLostError: it was lost with a host.
          RuntimeError: it was donated, or its workers were closed.
        """
        if self.keeper.lost is not None:
            text = (
                f"Array {self.type} lived on workers that are gone: "
                f"{self.keeper.lost} Restore it from a checkpoint, or make it anew."
            )
            if self.keeper.lost_rank is None:
                raise RuntimeError(text)
            raise HostLostError(text, self.keeper.lost_rank)
        self._wait_for_taker()
        if self._is_deleted:
            raise RuntimeError(
                f"Array {self.type} has been deleted: each array may be donated once, "
                f"and this one's memory now holds the next state. Pass the state that "
                f"the last call returned, or pass donate_argnums=() to "
                f"autopar.parallelize to keep both."
            )


class PendingArray(ReadWhenAsked):
    """A result of a step under way; this process keeps it."""

    def __init__(self, step: PendingStep, key: Held, type_: ShardedType) -> None:
        self._step, self._key = step, key
        self.shape, self.dtype = type_.shape, np.dtype(type_.dtype)
        self.sharding = "on its way to this process"

    def values(self) -> np.ndarray:
        """All of it, when the step is done."""
        return np.asarray(self._step.wait().results[self._key])

    def block_until_ready(self) -> PendingArray:
        """Wait for the step."""
        self._step.wait()
        return self


def is_on_workers(leaf: Any) -> bool:
    """Whether all of a leaf is kept by workers."""
    return isinstance(leaf, DistributedArray) and all(
        isinstance(chunk, RemoteArray) for chunk in leaf.chunks
    )
