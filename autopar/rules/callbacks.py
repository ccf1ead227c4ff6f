"""Host callbacks and stateful random numbers: once for the mesh, not once a device.

Operands are whole, and only the first device calls. What it gets back is a pending sum
to which every other device adds nothing, so that all of them hold the one value there
is. `pure_callback` has no rule: its results are the same wherever it is called, so that
each device calls it with whole operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph.op_graph import Operator
from ..sharding.spec import MAX, REPLICATED, SUM
from .base import Factor, Shard, bind_params, register


def bind_once(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Bind the primitive on the first device; zeros on the others."""
    return lax.cond(
        shard.is_first(range(shard.mesh.num_axes)),
        lambda: bind_params(op, operands),
        lambda: [jnp.zeros(kind.shape, kind.dtype) for kind in op.result_types],
    )


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
