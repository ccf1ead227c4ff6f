"""Matrix products: batch and free dims are parallel, contracted dims reduce."""

from __future__ import annotations

from ..graph import Operator
from ..spec import REPLICATED, SUM
from .base import Factor, linear, register


@register("dot_general")
def dot_general(op: Operator) -> list[Factor]:
    (left_contract, right_contract), (left_batch, right_batch) = op.params[
        "dimension_numbers"
    ]
    left, right = op.operand_types
    factors = []
    for result_dim, (i, j) in enumerate(zip(left_batch, right_batch, strict=True)):
        factors.append(Factor(f"b{result_dim}", (i, j), (result_dim,), left.shape[i]))
    result_dim = len(left_batch)
    for dim in range(left.rank):
        if dim not in left_contract and dim not in left_batch:
            state = (dim, REPLICATED)
            factors.append(Factor(f"m{dim}", state, (result_dim,), left.shape[dim]))
            result_dim += 1
    for dim in range(right.rank):
        if dim not in right_contract and dim not in right_batch:
            state = (REPLICATED, dim)
            factors.append(Factor(f"n{dim}", state, (result_dim,), right.shape[dim]))
            result_dim += 1
    pairs = zip(left_contract, right_contract, strict=True)
    for number, (i, j) in enumerate(pairs):
        factors.append(Factor(f"k{number}", (i, j), (SUM,), left.shape[i]))
    return [*factors, linear(op, (0,)), linear(op, (1,))]
