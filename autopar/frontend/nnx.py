"""Flax NNX modules as arguments: split around the step, as `nnx.jit` does.

A step of NNX changes its modules in place. Traced as they are, the changes would be
made to what was merely traced, and lost; so each module goes in as a tree of arrays,
what changed comes out as one, and the caller's own objects are updated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from ..jax_compat import PyTreeDef

_TAG = "autopar"


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class GraphNode:
    """A module as `nnx.split` has it: what it is, and its arrays as nested dicts."""

    graphdef: Any
    arrays: Any

    def tree_flatten_with_keys(self) -> tuple[Iterable[tuple[Any, Any]], Any]:
        return (("", self.arrays),), self.graphdef  # a path leaves this step out

    @classmethod
    def tree_unflatten(cls, graphdef: Any, children: Sequence[Any]) -> GraphNode:
        return cls(graphdef, *children)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Unchanged:
    """An array of a module that a step left as it is: a position among the leaves."""

    position: int


def is_module(node: Any) -> bool:
    """Whether a node is an NNX module or variable; does not import flax."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and nnx.graph.is_graph_node(node)


def has_modules(tree: PyTreeDef) -> bool:
    """Whether a tree has NNX modules or variables among its nodes."""
    return "flax.nnx" in sys.modules and _has_module_types(tree)


@contextmanager
def split_modules(args: Any, kwargs: Any) -> Iterator[tuple[Any, Any, Callable]]:
    """The arguments with graph nodes for modules, and what to do with the result.

    That is to be called with what `run_merged` returns; it updates the caller's modules
    and gives what the caller's function returned.
    """
    nnx = sys.modules["flax.nnx"]
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            split = _split(context, (args, kwargs))
        if not _graph_nodes(split):
            yield args, kwargs, lambda result: result
            return

        def finish(result: tuple[Any, Any]) -> Any:
            leaves = jax.tree.leaves(split)
            changed, returned = jax.tree.map(
                lambda x: leaves[x.position] if isinstance(x, Unchanged) else x,
                result,
                is_leaf=lambda x: isinstance(x, Unchanged),
            )
            with nnx.merge_context(_TAG, inner=False) as context:
                return _merged(context, (changed, returned))[1]

        yield *split, finish


def run_merged(fun: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`fun` of merged modules; `(the modules after it, its result)`, both split.

    Without graph nodes among the arguments simply `fun(*args, **kwargs)`: an
    `nnx.State` is a tree like any other, as it is to `jax.jit`.
    """
    if not _graph_nodes((args, kwargs)):
        return fun(*args, **kwargs)
    nnx = sys.modules["flax.nnx"]
    before = jax.tree.leaves((args, kwargs))
    with nnx.merge_context(_TAG, inner=True) as context:
        args, kwargs = _merged(context, (args, kwargs))
    result = fun(*args, **kwargs)
    nodes = jax.tree.leaves((args, kwargs), is_leaf=_is_whole)
    modules = list(filter(is_module, nodes))
    with nnx.split_context(_TAG) as context:
        changed, returned = _split(context, (modules, result))
    unchanged = {id(leaf): Unchanged(place) for place, leaf in enumerate(before)}
    return jax.tree.map(lambda leaf: unchanged.get(id(leaf), leaf), changed), returned


def split_result(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` with graph nodes for the modules in its result."""

    @functools.wraps(fun)
    def split(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        if "flax.nnx" not in sys.modules or not has_modules(jax.tree.structure(result)):
            return result
        with sys.modules["flax.nnx"].split_context() as context:
            return _split(context, result)

    return split


def merge_modules(tree: Any) -> Any:
    """The tree with modules for graph nodes."""
    if not _graph_nodes(tree):
        return tree
    with sys.modules["flax.nnx"].merge_context() as context:
        return _merged(context, tree)


def _split(context: Any, tree: Any) -> Any:
    nnx = sys.modules["flax.nnx"]

    def split(node: Any) -> Any:
        if not is_module(node):
            return node
        graphdef, state = context.split(node)
        if isinstance(state, nnx.Variable):
            return GraphNode(graphdef, state.get_raw_value())
        return GraphNode(graphdef, nnx.to_pure_dict(state, _array_of))

    return jax.tree.map(split, tree, is_leaf=_is_whole)


def _array_of(value: Any) -> Any:
    """What a variable holds, before its hooks: these are the step's to call."""
    if not isinstance(value, sys.modules["flax.nnx"].Variable):
        return value
    raw = value.get_raw_value()
    return raw if isinstance(raw, jax.Array) else value.get_value()


def _merged(context: Any, tree: Any) -> Any:
    nnx = sys.modules["flax.nnx"]

    def merge(node: Any) -> Any:
        if not _is_graph_node(node):
            return node
        is_dict = isinstance(node.arrays, dict)
        state = nnx.State(node.arrays) if is_dict else nnx.Variable(node.arrays)
        return context.merge(node.graphdef, state)

    return jax.tree.map(merge, tree, is_leaf=_is_graph_node)


def has_graph_nodes(tree: Any) -> bool:
    """Whether there are modules in a tree, as they are split."""
    return bool(_graph_nodes(tree))


def _graph_nodes(tree: Any) -> list[Any]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_graph_node)
    return list(filter(_is_graph_node, leaves))


def _is_whole(node: Any) -> bool:
    return is_module(node) or isinstance(node, sys.modules["flax.nnx"].State)


def _is_graph_node(node: Any) -> bool:
    return isinstance(node, GraphNode)


@functools.lru_cache
def _has_module_types(tree: PyTreeDef) -> bool:
    nnx = sys.modules["flax.nnx"]
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        data = node.node_data()
        if data is not None and issubclass(data[0], (nnx.Pytree, nnx.Variable)):
            return True
        nodes += node.children()
    return False
