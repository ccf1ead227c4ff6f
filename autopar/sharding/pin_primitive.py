"""`autopar.pin`: an identity that the planner reads as a spec.

It is a primitive of its own, so that a step with pins runs unchanged where nothing is
parallelized: under `jax.jit` it vanishes, and it commutes with grad and vmap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from ..jax_compat import ad, batching, mlir
from .layouts import FREE

source_info_util.register_exclusion(__file__)  # errors name the caller's line

T = TypeVar("T")

pin_p = Primitive("autopar_pin")


def pin(x: T, spec: PartitionSpec) -> T:
    """`x` itself; in a parallelized step it lies at this place as `spec` says.

    Its cotangent is pinned alike. Outside of `autopar.parallelize` nothing happens.

    Args:
      x: an array, or a tree of arrays that all get the spec.
      spec: mesh axes for each dim, most major first; None keeps a dim whole, as do
        entries left out at the end, and `autopar.FREE` leaves it to the solver.

    Raises:
      TypeError: `spec` is no PartitionSpec.
      ValueError: it has more entries than `x` has dims. Axes are checked when the step
        is planned: one that the mesh lacks, or that does not divide, is an error.
    """
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"A pin must be a jax.sharding.PartitionSpec, but got {spec!r} of type "
            f"{type(spec).__name__}; write autopar.pin(x, PartitionSpec(...))."
        )
    return jax.tree.map(lambda leaf: _pin_leaf(leaf, spec), x)


def _pin_leaf(leaf: Any, spec: PartitionSpec) -> jax.Array:
    array = jnp.asarray(leaf)
    if len(spec) > array.ndim:
        raise ValueError(
            f"A pin must have at most one entry for each dim, but {spec} has "
            f"{len(spec)} for an array of shape {array.shape}; drop "
            f"{len(spec) - array.ndim}."
        )
    return pin_p.bind(array, spec=spec, pins_cotangent=True)


def _transpose(
    cotangent: Any, _: Any, *, spec: PartitionSpec, pins_cotangent: bool
) -> list[Any]:
    if not pins_cotangent:
        return [cotangent]
    return [pin_p.bind(cotangent, spec=spec, pins_cotangent=True)]


def _batch(
    args: Sequence[Any],
    dims: Sequence[int],
    *,
    spec: PartitionSpec,
    pins_cotangent: bool,
) -> tuple[Any, int]:
    """The new dim is free, as vmap's user said nothing of it."""
    (x,), (dim,) = args, dims
    entries = [*spec, *[None] * (x.ndim - 1 - len(spec))]
    entries.insert(dim, FREE)
    params = {"spec": PartitionSpec(*entries), "pins_cotangent": pins_cotangent}
    return pin_p.bind(x, **params), dim


pin_p.def_impl(lambda x, **_: x)
pin_p.def_abstract_eval(lambda aval, **_: aval)
mlir.register_lowering(pin_p, lambda context, x, **_: [x])
ad.deflinear2(pin_p, _transpose)
batching.primitive_batchers[pin_p] = _batch
