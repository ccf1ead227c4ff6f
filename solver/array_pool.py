"""One object per distinct array, so that work on repeated arrays is done once.

A graph of many equal layers holds few distinct matrices. Arrays are interned by their
content, and a kernel (a pure function of arrays) called twice with the same arrays is
run once: the cost of a reduction then grows with what differs between layers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


class ArrayPool:
    """Interned arrays and the results of kernels on them, kept while the pool lives."""

    def __init__(self) -> None:
        self._by_content: dict[tuple[Any, ...], np.ndarray] = {}
        self._by_id: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._results: dict[tuple[Any, ...], Any] = {}

    def intern(self, array: np.ndarray) -> np.ndarray:
        """The one object with this content."""
        known = self._by_id.get(id(array))
        if known is not None:
            return known[0]
        array = np.ascontiguousarray(array)
        key = (array.shape, array.dtype.char, array.tobytes())
        return self._by_content.setdefault(key, array)

    def adopt(self, array: np.ndarray, dtype: type) -> np.ndarray:
        """Interns an array of the caller's, remembering the caller's object too."""
        known = self._by_id.get(id(array))
        if known is None:
            known = (self.intern(np.array(array, dtype)), array)
            self._by_id[id(array)] = known
        return known[0]

    def call(self, kernel: Callable[..., Any], *arguments: Any) -> Any:
        """`kernel(*arguments)`, remembered; array arguments must be interned."""
        key = (kernel, *[id(a) if type(a) is np.ndarray else a for a in arguments])
        if key not in self._results:
            result = kernel(*arguments)
            if isinstance(result, tuple):
                result = tuple(map(self._intern_any, result))
            self._results[key] = self._intern_any(result)
        return self._results[key]

    def _intern_any(self, value: Any) -> Any:
        return self.intern(value) if type(value) is np.ndarray else value
