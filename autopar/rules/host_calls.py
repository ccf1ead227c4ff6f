"""Host callbacks of one program: what fails in one is raised by the step.

One device calls for all of them. An exception in its call would end its part of the
program alone, and the others would wait for it in their next collective until XLA ends
the process. So a call that fails while the step is watched gives zeros, no later call
of the step is made, and the step raises the exception when its program has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..graph.op_graph import TensorType


class HostCalls:
    """Watches the calls of a program; one step of it at a time."""

    def __init__(self) -> None:
        self._step = threading.Lock()
        self._is_watched = False
        self._error: BaseException | None = None

    def guarded(
        self, call: Callable[..., Any], results: Sequence[TensorType], source: str
    ) -> Callable[..., list[np.ndarray]]:
        """`call`, which takes and gives flat arrays, for the program to make instead.

        `results` are the types of what it gives; `source` is its line, for messages.
        """

        def guarded(*args: Any) -> list[np.ndarray]:
            if not self._is_watched:  # inside a transformation of the user's
                return _checked(call(*args), results)
            if self._error is None:
                try:
                    return _checked(call(*args), results)
                except BaseException as error:  # the thread that runs the step gets it
                    error.add_note(f"in a host callback of the step, at {source}")
                    self._error = error
            return [np.zeros(kind.shape, kind.dtype) for kind in results]

        return guarded

    def watch(self, run: Callable[[], Any]) -> Any:
        """What `run` gives, when the program that it starts has ended.

        Raises:
          BaseException: that of the first call that failed.
        """
        with self._step:
            self._error, self._is_watched = None, True
            try:
                outputs = jax.block_until_ready(run())
                if not jax.tree.leaves(outputs):
                    jax.effects_barrier()
            finally:
                self._is_watched = False
            if self._error is not None:
                raise self._error
        return outputs


def _checked(values: Sequence[Any], results: Sequence[TensorType]) -> list[np.ndarray]:
    """The values as arrays, of the types that were said.

    Raises:
      TypeError: they are of others.
    """
    arrays = [np.asarray(value) for value in values]
    dtypes = (jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays)
    types = [
        TensorType(a.shape, dtype) for a, dtype in zip(arrays, dtypes, strict=True)
    ]
    if types != list(results):
        given, wanted = (", ".join(map(str, each)) for each in (types, results))
        raise TypeError(
            f"A host callback must return what its result_shape_dtypes say, which is "
            f"({wanted}), but it returned ({given})."
        )
    return arrays
