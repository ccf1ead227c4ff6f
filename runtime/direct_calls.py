"""Calls that JAX's C++ runs from the user's trees to the user's trees.

What needs Python (a plan, moving arguments, callbacks, leaves that are constants) is
asked for once for each kind of arguments; calls that need none of it are known to C++
from then on by their trees, types and shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from autopar.lowering.programs import (
    CONCRETE_ARRAY,
    PyTreeDef,
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
    """What runs a call: a program, its leaves, and the tree of its results."""

    executable: LocalExecutable
    leaves: Sequence[Any]
    result_tree: PyTreeDef


class DirectCalls:
    """Calls of one function, by whichever of its programs takes them as they are.

    `ready` says what is ready to run a call with these arguments, or None; it raises
    `NotDirect` where calls always take Python, and is not asked again.
    """

    def __init__(
        self,
        name: str,
        static: StaticArguments,
        ready: Callable[[Sequence[Any], Mapping[str, Any]], ReadyCall | None],
    ) -> None:
        self._static, self._ready = static, ready
        self._is_stopped = False
        self._num_donated: int | None = None  # leaves, from the first on
        positions = static.positions, static.names
        self._call = call_in_cpp(name, *positions, self._first_call, seen_by_host)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result, or MISSED, before anything was done.

        XLA's CPU client does not survive deleted buffers of several devices.

        Raises:
          ValueError: a static argument that cannot be hashed.
        """
        if self._is_stopped or is_checking_values():
            return MISSED
        dynamic = args, kwargs
        if self._static.positions:
            dynamic = self._static.split(args, kwargs)[:2]
        leaves = jax.tree.leaves(dynamic)
        if _has_deleted(leaves) or (self._num_donated and has_repeats(leaves)):
            return MISSED
        with DISPATCH:
            return self._call(*args, **kwargs)

    def _first_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        """The result, how C++ makes the next such call, and whether it cannot."""
        missed = MISSED, None, True
        try:
            ready = self._ready(args, kwargs)
        except NotDirect:
            self._is_stopped = True
            return missed
        except TypeError:  # a leaf that is no array: the other way names it
            return missed
        if ready is None or not ready.executable.takes(ready.leaves):
            return missed
        program = ready.executable.program
        num_donated = len(program.donated)
        if num_donated and has_repeats(ready.leaves):
            return missed
        if self._num_donated not in (None, num_donated):
            self._is_stopped = True
            return missed
        self._num_donated = num_donated
        compiled = program.compile()
        try:
            given = cut_on_host(ready.leaves, program.shardings)
            outputs = compiled(program.constants, *given)
        except (TypeError, ValueError):  # such as a memory layout of its own
            return missed
        taken = program.constants, ready.leaves
        path = path_in_cpp(compiled, *taken, ready.result_tree, outputs)
        return jax.tree.unflatten(ready.result_tree, outputs), path, path is None


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
