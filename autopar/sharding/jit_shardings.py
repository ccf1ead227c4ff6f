"""Shardings as `jax.jit` takes them, and how they ask a plan for the same.

Those of arguments become pins by path, those of results pins in front of a step's end.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .mesh import MeshLike, MeshShape, parse_mesh
from .pin_primitive import pin

_FREE = object()
_BELOW = r"(?![^.\[])"  # the path ends here, or goes on below


class _Place(str):
    """An expression for the paths of an argument, by which errors do not call it."""

    def __repr__(self) -> str:
        path = re.sub(r"\\(.)", r"\1", self[1 : -len(_BELOW)])
        return f"`in_shardings` for {path}"


def spec_of(value: Any, option: str) -> PartitionSpec:
    """The spec of a sharding.

    Raises:
      TypeError: it is neither a NamedSharding nor a PartitionSpec.
      ValueError: it is in the host's memory.
    """
    if isinstance(value, PartitionSpec):
        return value
    if not isinstance(value, NamedSharding):
        raise TypeError(
            f"`{option}` must be NamedShardings, PartitionSpecs or None for what is "
            f"free, but got {value!r} of type {type(value).__name__}."
        )
    if value.memory_kind == "pinned_host":
        raise ValueError(
            f"`{option}` must be on devices, but got the memory {value.memory_kind}; "
            f"give offload='optimizer_state' for state in the host's memory."
        )
    return value.spec


def mesh_of(given: MeshLike | None, trees: Any) -> MeshLike | None:
    """The mesh that NamedShardings are on, or the one that is `given`.

    Raises:
      ValueError: they are on others.
    """
    for each in jax.tree.leaves(trees):
        if not isinstance(each, NamedSharding):
            continue
        axes = each.mesh.shape
        own = MeshShape(tuple(map(str, axes)), tuple(axes.values()))
        given = each.mesh if given is None else given
        try:
            is_same = parse_mesh(given, own.size) == own
        except ValueError:
            is_same = False
        if not is_same:
            raise ValueError(
                f"Shardings must be on the mesh of the step, {given}, but one is on "
                f"{own}; give all on one mesh, or PartitionSpecs."
            )
    return given


def as_prefix(shardings: Any) -> tuple[Any, ...]:
    """`in_shardings` by argument; one sharding alone is that of the first, and so on.

    Raises:
      TypeError: it is no tuple.
    """
    if shardings is None:
        return ()
    if not isinstance(shardings, tuple | list):
        raise TypeError(
            f"`in_shardings` must be a tuple with an entry for each argument, but got "
            f"{shardings!r} of type {type(shardings).__name__}; write ({shardings!r},) "
            f"if it is that of the first."
        )
    return tuple(shardings)


def argument_pins(
    shardings: Sequence[Any], names: Sequence[str]
) -> dict[str, PartitionSpec]:
    """Pins for `in_shardings`, by expressions of the paths at or below each of them.

    Args:
      shardings: a prefix of the tree of each argument that is not static.
      names: of these arguments, in order.

    Raises:
      ValueError: there are fewer arguments.
    """
    if len(shardings) > len(set(names)):
        raise ValueError(
            f"`in_shardings` must have one entry for each argument that is not static, "
            f"which are {', '.join(dict.fromkeys(names))}, but got {len(shardings)}."
        )
    pins = {}
    for name, tree in zip(names, shardings, strict=False):
        for path, value in jax.tree_util.tree_flatten_with_path(tree)[0]:
            where = re.escape(name + jax.tree_util.keystr(path))
            key = _Place(rf"^{where}{_BELOW}")
            pins[key] = spec_of(value, "in_shardings")
    return pins


def with_result_pins(fun: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """`fun` with each result pinned that `out_shardings`, a prefix of them, names."""
    if shardings is None:
        return fun

    @functools.wraps(fun)
    def pinned(*args: Any, **kwargs: Any) -> Any:
        results = fun(*args, **kwargs)
        marked = jax.tree.map(
            lambda each: _FREE if each is None else each,
            shardings,
            is_leaf=lambda each: each is None,
        )
        try:
            whole = jax.tree.broadcast(marked, results)
        except ValueError as error:
            raise ValueError(
                f"`out_shardings` must be a prefix of the tree of results: {error}"
            ) from None
        return jax.tree.map(_pinned, whole, results)

    return pinned


def _pinned(sharding: Any, leaf: Any) -> Any:
    if sharding is _FREE or not hasattr(leaf, "shape"):
        return leaf
    return pin(leaf, spec_of(sharding, "out_shardings"))
