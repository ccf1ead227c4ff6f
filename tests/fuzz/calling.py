"""Operations of the user's own: primitives, kernels, callbacks, shard_maps."""

from __future__ import annotations

from typing import Any

from tests.fuzz.operations import Written, operation
from tests.fuzz.scope import Scope, Unfit, is_bool, is_float, is_number


@operation("calls", 2, smooth=False)
def own_product(s: Scope) -> Written:
    x = s.value(is_float, rank=3, size=True)
    width = s.one_of(4, 8)
    shape = (s.shape(x)[0], s.shape(x)[2], width)
    return f"product_p.bind({x}, jnp.ones({shape}, {x}.dtype) * jnp.mean({x}))"


@operation("calls", 2, smooth=False)
def kernel(s: Scope) -> Written:
    x = s.value(is_float, rank=2, size=True)
    return f"{s.one_of('doubled', 'halved')}({x})"


@operation("calls", 2, smooth=False)
def opaque(s: Scope) -> Written:
    x = s.value(lambda kind: kind.dtype == "float32", least=1, size=True)
    return f"{s.one_of('partitioned', 'batched', 'called', 'solved')}({x})"


@operation("calls", 1)
def alternative(s: Scope) -> Written:
    x = s.value(is_float)
    return s.one_of(
        f"lax.platform_dependent({x}, cpu=jnp.sin, default=jnp.cos)",
        f"lax.composite(jnp.sin, 'fuzz.sin')({x})",
        f"lax.optimization_barrier(({x}, jnp.cos({x})))[1]",
        f"lax.reduce_precision({x}, 5, 10)",
    )


def is_narrow(kind: Any) -> bool:
    return kind.dtype.itemsize < 8


@operation("calls", 2, smooth=False)
def host(s: Scope) -> Written:
    """Once for the mesh, and outside of loops, whose trips the devices would count.

    Not of 64 bits: `jax.enable_x64` is of one thread, and a callback runs in another.
    Where it fails on one device, the others wait until XLA ends the process.
    """
    if s.depth:
        raise Unfit
    x = s.value(lambda kind: is_float(kind) or is_bool(kind), is_narrow)
    function = "np.logical_not" if is_bool(s.types[x]) else "np.cos"
    call = f"jax.experimental.io_callback({function}, jax.typeof({x}), {x})"
    return s.one_of(f"called_with({x})", call)


@operation("calls", 4)
def user_shard_map(s: Scope) -> Written:
    def divides(kind: object) -> bool:
        return all(n and n % 8 == 0 for n in kind.shape)  # type: ignore[attr-defined]

    x = s.value(is_number, is_float, divides, rank=2)
    return f"{s.one_of('in_rows', 'exchanged')}({x}, mesh=ROWS_AND_COLUMNS)"
