"""Arrays that hold several batches one behind the other, cut into microbatches.

Chosen and rejected answers, or real and made images, joined along the examples go
through a network as one batch of twice the size. A dim of `copies` batches of B
examples with k values each is [copies, B, k]: microbatch m holds of every copy the
examples i with i mod M = m. So batches are joined, and taken apart again, microbatch by
microbatch, which no contiguous split over devices could do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from ..graph.op_graph import Operator
from ..rules.base import Factor
from ..sharding.spec import REPLICATED, State


@dataclass(frozen=True)
class Joint:
    """How an operator joins batches or takes them apart, and how many it has of each.

    `operands` and `results` are numbers of copies; 1 too for what is not cut.
    """

    factor: Factor
    operands: tuple[int, ...]
    results: tuple[int, ...]


def joint_of(
    op: Operator, states: Sequence[State], copies: Sequence[int], batch_size: int
) -> Joint | None:
    """What `op` does to whole batches in `states`; None if it cuts or mixes them."""
    cut = [i for i, state in enumerate(states) if state >= 0]
    if op.kind not in _JOINTS or not cut or min(states) < REPLICATED:
        return None
    first = cut[0]
    dim = states[first]
    unit, rest = divmod(op.operand_types[first].shape[dim], copies[first])
    if rest or unit == 0 or unit % batch_size:
        return None
    found = _JOINTS[op.kind](op, states, copies, dim, unit)
    if found is None:
        return None
    operand_states, taken, result_states, made = found
    factor = Factor("batches", operand_states, result_states, size=0)
    return Joint(factor, tuple(taken), tuple(made))


# States and copies of operands, then of results.
_Found = tuple[tuple[State, ...], Sequence[int], tuple[State, ...], Sequence[int]]


def _concatenate(
    op: Operator, states: Sequence[State], copies: Sequence[int], dim: int, unit: int
) -> _Found | None:
    sizes = [kind.shape[dim] for kind in op.operand_types]
    if dim != op.params["dimension"] or any(size % unit for size in sizes):
        return None
    taken = [size // unit for size in sizes]
    for state, has, wanted in zip(states, copies, taken, strict=True):
        if state != REPLICATED and (state, has) != (dim, wanted):
            return None
    return (dim,) * len(sizes), taken, (dim,), [sum(taken)]


def _slice(
    op: Operator, states: Sequence[State], copies: Sequence[int], dim: int, unit: int
) -> _Found | None:
    strides = op.params["strides"]
    start, limit = op.params["start_indices"][dim], op.params["limit_indices"][dim]
    if (strides and strides[dim] != 1) or start % unit or limit % unit:
        return None
    return (dim,), copies, (dim,), [(limit - start) // unit]


def _split(
    op: Operator, states: Sequence[State], copies: Sequence[int], dim: int, unit: int
) -> _Found | None:
    sizes = op.params["sizes"]
    if dim != op.params["axis"] or any(size % unit for size in sizes):
        return None
    return (dim,), copies, (dim,) * len(sizes), [size // unit for size in sizes]


def _pad(
    op: Operator, states: Sequence[State], copies: Sequence[int], dim: int, unit: int
) -> _Found | None:
    low, high, interior = op.params["padding_config"][dim]
    if states[1] != REPLICATED or interior or low % unit or high % unit:
        return None
    made = copies[0] + (low + high) // unit
    return (dim, REPLICATED), copies, (dim,), [made]


_JOINTS = {
    "concatenate": _concatenate,
    "slice": _slice,
    "split": _split,
    "pad": _pad,
}


def bind_joint(
    op: Operator, operands: Sequence[Any], factor: Factor, num_microbatches: int
) -> list[Any]:
    """The operator on one microbatch of every batch."""
    (dim, *_), params = factor.operands, op.params
    if op.kind == "concatenate":
        return [lax.concatenate(operands, dim)]
    if op.kind == "split":
        sizes = [size // num_microbatches for size in params["sizes"]]
        return list(lax.split(operands[0], sizes, dim))
    if op.kind == "pad":
        config = [tuple(each) for each in params["padding_config"]]
        low, high, _ = config[dim]
        config[dim] = low // num_microbatches, high // num_microbatches, 0
        return [lax.pad(operands[0], operands[1], config)]
    starts, limits = list(params["start_indices"]), list(params["limit_indices"])
    starts[dim] //= num_microbatches
    limits[dim] //= num_microbatches
    return [lax.slice(operands[0], starts, limits, params["strides"])]
