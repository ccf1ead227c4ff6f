"""Leaves that are no arrays, such as a module's functions, held out of the trace."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..jax_compat import PyTreeDef
from ..state.distributed_array import AbstractDistributedArray, DistributedArray
from .tracing import is_array_leaf

_CONTAINERS = (tuple, list, dict, OrderedDict, defaultdict, type(None))
_ARRAYS = (
    jax.Array,
    DistributedArray,
    jax.ShapeDtypeStruct,
    AbstractDistributedArray,
    np.ndarray,
    np.generic,
)

# Positions among the leaves, types and values: 1 and True are equal, yet two constants.
Constants = tuple[tuple[int, ...], tuple[type, ...], tuple[Any, ...]]


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Held:
    """A constant in the place of its leaf: part of the tree, and no leaf of it."""

    value: Any

    def tree_flatten(self) -> tuple[tuple[()], tuple[type, Any]]:
        return (), (type(self.value), self.value)

    @classmethod
    def tree_unflatten(cls, typed: tuple[type, Any], _: Sequence[Any]) -> Held:
        return cls(typed[1])


def part_constants(
    leaves: Sequence[Any], tree: PyTreeDef, only_arrays: bool = False
) -> tuple[PyTreeDef, Constants, Sequence[Any]]:
    """The tree, the leaves that are constants, and all others.

    Constants are, of a registered class's leaves, all that are neither arrays nor
    numbers; of an Equinox module's, and with `only_arrays` of all, all but arrays. In a
    dict, list or tuple of the user's own, such a leaf is a mistake and stays one. What
    cannot be hashed is none. The tree may be an equal one seen before, which makes keys
    quicker to compare.
    """
    kinds = tuple(map(type, leaves))
    grades = {kind: _grade(leaves[kinds.index(kind)]) for kind in {*kinds}}
    if not any(grades.values()):
        return tree, ((), (), ()), leaves
    graded = frozenset(grades.items())
    tree, places = _places(tree, kinds, graded, only_arrays)
    constants = tuple([leaves[place] for place in places])
    if not _has_hash(constants):
        places = tuple([place for place in places if _has_hash(leaves[place])])
        constants = tuple([leaves[place] for place in places])
    rest = list(itertools.compress(leaves, _are_others(places, len(leaves))))
    return tree, (places, tuple(map(type, constants)), constants), rest


def _grade(leaf: Any) -> int:
    """0 for an array, 1 for what else can be traced, 2 for the rest."""
    return 0 if isinstance(leaf, _ARRAYS) else 1 if is_array_leaf(leaf) else 2


def _has_hash(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def takes_only_arrays(fun: Callable[..., Any]) -> bool:
    """Whether all but arrays are constants to `fun`: one that is filter_jit-ted."""
    return isinstance(fun, _equinox_modules())


def hold_constants(value: Any, only_arrays: bool = False) -> Any:
    """The same tree with its constants held."""
    leaves, tree = jax.tree.flatten(value)
    _, (places, _, constants), _ = part_constants(leaves, tree, only_arrays)
    for position, constant in zip(places, constants, strict=True):
        leaves[position] = Held(constant)
    return jax.tree.unflatten(tree, leaves)


def release_constants(value: Any) -> Any:
    """The tree that `hold_constants` was given."""
    return ResultTree.of(jax.tree.structure(value)).unflatten(jax.tree.leaves(value))


@dataclass(frozen=True)
class ResultTree:
    """How leaves become a tree that holds constants; `unflatten` releases them.

    `_order` has for each leaf its place among leaves with the constants behind them.
    """

    _whole: PyTreeDef
    _constants: tuple[Any, ...]
    _order: tuple[int, ...]

    @classmethod
    def of(cls, tree: PyTreeDef) -> ResultTree:
        held = jax.tree.unflatten(tree, range(tree.num_leaves))
        leaves, whole = jax.tree.flatten(held, is_leaf=_is_held)
        constants = tuple(leaf.value for leaf in leaves if _is_held(leaf))
        next_constant = itertools.count(tree.num_leaves)
        order = (next(next_constant) if _is_held(leaf) else leaf for leaf in leaves)
        return cls(whole, constants, tuple(order))

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        if not self._constants:
            return jax.tree.unflatten(self._whole, leaves)
        given = [*leaves, *self._constants]
        return jax.tree.unflatten(self._whole, [given[place] for place in self._order])

    def before_release(self, leaves: Iterable[Any]) -> Any:
        """The tree from whose leaves and structure `unflatten`'s is made."""
        return _Unreleased(self, leaves) if self._constants else self.unflatten(leaves)


@jax.tree_util.register_pytree_node_class
class _Unreleased:
    """What becomes a tree with constants when it is made of its leaves."""

    def __init__(self, tree: ResultTree, leaves: Iterable[Any]) -> None:
        self._tree, self._leaves = tree, tuple(leaves)

    def tree_flatten(self) -> tuple[tuple[Any, ...], ResultTree]:
        return self._leaves, self._tree

    @classmethod
    def tree_unflatten(cls, tree: ResultTree, leaves: Sequence[Any]) -> Any:
        return tree.unflatten(leaves)


@functools.lru_cache
def _places(
    tree: PyTreeDef, kinds: Sequence[type], graded: Set[tuple[type, int]], strict: bool
) -> tuple[PyTreeDef, tuple[int, ...]]:
    """The tree as first seen, and positions of leaves that may be constants."""
    grades, next_kind, modules = dict(graded), enumerate(kinds), _equinox_modules()

    def walk(node: PyTreeDef, least: int) -> Iterator[int]:
        data = node.node_data()
        if data is None:
            position, kind = next(next_kind)
            if grades[kind] >= least:
                yield position
            return
        if issubclass(data[0], modules):
            least = 1
        elif not issubclass(data[0], _CONTAINERS):
            least = min(least, 2)
        for child in node.children():
            yield from walk(child, least)

    return tree, tuple(walk(tree, 1 if strict else 3))


@functools.lru_cache
def _are_others(places: Sequence[int], num_leaves: int) -> Sequence[bool]:
    chosen = {*places}
    return [position not in chosen for position in range(num_leaves)]


def _equinox_modules() -> tuple[type, ...]:
    equinox = sys.modules.get("equinox")
    return (equinox.Module,) if equinox else ()


def _is_held(node: Any) -> bool:
    return isinstance(node, Held)
