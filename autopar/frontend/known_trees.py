"""Arrays and constants of calls, told apart quickly where their trees are known.

`open_call` looks at every leaf. Here leaves are taken from the places where earlier
calls of the same tree had constants, and only those that could be constants are looked
at: calls of one form differ in nothing but their arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax

from ..jax_compat import PyTreeDef, trace_context
from .constant_leaves import (
    Constants,
    constants_of,
    is_array_kind,
    possible_constants,
    taker,
)
from .nnx import has_modules, is_module
from .static_arguments import StaticArguments, Statics

_Take = Callable[[Sequence[Any]], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class CallForm:
    """All there is to a call but its arrays and numbers; itself, however it compares.

    It has no leaves: arguments that are donated must not be kept.
    """

    tree: PyTreeDef
    statics: Statics
    constants: Constants

    @property
    def key(self) -> Any:
        """The key of a `Call` of this form under the caller's settings of JAX."""
        return self.tree, self.statics, self.constants, trace_context()


class KnownTrees:
    """The forms of one function's calls, by the trees of their arguments."""

    def __init__(self, static: StaticArguments, only_arrays: bool) -> None:
        self._static, self._only_arrays = static, only_arrays
        self._trees: dict[Any, _Tree] = {}
        self._forms: dict[Any, CallForm] = {}
        self._has_seen_modules = False

    def parted(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[CallForm, Sequence[Any]] | None:
        """The form of a call and its arrays; None once some argument is a module.

        Raises:
          ValueError: a static argument that cannot be hashed.
        """
        if self._has_seen_modules:
            return None
        dynamic, keywords, statics = self._static.split(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic, keywords))
        known = self._trees.get((tree, statics))
        found = None if known is None else known.parted(leaves)
        if found is not None:
            return found
        if any(map(is_module, (*dynamic, *keywords.values()))) or has_modules(tree):
            self._has_seen_modules = True
            return None
        return self._learned(tree, statics, leaves)

    def _learned(
        self, tree: PyTreeDef, statics: Statics, leaves: Sequence[Any]
    ) -> tuple[CallForm, Sequence[Any]]:
        """The same, noted for calls to come."""
        constants = constants_of(leaves, tree, self._only_arrays)
        places = tuple(position for position, _, _ in constants)
        known = self._trees.get((tree, statics))
        if known is None or known.constants != places:
            possible = possible_constants(tree, self._only_arrays)
            known = _Tree.of(places, possible, len(leaves))
            self._trees[tree, statics] = known
        form = CallForm(tree, statics, constants)
        form = self._forms.setdefault((tree, statics, constants), form)
        known.forms[_typed(known.take_constants(leaves))] = form
        return form, known.take_arrays(leaves)


@dataclass(frozen=True, eq=False)
class _Tree:
    """Where the leaves of one tree are constants, and what calls had in these places.

    `take_unsure` takes the leaves that are arrays here, and could be constants. Calls
    with constants in other places take the place of these.
    """

    constants: tuple[int, ...]
    take_constants: _Take
    take_arrays: _Take
    take_unsure: _Take
    forms: dict[Any, CallForm] = field(default_factory=dict[Any, CallForm])

    @classmethod
    def of(
        cls, constants: tuple[int, ...], possible: Sequence[int], num_leaves: int
    ) -> _Tree:
        chosen = frozenset(constants)
        arrays = [i for i in range(num_leaves) if i not in chosen]
        unsure = [i for i in possible if i not in chosen]
        return cls(constants, taker(constants), taker(arrays), taker(unsure))

    def parted(self, leaves: Sequence[Any]) -> tuple[CallForm, Sequence[Any]] | None:
        """None if these leaves are of no form that is known."""
        if not all(map(_is_array_kind, set(map(type, self.take_unsure(leaves))))):
            return None
        try:
            form = self.forms.get(_typed(self.take_constants(leaves)))
        except TypeError:  # one that cannot be hashed is none
            return None
        if form is None:
            return None
        return form, self.take_arrays(leaves) if self.constants else leaves


def _typed(values: tuple[Any, ...]) -> Any:
    """Equal only for equal values of equal types: 1 and True are two constants."""
    return tuple(map(type, values)), values


_is_array_kind = lru_cache(is_array_kind)
