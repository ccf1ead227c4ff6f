"""`autopar.relayout` and `relayout_like`: a value elsewhere, its gradient where it was.

`relayout_like` is a primitive of two operands that gives its first; the planner reads
the second as it lies, and the rule (`rules/elementwise.py`) lays the first out like it.
Under `jax.jit` it vanishes, and it commutes with grad and vmap.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from ..jax_compat import ad, batching, mlir
from .pin_primitive import pin, pin_p

source_info_util.register_exclusion(__file__)  # errors name the caller's line

T = TypeVar("T")

relayout_like_p = Primitive("autopar_relayout_like")


def relayout(x: T, spec: PartitionSpec) -> T:
    """`x` itself; in a parallelized step it lies here as `spec` says.

    Unlike with `autopar.pin`, its cotangent goes back to where `x` lay before, at once:
    what is gathered here has its gradient reduced and scattered.

    Args:
      x: an array, or a tree of arrays that all get the spec.
      spec: as for `autopar.pin`.

    Raises:
      TypeError, ValueError: as `autopar.pin`.
    """
    return jax.tree.map(lambda leaf: _relayout_leaf(leaf, spec), x)


def relayout_like(x: T, like: T) -> T:
    """`x` itself; in a parallelized step it lies here as `like` does.

    Its cotangent goes back to where `x` lay before; `like` gets none. `like` counts as
    read here, so the planner keeps its memory until then.

    Args:
      x: an array or a tree of arrays.
      like: the same tree of arrays with the same shapes, of any dtypes.

    Raises:
      ValueError: trees or shapes differ.
    """
    return jax.tree.map(_relayout_leaf_like, x, like)


def _relayout_leaf(leaf: Any, spec: PartitionSpec) -> jax.Array:
    array = jnp.asarray(leaf)
    return _relayout(array, spec) if _has_gradient(array) else pin(array, spec)


def _has_gradient(array: jax.Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _relayout_leaf_like(x: Any, like: Any) -> jax.Array:
    array, other = jnp.asarray(x), jnp.asarray(like)
    if array.shape != other.shape:
        raise ValueError(
            f"relayout_like requires arrays of one shape, but got {array.shape} and "
            f"{other.shape}; use autopar.relayout(x, spec)."
        )
    if not _has_gradient(array):
        return relayout_like_p.bind(array, other)
    return _relayout_like(array, other)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _relayout(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    return pin(x, spec)


@_relayout.defjvp
def _(
    spec: PartitionSpec, primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    like = relayout_like_p.bind(tangent, x)
    return _relayout(x, spec), pin_p.bind(like, spec=spec, pins_cotangent=False)


@jax.custom_jvp
def _relayout_like(x: jax.Array, like: jax.Array) -> jax.Array:
    return relayout_like_p.bind(x, like)


@_relayout_like.defjvp
def _(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    x, like = primals
    tangent = relayout_like_p.bind(tangents[0], x)
    return _relayout_like(x, like), relayout_like_p.bind(tangent, like)


def _transpose(cotangent: Any, x: Any, like: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent, None]
    return [relayout_like_p.bind(cotangent, like), None]


def _batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, Any]:
    """Both with the new dim in one place; one that has none gets copies."""
    pairs = list(zip(args, dims, strict=True))
    size = next(arg.shape[dim] for arg, dim in pairs if dim is not None)
    x, like = (batching.bdim_at_front(arg, dim, size) for arg, dim in pairs)
    return relayout_like_p.bind(x, like), 0


relayout_like_p.def_impl(lambda x, like: x)
relayout_like_p.def_abstract_eval(lambda x, like: x)
mlir.register_lowering(relayout_like_p, lambda context, x, like: [x])
# Linear in the first operand; the second is looked at, not computed with.
ad.defjvp(
    relayout_like_p, lambda tangent, x, like: relayout_like_p.bind(tangent, like), None
)
ad.primitive_transposes[relayout_like_p] = _transpose
batching.primitive_batchers[relayout_like_p] = _batch
