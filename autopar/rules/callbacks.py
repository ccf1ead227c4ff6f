"""Host callbacks and stateful random numbers: once for the mesh, not once a device.

Operands are whole, and only the first device calls. What it gets back is a pending sum
to which every other device adds nothing, so that all of them hold the one value there
is. `pure_callback` has no rule: its results are the same wherever it is called, so that
each device calls it with whole operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph.effects import CALLBACKS
from ..graph.op_graph import Operator
from ..sharding.spec import MAX, REPLICATED, SUM
from .base import Factor, Shard, bind_params, register
from .host_calls import HostCalls


def bind_once(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Bind the primitive on the first device; zeros on the others."""
    return lax.cond(
        shard.is_first(range(shard.mesh.num_axes)),
        lambda: _bind_guarded(op, operands, shard.host_calls),
        lambda: [jnp.zeros(kind.shape, kind.dtype) for kind in op.result_types],
    )


def _bind_guarded(
    op: Operator, operands: Sequence[Any], calls: HostCalls | None
) -> list[Any]:
    """Bind the primitive, its callback in the hands of the program's host calls."""
    if calls is None or op.kind not in CALLBACKS:
        return bind_params(op, operands)
    if op.kind == "debug_print":
        show = functools.partial(op.eqn.primitive.impl, **op.params)
        guarded: Callable[..., Any] = calls.guarded(show, (), op.source)
        jax.debug.callback(guarded, *operands)
        return []
    call = calls.guarded(op.params["callback"], op.result_types, op.source)
    return bind_params(op, operands, callback=call)


@register(
    "debug_callback",
    "debug_print",
    "io_callback",
    "rng_uniform",
    bind=bind_once,
    may_repeat=False,
)
def run_once(op: Operator) -> list[Factor]:
    """The only factor: along every axis the first device has it all."""
    return [
        Factor(
            "once",
            (REPLICATED,) * len(op.operands),
            tuple(MAX if k.dtype == np.bool_ else SUM for k in op.result_types),
            size=0,
            splits=False,
        )
    ]
