"""Matrix products: batch and free dims are parallel, contracted dims reduce."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..graph.op_graph import Operator
from ..sharding.spec import REPLICATED, SUM, State
from .base import Factor, linear, register


@register("dot_general")
def dot_general(op: Operator) -> list[Factor]:
    return product_factors(op, op.params["dimension_numbers"])


def product_factors(
    op: Operator,
    dimension_numbers: Any,
    whole_left: Collection[int] = (),
    group_dims: Collection[int] = (),
    first_dim: int = 0,
) -> list[Factor]:
    """The factors of a product of operands 0 and 1; all other operands are whole.

    Args:
      op: the product.
      dimension_numbers: as in `lax.dot_general`.
      whole_left: dims of operand 0 that may not be split.
      group_dims: dims of operand 1 that may not be split and are not in the result.
      first_dim: the result dim at which those of `lax.dot_general` start.
    """
    (left_contract, right_contract), (left_batch, right_batch) = dimension_numbers
    left, right = op.operand_types[:2]
    others = (REPLICATED,) * (len(op.operands) - 2)
    factors = []

    def add(name: str, i: State, j: State, result: State) -> None:
        size = left.shape[i] if i >= 0 else right.shape[j]
        if i not in whole_left:
            factors.append(Factor(name, (i, j, *others), (result,), size))

    result_dim = first_dim
    for number, (i, j) in enumerate(zip(left_batch, right_batch, strict=True)):
        add(f"b{number}", i, j, result_dim)
        result_dim += 1
    for dim in range(left.rank):
        if dim not in left_contract and dim not in left_batch:
            add(f"m{dim}", dim, REPLICATED, result_dim)
            result_dim += 1
    for dim in range(right.rank):
        if dim not in (*right_contract, *right_batch, *group_dims):
            add(f"n{dim}", REPLICATED, dim, result_dim)
            result_dim += 1
    for number, (i, j) in enumerate(zip(left_contract, right_contract, strict=True)):
        add(f"k{number}", i, j, SUM)
    return [*factors, linear(op, (0,)), linear(op, (1,))]
