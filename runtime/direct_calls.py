"""Calls that JAX's C++ runs from the user's trees to the user's trees.

What needs Python (a plan, moving arguments, callbacks) is asked for once for each kind
of arguments; calls that need none of it are known to C++ from then on by their trees,
types and shardings. Where some leaves are constants, or arguments are modules, Python
takes the arguments apart, and C++ knows calls by their keys instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class StaticArguments(Protocol):
    """Which arguments are compile-time constants, and how to part from them."""

    @property
    def positions(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
        """The arguments that are traced, by position and keyword, and the others."""
        ...


@dataclass(frozen=True, eq=False)
class ReadyCall:
    """What runs a call: a program, and the tree of its results.

    Taken apart and made again, that tree is what the function returns.
    """

    executable: LocalExecutable
    tree_of: Callable[[Sequence[Any]], Any]


class DirectCalls:
    """Calls of one function, by whichever of its programs takes them as they are.

    Calls of equal keys differ in their leaves only: `flat` gives both for a call whose
    leaves are all there is to it, else None. `ready` says what is ready to run a call
    of this key and leaves, or None; it raises `NotDirect` where calls always take
    Python, and is not asked again.
    """

    def __init__(
        self,
        name: str,
        static: StaticArguments,
        flat: Callable[[Sequence[Any], Mapping[str, Any]], KeyAndLeaves | None],
        ready: Callable[[Any, Sequence[Any]], ReadyCall | None],
    ) -> None:
        self._static, self._flat, self._ready = static, flat, ready
        self._is_stopped = self._is_keyed = False
        self._has_donated = False  # some program that is known by now
        positions = static.positions, static.names
        self._call = call_in_cpp(name, *positions, self._first_call, seen_by_host)
        self._call_by_key = call_in_cpp(name, [0], [], self._first_by_key, seen_by_host)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result, or MISSED, before anything was done.

        Raises:
          ValueError: a static argument that cannot be hashed.
        """
        if self._is_stopped or self._is_keyed or is_checking_values():
            return MISSED
        dynamic = args, kwargs
        if self._static.positions:
            dynamic = self._static.split(args, kwargs)[:2]
        if not self._may_run(jax.tree.leaves(dynamic)):
            return MISSED
        with DISPATCH:
            return self._call(*args, **kwargs)

    def by_key(self, key: Any, leaves: Sequence[Any]) -> Any:
        """The same for calls with more to them, which the caller has taken apart."""
        if self._is_stopped or not self._is_keyed or is_checking_values():
            return MISSED
        if not self._may_run(leaves):
            return MISSED
        with DISPATCH:
            return self._call_by_key(key, leaves)

    def _may_run(self, leaves: Sequence[Any]) -> bool:
        """XLA's CPU client does not survive deleted buffers of several devices."""
        if _has_deleted(leaves):
            return False
        return not (self._has_donated and has_repeats(leaves))

    def _first_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """The result, how C++ makes the next such call, and whether it cannot."""
        try:
            found = self._flat(args, kwargs)
        except TypeError:
            return MISSED, None, True
        if found is None:
            self._is_keyed = True
            return MISSED, None, True
        return self._first_by_key(*found)

    def _first_by_key(self, key: Any, leaves: Sequence[Any]) -> tuple[Any, Any, bool]:
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
