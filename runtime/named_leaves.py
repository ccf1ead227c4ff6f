"""The arrays and numbers of a tree by name, as Orbax writes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from autopar.state.distributed_array import AbstractDistributedArray, DistributedArray

Names = tuple[str, ...]
NUMBERS = (bool, int, float, complex)
ABSTRACT = (jax.ShapeDtypeStruct, AbstractDistributedArray)
_VALUES = (jax.Array, DistributedArray, np.ndarray, np.generic, *NUMBERS)
_BARE = ("state",)  # the name of a state that is one leaf


class NamedLeaves:
    """The arrays and numbers of a tree by name, and how they are put back.

    NNX modules are taken as graphs, so that a variable in two places is one leaf.
    """

    def __init__(self, tree: Any) -> None:
        tree, self._finish = _without_modules(tree)
        flat, self._structure = tree_flatten_with_path(tree)
        self._leaves = [leaf for _, leaf in flat]
        self._positions: dict[Names, int] = {}
        self.paths: dict[Names, str] = {}
        joined: dict[str, str] = {}
        for position, (path, leaf) in enumerate(flat):
            if not isinstance(leaf, (*_VALUES, *ABSTRACT)):
                continue
            names, shown = names_of(path) or _BARE, keystr(path) or "the state"
            name = ".".join(names)  # as Orbax writes it
            if name in joined:
                raise ValueError(
                    f"Leaves are saved by the names in their paths, but {joined[name]} "
                    f"and {shown} are both called {name!r}; rename a key."
                )
            joined[name] = shown
            self._positions[names], self.paths[names] = position, shown

    @property
    def by_names(self) -> dict[Names, Any]:
        return {n: self._leaves[position] for n, position in self._positions.items()}

    def replaced(self, by_names: Mapping[Names, Any]) -> Any:
        """The tree with other arrays."""
        leaves = list(self._leaves)
        for names, position in self._positions.items():
            leaves[position] = by_names[names]
        return self._finish(jax.tree.unflatten(self._structure, leaves))


def _without_modules(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A tree without NNX modules, and what puts them back; does not import flax."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree, lambda same: same

    def is_module(node: Any) -> bool:
        return nnx.graph.is_graph_node(node)

    if not any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module))):
        return tree, lambda same: same
    graph, state = nnx.split(tree)

    def merged(pure: Any) -> Any:
        nnx.replace_by_pure_dict(state, pure)
        return nnx.merge(graph, state)

    return nnx.to_pure_dict(state), merged


def _name(key: Any) -> str:
    """A key of a path as Orbax names it."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def nested(by_names: Mapping[Names, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for names, leaf in by_names.items():
        node = tree
        for name in names[:-1]:
            node = node.setdefault(name, {})
        node[names[-1]] = leaf
    return tree


def names_of(path: Iterable[Any]) -> Names:
    return tuple(map(_name, path))


def leaves_by_names(tree: Any) -> dict[Names, Any]:
    flat, _ = tree_flatten_with_path(tree, is_leaf=is_array)
    return {names_of(path): leaf for path, leaf in flat}


def is_array(node: Any) -> bool:
    """Whether a node of what Orbax read is an array, or says its type."""
    return hasattr(node, "dtype")
