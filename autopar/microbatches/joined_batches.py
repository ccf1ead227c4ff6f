"""Arrays that hold several batches one behind the other, cut into microbatches.

Chosen and rejected answers, or real and made images, joined along the examples go
through a network as one batch of twice the size. A dim of c batches of B
examples with k values each is [c, B, k]: microbatch m holds of every copy the
examples i with i mod M = m. So batches are joined, and taken apart again, microbatch by
microbatch, which no contiguous split over devices could do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..graph.op_graph import Operator
from ..rules.base import Factor, bind_params
from ..sharding.spec import REPLICATED, State

# A state, and how many examples the dim holds if it is cut: its size is k times that.
Part = tuple[State, int]
WHOLE: Part = REPLICATED, 1
# What an operator does to a microbatch: its factor, parts of operands and of results.
Way = tuple[Factor, Sequence[Part], Sequence[Part]]
JOINED = "batches"  # how factors of operators are called that join batches


def parts_of(states: Sequence[State], number: int) -> list[Part]:
    """The parts of tensors in `states`, of which each that is cut has so many."""
    return [(state, number) if state >= 0 else (state, 1) for state in states]


def joint_of(op: Operator, parts: Sequence[Part], batch_size: int) -> Way | None:
    """How `op` joins whole batches or takes them apart; None if it cuts or mixes them.

    All that it reads and makes has as many values for each example.
    """
    first = next((i for i, (state, _) in enumerate(parts) if state >= 0), None)
    if first is None:
        return None
    dim, number = parts[first]
    grain = op.operand_types[first].shape[dim] // number
    borders = _borders(op, dim) if grain else ()
    if not borders or any(border % (grain * batch_size) for border in borders):
        return None
    taken, made = (
        [(dim, kind.shape[dim] // grain) if kind.rank else WHOLE for kind in kinds]
        for kinds in (op.operand_types, op.result_types)
    )
    is_empty = any(number == 0 for _, number in (*taken, *made))
    pairs = zip(parts, taken, strict=True)
    if is_empty or any(has not in (WHOLE, wanted) for has, wanted in pairs):
        return None
    operands, results = (tuple(state for state, _ in each) for each in (taken, made))
    return Factor(JOINED, operands, results, size=0), taken, made


def _borders(op: Operator, dim: int) -> Sequence[int]:
    """What must be whole batches along `dim`; nothing if that is not what is joined."""
    params = op.params
    match op.kind:
        case "concatenate" if params["dimension"] == dim:
            return [kind.shape[dim] for kind in op.operand_types]
        case "split" if params["axis"] == dim:
            return params["sizes"]
        case "slice" if not params["strides"] or params["strides"][dim] == 1:
            return params["start_indices"][dim], params["limit_indices"][dim]
        case "pad" if not params["padding_config"][dim][2]:
            return params["padding_config"][dim][:2]
    return ()


def bind_joint(
    op: Operator, operands: Sequence[Any], dim: int, num_microbatches: int
) -> list[Any]:
    """The operator on one microbatch of every batch."""

    def part(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(size // num_microbatches for size in sizes)

    def changed(name: str, *at_dim: Any) -> dict[str, Any]:
        values = op.params[name]
        return {name: (*values[:dim], *at_dim, *values[dim + 1 :])}

    match op.kind:
        case "split":
            params = {"sizes": part(op.params["sizes"])}
        case "slice":
            start, limit = part(_borders(op, dim))
            params = changed("start_indices", start) | changed("limit_indices", limit)
        case "pad":
            params = changed("padding_config", (*part(_borders(op, dim)), 0))
        case _:
            params = {}
    return bind_params(op, operands, **params)
