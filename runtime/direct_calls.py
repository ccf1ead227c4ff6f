"""Calls that JAX's C++ runs from arrays to the user's trees.

What needs Python (a plan, moving arguments, callbacks) is asked for once for each kind
of arguments; calls that need none of it are known to C++ from then on by a key of all
that is no array, and by the types and shardings of their arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autopar.lowering.programs import (
    CONCRETE_ARRAY,
    call_in_cpp,
    is_checking_values,
    is_traced,
    path_in_cpp,
)

from .local import (
    DISPATCH,
    LocalExecutable,
    cut_on_host,
    has_repeats,
    seen_by_host,
)

MISSED = object()
"""Instead of a result: the call is to be made another way."""


KeyAndLeaves = tuple[Any, Sequence[Any]]


class NotDirect(Exception):
    """Calls of a function take more than its program."""


@dataclass(frozen=True, eq=False)
class ReadyCall:
    """What runs a call: a program, and the tree of its results.

    Taken apart and made again, that tree is what the function returns.
    """

    executable: LocalExecutable
    tree_of: Callable[[Sequence[Any]], Any]


class DirectCalls:
    """Calls of one function, by whichever of its programs takes them as they are.

    Calls of equal keys differ in their leaves only. `parted` gives both, or None where
    that takes Python: it is for the caller then, who asks `by_key`. `ready` says what
    is ready to run a call of this key and leaves, or None; it raises `NotDirect` where
    calls always take Python, and is not asked again.
    """

    def __init__(
        self,
        name: str,
        parted: Callable[[Sequence[Any], Mapping[str, Any]], KeyAndLeaves | None],
        ready: Callable[[Any, Sequence[Any]], ReadyCall | None],
    ) -> None:
        self._parted, self._ready = parted, ready
        self._is_stopped = False
        self._has_donated = False  # some program that is known by now
        self._call = call_in_cpp(name, [0], [], self._first_call, seen_by_host)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result, or MISSED, before anything was done.

        Raises:
          ValueError: a static argument that cannot be hashed.
        """
        if self._is_stopped or is_checking_values():
            return MISSED
        found = self._parted(args, kwargs)
        return MISSED if found is None else self.by_key(*found)

    def by_key(self, key: Any, leaves: Sequence[Any]) -> Any:
        """The same for a call that has been taken apart."""
        if self._is_stopped or is_checking_values() or not self._may_run(leaves):
            return MISSED
        with DISPATCH:
            return self._call(key, leaves)

    def _may_run(self, leaves: Sequence[Any]) -> bool:
        """XLA's CPU client does not survive deleted buffers of several devices."""
        if _has_deleted(leaves):
            return False
        return not (self._has_donated and has_repeats(leaves))

    def _first_call(self, key: Any, leaves: Sequence[Any]) -> tuple[Any, Any, bool]:
        """The result, how C++ makes the next such call, and whether it cannot."""
        missed = MISSED, None, True
        try:
            ready = self._ready(key, leaves)
        except NotDirect:
            self._is_stopped = True
            return missed
        except TypeError:  # a leaf that is no array: the other way names it
            return missed
        if ready is None or not ready.executable.takes(leaves):
            return missed
        program = ready.executable.program
        if program.donated and has_repeats(leaves):
            return missed
        self._has_donated = self._has_donated or bool(program.donated)
        compiled = program.compile()
        try:
            given = cut_on_host(leaves, program.shardings)
            outputs = compiled(program.constants, *given)
        except (TypeError, ValueError):  # such as a memory layout of its own
            return missed
        results = ready.tree_of(outputs)
        path = path_in_cpp(compiled, program.constants, leaves, outputs, results)
        return jax.tree.map(lambda leaf: leaf, results), path, path is None


def _has_deleted(leaves: Sequence[Any]) -> bool:
    try:  # one pass, without a loop of Python's
        return any(map(CONCRETE_ARRAY.is_deleted, leaves))
    except TypeError:
        others = [leaf for leaf in leaves if type(leaf) is not CONCRETE_ARRAY]
    if is_traced(others):
        return False
    arrays = [leaf for leaf in leaves if isinstance(leaf, CONCRETE_ARRAY)]
    arrays += [leaf for leaf in others if isinstance(leaf, jax.Array)]
    return any(leaf.is_deleted() for leaf in arrays)
