"""A value laid out like another: `autopar.relayout_like`, gradients of relayouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from ..graph.op_graph import Operator
from ..sharding.relayout import relayout_like_p
from .base import Factor, Shard, register
from .elementwise import dim_factors


def _bind_first(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """The other operand says where, and that is done by now.

    It is kept alive, as the plan has what it is made by.
    """
    del op, shard
    return [lax.optimization_barrier(tuple(operands))[0]]


@register(relayout_like_p.name, bind=_bind_first)
def relayout_like(op: Operator) -> list[Factor]:
    return dim_factors(op)
