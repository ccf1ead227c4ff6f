"""Calls of a user's function as calls with plain trees, whose leaves are all arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..jax_compat import PyTreeDef, trace_context
from ..state.distributed_array import abstract_leaf
from .constant_leaves import (
    ResultTree,
    constants_of,
    hold_constants,
    release_constants,
    takes_only_arrays,
)
from .nnx import has_modules, is_module, run_merged, split_modules
from .static_arguments import StaticArguments, Statics, bind_statics


def _unchanged(result: Any) -> Any:
    return result


@dataclass(frozen=True, eq=False)
class Call:
    """One call, without its static arguments; `leaves` are its arrays and numbers.

    Calls of equal `key` differ in their leaves only: they are made under the same
    settings of JAX too.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    statics: Statics
    leaves: Sequence[Any]
    key: Any
    only_arrays: bool
    finish: Callable[[Any], Any] = _unchanged

    @property
    def has_modules(self) -> bool:
        """Whether its result is to change modules of the caller's."""
        return self.finish is not _unchanged

    def arguments(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """What is traced: arguments whose leaves are `leaves`."""
        return hold_constants((self.args, self.kwargs), self.only_arrays)

    def types(self) -> tuple[Any, ...]:
        return types_of(self.leaves)

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
    if not any(map(is_module, (*dynamic, *keywords.values()))):
        flat = jax.tree.flatten((dynamic, keywords))
        if not has_modules(flat[1]):
            yield _make_call((dynamic, keywords), flat, statics, only_arrays)
            return
    with split_modules(dynamic, keywords) as (dynamic, keywords, finish):
        flat = jax.tree.flatten((dynamic, keywords))
        call = _make_call((dynamic, keywords), flat, statics, only_arrays)
        yield replace(call, finish=finish)


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


def _make_call(
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    flat: tuple[list[Any], PyTreeDef],
    statics: Statics,
    only_arrays: bool,
) -> Call:
    leaves, tree = flat
    constants = constants_of(leaves, tree, only_arrays)
    for position, _, _ in reversed(constants):
        del leaves[position]
    key = tree, statics, constants, trace_context()
    return Call(*arguments, statics, leaves, key, only_arrays)
