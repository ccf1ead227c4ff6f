"""Calls of a user's function as calls with plain trees, whose leaves are all arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from ..jax_compat import PyTreeDef, trace_context
from ..state.distributed_array import abstract_leaf
from .constant_leaves import (
    Constants,
    ResultTree,
    hold_constants,
    part_constants,
    release_constants,
    takes_only_arrays,
)
from .nnx import has_modules, is_module, run_merged, split_modules
from .static_arguments import StaticArguments, Statics, bind_statics

# All there is to a call but its leaves and the settings of JAX.
Form = tuple[PyTreeDef, Statics, Constants]


def _unchanged(result: Any) -> Any:
    return result


@dataclass(frozen=True, eq=False)
class Call:
    """One call, without its static arguments; `leaves` are its arrays and numbers.

    Calls of equal `form` differ in their leaves, and perhaps in the settings of JAX
    that they are made under.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    statics: Statics
    leaves: Sequence[Any]
    form: Form
    only_arrays: bool
    finish: Callable[[Any], Any] = _unchanged

    @property
    def key(self) -> Any:
        """Equal for calls that differ in their leaves only."""
        return key_of(self.form)

    @property
    def has_modules(self) -> bool:
        """Whether its result is to change modules of the caller's."""
        return self.finish is not _unchanged

    def arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """What is traced: arguments whose leaves are `leaves`."""
        return hold_constants((self.args, self.kwargs), self.only_arrays)

    def run(
        self, executable: Callable[[Sequence[Any]], Sequence[Any]], tree: ResultTree
    ) -> Any:
        """What the user's function returns, run by `executable`."""
        return self.result(tree, executable(self.leaves))

    def result(self, tree: ResultTree, leaves: Sequence[Any]) -> Any:
        """What the user's function returns."""
        return self.finish(tree.unflatten(leaves))


@contextmanager
def open_call(
    static: StaticArguments,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    only_arrays: bool = False,
) -> Iterator[Call]:
    """A call with these arguments; its result is to be asked for in here."""
    dynamic, keywords, statics = static.split(args, kwargs)
    if parts := parted(dynamic, keywords, statics, only_arrays):
        form, leaves = parts
        yield Call(dynamic, keywords, statics, leaves, form, only_arrays)
        return
    with split_modules(dynamic, keywords) as (dynamic, keywords, finish):
        leaves, tree = jax.tree.flatten((dynamic, keywords))
        tree, constants, rest = part_constants(leaves, tree, only_arrays)
        form = tree, statics, constants
        yield Call(dynamic, keywords, statics, rest, form, only_arrays, finish)


def parted(
    dynamic: tuple[Any, ...],
    keywords: Mapping[str, Any],
    statics: Statics,
    only_arrays: bool,
) -> tuple[Form, Sequence[Any]] | None:
    """The form of a call and its leaves; None if some argument has NNX modules."""
    if any(map(is_module, (*dynamic, *keywords.values()))):
        return None
    leaves, tree = jax.tree.flatten((dynamic, keywords))
    if has_modules(tree):
        return None
    tree, constants, rest = part_constants(leaves, tree, only_arrays)
    return (tree, statics, constants), rest


def key_of(form: Form) -> Any:
    """The form of a call and the caller's settings of JAX."""
    return form, trace_context()


def plain_function(fun: Callable[..., Any], statics: Statics) -> Callable[..., Any]:
    """`fun` as a function of `Call.arguments()`, with a plain tree as its result."""
    bound, only_arrays = bind_statics(fun, statics), takes_only_arrays(fun)

    @functools.wraps(bound)
    def plain(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = release_constants((args, kwargs))
        return hold_constants(run_merged(bound, args, kwargs), only_arrays)

    return plain


def types_of(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What a trace depends on, by leaf: shape, dtype and weak type."""
    return tuple(map(_type_of, leaves))


def _type_of(leaf: Any) -> tuple[Any, ...]:
    leaf = abstract_leaf(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.weak_type
    aval = jax.typeof(leaf)
    return aval.shape, aval.dtype, getattr(aval, "weak_type", False)
