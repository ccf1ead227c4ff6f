"""A step that hosts run while the driver goes on, and results that are yet to come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autopar.lowering.exported_program import ShardedType

from .instructions import Held
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
        """The end of the step.

        Raises:
          HostLostError, WorkerError, RuntimeError: see `Workers.call`.
        """
        with self._lock:
            if self._end is None:
                self._end = self._finish()
                del self._finish  # and what it refers to
            return self._end


class PendingArray:
    """A result of a step under way; a piece of a `DistributedArray`."""

    def __init__(self, step: PendingStep, key: Held, type_: ShardedType) -> None:
        self._step, self._key, self._type = step, key, type_

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape."""
        return self._type.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype."""
        return np.dtype(self._type.dtype)

    @property
    def sharding(self) -> str:
        """Where it is, in words."""
        return "on its way to this process"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = np.asarray(self._step.wait().results[self._key])
        return whole if dtype is None else whole.astype(dtype)

    def block_until_ready(self) -> PendingArray:
        """Wait for the step."""
        self._step.wait()
        return self

    def is_deleted(self) -> bool:
        """Never: this process keeps it."""
        return False

    def delete(self) -> None:
        """Does nothing: it is freed when nobody refers to it."""
