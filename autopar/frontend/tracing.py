"""Trace a function to a flat jaxpr, with the trees and paths of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, get_abstract_mesh, use_abstract_mesh
from jax.tree_util import keystr, tree_flatten_with_path

from ..graph.garbage import without_garbage_collection
from ..graph.traced_function import TracedFunction
from ..jax_compat import assume_cudnn
from ..state.distributed_array import (
    AbstractDistributedArray,
    DistributedArray,
    abstract_leaf,
)
from .batched_conditions import with_scalar_conditions
from .batching_dims import with_batching_dims
from .dead_code import dead_code_eliminated
from .implementations import with_implementations
from .static_arguments import parameters_of
from .transposed_products import with_transposed_products

_LEAF_TYPES = (
    jax.Array,
    DistributedArray,
    jax.ShapeDtypeStruct,
    AbstractDistributedArray,
    bool,
    int,
    float,
    complex,
    np.ndarray,
    np.generic,
)
_is_tracing = ContextVar("is_tracing", default=False)


def is_array_leaf(leaf: Any) -> bool:
    """Whether a leaf can be traced: an array, a number, or the shape of one."""
    return isinstance(leaf, _LEAF_TYPES) or hasattr(leaf, "__jax_array__")


def parameter_names(fun: Callable[..., Any], num_args: int) -> tuple[str, ...]:
    """Names of the positional parameters, as far as the signature tells."""
    parameters = parameters_of(fun)
    names: list[str] = []
    for index in range(num_args):
        parameter = parameters[min(index, len(parameters) - 1)] if parameters else None
        if parameter is None or parameter.kind is parameter.KEYWORD_ONLY:
            names.append(f"arg{index}")
        elif parameter.kind is parameter.VAR_POSITIONAL:
            first = len(parameters) - 1
            names.append(f"{parameter.name}[{index - first}]")
        else:
            names.append(parameter.name)
    return tuple(names)


def leaf_paths(tree: Any, prefix: str) -> tuple[str, ...]:
    """One readable path a leaf: `state.params['w1']`."""
    flat, _ = tree_flatten_with_path(tree)
    return tuple(prefix + keystr(path) for path, _ in flat)


def argument_paths(
    names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[str, ...]:
    """Paths of all leaves of `(args, kwargs)`, in tree order."""
    paths = [
        p for name, arg in zip(names, args, strict=True) for p in leaf_paths(arg, name)
    ]
    for name in sorted(kwargs):
        paths.extend(leaf_paths(kwargs[name], name))
    return tuple(paths)


def check_leaves(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise TypeError, naming the path, if some leaf is not an array or a number."""
    for leaf, path in zip(leaves, paths, strict=True):
        if not is_array_leaf(leaf):
            raise TypeError(
                f"Every leaf of the arguments must be an array or a number, but {path} "
                f"is {leaf!r} of type {type(leaf).__name__}; mark its argument with "
                f"static_argnums, or take it out of the tree."
            )


def _auto_axes() -> AbstractContextManager[Any]:
    """The caller's mesh, if `jax.set_mesh` set one, with no axis in the types."""
    mesh = get_abstract_mesh()
    if mesh.empty:
        return nullcontext()
    return use_abstract_mesh(
        mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    )


def _without_sharding(leaf: Any) -> Any:
    """A leaf whose type says nothing of a mesh: where arrays lie is for the plan."""
    if not isinstance(leaf, jax.Array):
        return abstract_leaf(leaf)
    weak = jax.typeof(leaf).weak_type
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)


def weak_outputs(traced: TracedFunction) -> tuple[int, ...]:
    """Positions of the results that leave their dtype to what they meet."""
    avals = enumerate(traced.jaxpr.out_avals)
    return tuple(i for i, aval in avals if getattr(aval, "weak_type", False))


def is_tracing() -> bool:
    """Whether this thread is tracing a function to be planned."""
    return _is_tracing.get()


assume_cudnn(is_tracing)


@contextmanager
def _marked_as_tracing() -> Iterator[None]:
    token = _is_tracing.set(True)
    try:
        yield
    finally:
        _is_tracing.reset(token)


def rewritten(closed: Any) -> Any:
    """What all that follows sees of the jaxpr that JAX traced.

    Variables that both have are the same objects, with equal values. Dead code is gone
    before readers are counted.
    """
    closed = with_scalar_conditions(with_implementations(closed))
    return with_transposed_products(dead_code_eliminated(with_batching_dims(closed)))


@without_garbage_collection()
def trace(
    fun: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TracedFunction:
    """Trace `fun(*args, **kwargs)`; leaves may be arrays or jax.ShapeDtypeStruct.

    Exceptions of `fun` itself pass through untouched.
    """
    names = parameter_names(fun, len(args))
    leaves, _ = jax.tree.flatten((tuple(args), dict(kwargs)))
    paths = argument_paths(names, args, kwargs)
    check_leaves(leaves, paths)

    @wraps(fun)
    def fresh(*args: Any, **kwargs: Any) -> Any:  # jit's own cache must not be hit
        return fun(*args, **kwargs)

    with _auto_axes(), _marked_as_tracing():
        args, kwargs = jax.tree.map(_without_sharding, (tuple(args), dict(kwargs)))
        traced = jax.jit(fresh).trace(*args, **kwargs)
    return TracedFunction(
        name=getattr(fun, "__name__", type(fun).__name__),
        jaxpr=rewritten(traced.jaxpr),
        in_tree=traced.in_tree,
        out_tree=jax.tree.structure(traced.out_info),
        input_paths=paths,
        output_paths=leaf_paths(traced.out_info, "out"),
    )
