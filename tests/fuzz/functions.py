"""What the text of a program may call besides JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.ad_checkpoint  # which `import jax` leaves out
import jax.numpy as jnp
import numpy as np
from jax import lax, nn
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import primitives

from tests.fuzz import own

MESHES = own.MESHES
_ONE = jax.ShapeDtypeStruct((), "float32")


def mean_of(value: Any) -> Any:
    """A bounded scalar that depends on every element of an inexact value; else 0."""
    if not jnp.issubdtype(value.dtype, jnp.inexact) or not value.size:
        return 0.0
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = value.real + 0.5 * value.imag
    return jnp.mean(jnp.tanh(value.astype(jnp.float32)))


def moved(value: Any, slope: Any) -> Any:
    """One step of gradient descent, in the value's own dtype."""
    if slope.dtype == jax.dtypes.float0:
        return value
    return (value - 0.1 * slope).astype(value.dtype)


def positive(x: jax.Array) -> jax.Array:
    """Symmetric positive definite [..., n, n] of any [..., n, n]."""
    squared = jnp.tanh(x) @ jnp.swapaxes(jnp.tanh(x), -1, -2)
    return squared / x.shape[-1] + jnp.diag(jnp.arange(1.0, 1 + x.shape[-1]))


def branched(x: jax.Array) -> jax.Array:
    """A scalar, whose gradient keeps for each branch what only that one needs."""
    branches = (lambda a: jnp.mean(jnp.sin(a)), lambda a: jnp.mean(a * jnp.tanh(a)))
    return lax.cond(jnp.mean(x) > 0, *branches, x)


def in_row_major(x: jax.Array) -> jax.Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def called_with(x: jax.Array) -> jax.Array:
    """A host callback that changes nothing."""
    jax.debug.callback(lambda value: None, x)
    return x


def printed(x: jax.Array) -> jax.Array:
    jax.debug.print("mean {mean}", mean=jnp.mean(x))
    return x


def scattered_to_maxima(
    x: jax.Array, source: jax.Array, window: tuple[int, ...]
) -> jax.Array:
    """`source` [windows] where windows of `x`, side by side, have their maxima.

    JAX keeps no function for the primitive, which its gradients have in another form.
    """
    scatter = jax.make_jaxpr(lax.add)(_ONE, _ONE)
    select = jax.make_jaxpr(lax.ge)(_ONE, _ONE)
    return primitives.select_and_scatter_p.bind(
        x,
        source,
        jnp.float32(0),
        select_jaxpr=select.jaxpr,
        select_consts=(),
        scatter_jaxpr=scatter.jaxpr,
        scatter_consts=(),
        window_dimensions=window,
        window_strides=window,
        padding=((0, 0),) * x.ndim,
    )


NAMESPACE: dict[str, Any] = {
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "np": np,
    "nn": nn,
    "primitives": primitives,
    **{name: getattr(own, name) for name in (*own.FUNCTIONS, *own.MESHES)},
    **{
        function.__name__: function
        for function in (
            branched,
            called_with,
            in_row_major,
            mean_of,
            moved,
            positive,
            printed,
            scattered_to_maxima,
        )
    },
}
