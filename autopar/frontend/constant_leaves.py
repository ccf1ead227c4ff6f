"""Leaves that are no arrays, such as a module's functions, held out of the trace."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
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
_Take = Callable[[Sequence[Any]], tuple[Any, ...]]


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
) -> tuple[Constants, Sequence[Any]]:
    """The leaves that are constants, and all others; what cannot be hashed is none.

    Of those of a registered class, all that are neither arrays nor numbers. Of those of
    an Equinox module all but arrays, and so of all leaves with `only_arrays`. In a
    dict, list or tuple of the user's own, such a leaf is a mistake and stays one.
    """
    if _are_arrays(leaves):
        return ((), (), ()), leaves
    tree_of = _tree_of(tree, only_arrays)
    places, take_constants, take_rest, known = tree_of.latest
    constants, rest = take_constants(leaves), take_rest(leaves)
    kinds = tuple(map(type, constants))
    if not (known.issuperset(kinds) and _are_arrays(rest) and _is_hashable(constants)):
        places, take_constants, take_rest, known = tree_of.learn(leaves)
        constants, rest = take_constants(leaves), take_rest(leaves)
        kinds = tuple(map(type, constants))
    return (places, kinds, constants), rest


def _are_arrays(leaves: Sequence[Any]) -> bool:
    return all(issubclass(kind, _ARRAYS) for kind in set(map(type, leaves)))


class _Tree:
    """Where leaves of a tree may be constants, and which were so in the latest call.

    Calls of one form, which differ in their arrays only, are so told apart quickly.
    """

    def __init__(self, tree: PyTreeDef, only_arrays: bool) -> None:
        self._num_leaves = tree.num_leaves
        self._places = list(_places(tree, _equinox_modules(), only_arrays))
        self.latest = self._with_constants(())

    def learn(self, leaves: Sequence[Any]) -> tuple[Any, _Take, _Take, set[type]]:
        """Looks at every leaf that may be a constant."""
        examples = {type(leaf): leaf for leaf in leaves}.items()  # alike, if of a type
        arrays = {kind for kind, leaf in examples if isinstance(leaf, _ARRAYS)}
        traced = {kind for kind, leaf in examples if is_array_leaf(leaf)}
        self.latest = self._with_constants(
            tuple(
                position
                for position, is_strict in self._places
                if type(leaves[position]) not in (arrays if is_strict else traced)
                and _is_hashable(leaves[position])
            ),
            leaves,
        )
        return self.latest

    def _with_constants(
        self, places: tuple[int, ...], leaves: Sequence[Any] = ()
    ) -> tuple[tuple[int, ...], _Take, _Take, set[type]]:
        held = set(places)
        rest = [i for i in range(self._num_leaves) if i not in held]
        kinds = {type(leaves[position]) for position in places}
        return places, taker(places), taker(rest), kinds


_tree_of = functools.lru_cache(_Tree)


def taker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Takes the elements at these positions, as a tuple, in one step of Python's."""
    match list(positions):
        case []:
            return lambda elements: ()
        case [position]:
            return lambda elements: (elements[position],)
    return itemgetter(*positions)


def takes_only_arrays(fun: Callable[..., Any]) -> bool:
    """Whether all but arrays are constants to `fun`: one that is filter_jit-ted."""
    return isinstance(fun, _equinox_modules())


def hold_constants(value: Any, only_arrays: bool = False) -> Any:
    """The same tree with its constants held."""
    leaves, tree = jax.tree.flatten(value)
    (places, _, constants), _ = part_constants(leaves, tree, only_arrays)
    for position, constant in zip(places, constants, strict=True):
        leaves[position] = Held(constant)
    return jax.tree.unflatten(tree, leaves)


def release_constants(value: Any) -> Any:
    """The tree that `hold_constants` was given."""
    return ResultTree.of(jax.tree.structure(value)).unflatten(jax.tree.leaves(value))


@dataclass(frozen=True)
class ResultTree:
    """How leaves become a tree that holds constants; `unflatten` releases them.

    `_arranged` puts leaves, with the constants behind them, in the tree's order.
    """

    _whole: PyTreeDef
    _constants: tuple[Any, ...]
    _arranged: Callable[[list[Any]], Sequence[Any]] = field(compare=False)

    @classmethod
    def of(cls, tree: PyTreeDef) -> ResultTree:
        held = jax.tree.unflatten(tree, range(tree.num_leaves))
        leaves, whole = jax.tree.flatten(held, is_leaf=_is_held)
        constants = tuple(leaf.value for leaf in leaves if _is_held(leaf))
        next_constant = itertools.count(tree.num_leaves)
        order = [next(next_constant) if _is_held(leaf) else leaf for leaf in leaves]
        return cls(whole, constants, taker(order))

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        if not self._constants:
            return jax.tree.unflatten(self._whole, leaves)
        given = self._arranged([*leaves, *self._constants])
        return jax.tree.unflatten(self._whole, given)

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


def _places(
    node: PyTreeDef, modules: tuple[type, ...], only_arrays: bool
) -> Iterator[tuple[int, bool]]:
    """Positions of leaves that may be constants, and whether only arrays are not."""
    next_leaf = itertools.count()

    def walk(
        node: PyTreeDef, is_inside: bool, is_strict: bool
    ) -> Iterator[tuple[int, bool]]:
        data = node.node_data()
        if data is None:
            position = next(next_leaf)
            if is_inside:
                yield position, is_strict
            return
        is_inside = is_inside or not issubclass(data[0], _CONTAINERS)
        is_strict = is_strict or issubclass(data[0], modules)
        for child in node.children():
            yield from walk(child, is_inside, is_strict)

    yield from walk(node, only_arrays, only_arrays)


def _equinox_modules() -> tuple[type, ...]:
    equinox = sys.modules.get("equinox")
    return (equinox.Module,) if equinox else ()


def _is_held(node: Any) -> bool:
    return isinstance(node, Held)


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True
