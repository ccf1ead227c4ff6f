"""One object per distinct array, so that work on repeated arrays is done once.

A graph of many equal layers holds few distinct matrices. Arrays are interned by their
content, and a kernel (a pure function of arrays) called twice with the same arrays is
run once: the cost of a reduction then grows with what differs between layers.
"""

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np

from .clock import Clock

# Seconds of a usual core: of looking a result up, of a new one, and of each entry.
_LOOKUP, _KERNEL, _ENTRY = 5e-6, 4e-5, 2e-9
MOST_BYTES = 2**25  # of arrays that may be kept for graphs that no longer have them


class ArrayPool:
    """Interned arrays and the results of kernels on them, kept while the pool lives.

    `clock` has the work of all who share the pool.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        self._number: dict[int, int] = {}
        self._by_content: dict[tuple[Any, ...], np.ndarray] = {}
        self._by_id: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        self._bytes = 0

    def unless_full(self) -> "ArrayPool":
        """Itself, or an empty one where much is kept: for between two reductions."""
        return self if self._bytes <= MOST_BYTES else ArrayPool(self.clock)

    def intern(self, array: np.ndarray) -> np.ndarray:
        """The one object with this content."""
        if id(array) in self._number:  # itself, as all that were interned live on
            return array
        array = np.ascontiguousarray(array)
        content = blake2b(array.tobytes(), digest_size=16).digest()
        key = (array.shape, array.dtype.char, content)
        interned = self._by_content.setdefault(key, array)
        self._bytes += array.nbytes * (interned is array)
        self._number.setdefault(id(interned), len(self._number))
        return interned

    def number(self, array: np.ndarray) -> int:
        """The number of an interned array, in the order in which they came."""
        return self._number[id(array)]

    def adopt(self, array: np.ndarray, dtype: type) -> np.ndarray:
        """Interns an array of the caller's, remembering the caller's object too."""
        known = self._by_id.get(id(array))
        if known is None:
            known = (self.intern(np.array(array, dtype)), array)
            self._by_id[id(array)] = known
        return known[0]

    def call(self, kernel: Callable[..., Any], *arguments: Any, work: int = 0) -> Any:
        """`kernel(*arguments)`, remembered; array arguments must be interned.

        `work` is how many entries the kernel touches beyond those of its arguments.
        """
        self.clock.spent += _LOOKUP
        key = (kernel, *[id(a) if type(a) is np.ndarray else a for a in arguments])
        if key not in self._results:
            result = kernel(*arguments)
            sizes = [a.size for a in arguments if type(a) is np.ndarray]
            self.clock.spent += _KERNEL + _ENTRY * (sum(sizes) + work)
            if isinstance(result, tuple):
                result = tuple(map(self._intern_any, result))
            self._results[key] = self._intern_any(result)
        return self._results[key]

    def _intern_any(self, value: Any) -> Any:
        return self.intern(value) if type(value) is np.ndarray else value
