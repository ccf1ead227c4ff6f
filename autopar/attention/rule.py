"""Attention that was found in a step: heads, rows, or a ring of keys and values.

Results forward are o, a statistic of each row of scores, and the keys and values for
the backward pass, which the ring may keep as they come by. Fused, one kernel does it
(`fused_attention.py`), and there is no ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive

from ..graph.op_graph import Operator
from ..jax_compat import mlir
from ..rules.base import Factor, Shard, bind_params, register
from ..rules.halos import Exchange, Traffic, register_traffic, shard_shape
from ..sharding.spec import REPLICATED, SUM, State, axes_of_dim
from .fused_attention import KERNELS
from .ring import Ring, attend, attend_backward
from .spec import Attention, Labels, Sizes, shape_of, wide

RING, KEPT = "ring:blocks", "ring:kept"  # as `halos.RING` begins
RINGS = (RING, KEPT)
# Forward and backward: how often scores are read or written, and how many blocks of
# them there are at once.
_SCORES_MOVED, _SCORES_HELD = (4, 8), (2, 4)
# Products and reductions of a block: scores and o, a row's maximum and sum; backward
# scores again and four gradients. What the softmax takes off is summed once, backward.
_KERNELS, _KERNELS_ONCE = (4, 5), (0, 1)

KINDS = ("autopar_attention", "autopar_attention_backward")
FUSED_KINDS = ("autopar_fused_attention", "autopar_fused_attention_backward")
_PRIMITIVES = {kind: Primitive(kind) for kind in (*KINDS, *FUSED_KINDS)}


def bind_forward(
    attention: Attention, q: Any, k: Any, v: Any, sides: Sequence[Any]
) -> list[Any]:
    """o, a statistic of each row of scores, and k and v if it is not fused."""
    primitive = _PRIMITIVES[(FUSED_KINDS if attention.is_fused else KINDS)[0]]
    return primitive.bind(q, k, v, *sides, attention=attention)


def bind_backward(
    attention: Attention,
    forward: Sequence[Any],
    operands: Sequence[Any],
    d_o: Any,
    sides: Sequence[Any],
) -> list[Any]:
    """Gradients of q, k and v, the `operands`, from what the forward pass made."""
    (q, *others), (o, total, *handed_on) = operands, forward
    k, v = handed_on or others
    primitive = _PRIMITIVES[(FUSED_KINDS if attention.is_fused else KINDS)[1]]
    return primitive.bind(q, k, v, o, total, d_o, *sides, attention=attention)


def _is_forward(kind: str) -> bool:
    return kind in (KINDS[0], FUSED_KINDS[0])


def _operand_names(a: Attention, kind: str) -> list[Labels]:
    if _is_forward(kind):
        return [a.q, a.k, a.v, *a.sides]
    return [a.q, a.k, a.v, a.o, a.statistics, a.o, *a.sides]


def _result_names(a: Attention, kind: str) -> list[Labels]:
    if _is_forward(kind):
        return [a.o, a.statistics, *(() if a.is_fused else (a.k, a.v))]
    return [a.d_q, a.d_k, a.d_v]


def _state(names: Labels, label: int, missing: State = REPLICATED) -> State:
    return names.index(label) if label in names else missing


def _factors(op: Operator) -> list[Factor]:
    """One for each dim of the scores but keys, and two rings."""
    a: Attention = op.params["attention"]
    operands, results = _operand_names(a, op.kind), _result_names(a, op.kind)
    # What lacks a dim is a sum over it, backward; forward it is only handed on.
    missing = REPLICATED if _is_forward(op.kind) else SUM
    size = a.sizes(*[kind.shape for kind in op.operand_types[:3]])
    banded = a.row if a.scores.is_banded else None  # positions count along it
    factors = [
        Factor(
            f"{'rows' if label in a.rows else 'b'}{number}",
            tuple(_state(names, label) for names in operands),
            tuple(_state(names, label, missing) for names in results),
            size[label],
            is_positional=label == banded,
        )
        for number, label in enumerate(a.statistics)
        if size[label] > 1 and not (a.is_fused and label == banded)
    ]
    return [*factors, *_ring_factors(a, op.kind, operands, results, size)]


def _ring_factors(
    a: Attention,
    kind: str,
    operands: Sequence[Labels],
    results: Sequence[Labels],
    size: dict[int, int],
) -> list[Factor]:
    """Rows are split, and keys and values alike, but where they are kept."""
    if not a.rows or a.is_fused:
        return []
    row = max(a.rows, key=size.__getitem__) if a.row is None else a.row
    found = []
    for name in RINGS:

        def states(terms: Sequence[Labels], row_like: Sequence[int]) -> list[State]:
            return [
                _state(names, row if position in row_like else a.keys)
                for position, names in enumerate(terms)
            ]

        is_forward = _is_forward(kind)
        # Sides have all keys for the rows that are here.
        rows_in = [0, *range(3, len(operands))]
        inputs = states(operands, rows_in)
        outputs = states(results, [0, 1] if is_forward else [0])
        if name == KEPT and is_forward:
            outputs[2:] = [REPLICATED] * 2
        if name == KEPT and not is_forward:
            inputs[1:3] = [REPLICATED] * 2
        both = gcd(size[row], size[a.keys])
        found.append(
            Factor(
                *(name, tuple(inputs), tuple(outputs), both),
                is_positional=a.scores.is_banded,
                excludes=RINGS[name == RING],
            )
        )
    return found


def _ring(a: Attention, shard: Shard, kind: str) -> tuple[Ring, bool]:
    """The ring that this device is in, and whether keys and values are kept."""
    axes = [i for i, f in enumerate(shard.factors) if f.name in RINGS]
    keeps = any(shard.factors[axis].name == KEPT for axis in axes)
    if not axes:
        return Ring(), False
    # Keys, or backward their gradients, are split by the ring alone.
    is_forward = _is_forward(kind)
    spec = shard.operand_specs[1] if is_forward else shard.result_specs[1]
    order = axes_of_dim(spec, (a.k if is_forward else a.d_k).index(a.keys))
    assert sorted(order) == axes, (order, axes)
    count = prod(shard.mesh.axis_sizes[axis] for axis in order)
    called = tuple(shard.mesh.axis_names[axis] for axis in order)
    return Ring(called, count, shard.block_index(order)), keeps


def _bind(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    a: Attention = op.params["attention"]
    if a.is_fused:  # which kernel that is is known when a program is lowered
        return bind_params(op, operands)
    ring, keeps = _ring(a, shard, op.kind)
    row: Any = 0
    if a.row is not None:
        spec, dim = shard.operand_specs[0], a.q.index(a.row)
        if axes_of_dim(spec, dim):
            row = shard.offset(spec, dim, operands[0].shape[dim])
    return _on_shard(op.kind, a, operands, ring, row, keeps)


def _on_shard(
    kind: str,
    a: Attention,
    operands: Sequence[Any],
    ring: Ring,
    row: Any,
    keeps: bool,
) -> list[Any]:
    count = len(operands) - len(a.sides)
    given, sides = operands[:count], operands[count:]
    run: Any = attend if _is_forward(kind) else attend_backward
    made = list(run(a, *given, sides, ring, row, keeps=keeps))
    return made[:2] if a.is_fused and run is attend else made


register(*_PRIMITIVES, bind=_bind)(_factors)


def _traffic(op: Operator, factors: Sequence[Factor], sizes: Sequence[int]) -> Traffic:
    """Hops of keys and values and of their gradients, and what scores take."""
    a: Attention = op.params["attention"]
    is_forward = _is_forward(op.kind)
    axes = tuple(i for i, f in enumerate(factors) if f.name in RINGS)
    count = prod(sizes[axis] for axis in axes)
    keeps = any(factor.name == KEPT for factor in factors)
    local = a.sizes(*(shard_shape(op, factors, sizes, number) for number in range(3)))
    if keeps and not is_forward:
        local[a.keys] //= count
    block = prod(shape_of(a.table, local))
    is_round = is_forward or not keeps
    going_round = op.operand_types[1:3] if is_round else ()
    sent = [*zip((a.k, a.v), going_round, strict=False)]
    sent += [] if is_forward else zip((a.d_k, a.d_v), op.result_types[1:], strict=True)
    hops = [
        (kind.dtype.name, kind.itemsize * prod(shape_of(names, local)))
        for names, kind in sent
    ]
    exchanges = [
        Exchange(axes, 1, dtype, num_bytes, is_ring=True)
        for _ in range(count - 1)
        for dtype, num_bytes in hops
        if num_bytes
    ]
    score_bytes = block * max(4, jnp.dtype(a.score_dtype).itemsize)
    held = _SCORES_HELD[not is_forward] * score_bytes
    held += 2 * sum(num_bytes for _, num_bytes in hops) if count > 1 else 0
    moved = _SCORES_MOVED[not is_forward] * score_bytes * count
    return Traffic(
        *(tuple(exchanges), held, moved),
        num_parts=count,
        num_kernels=_KERNELS[not is_forward] * count + _KERNELS_ONCE[not is_forward],
    )


for _kind in KINDS:
    register_traffic(_kind, _traffic)


def _forward_types(
    q: Any, k: Any, v: Any, *sides: Any, attention: Attention
) -> list[Any]:
    del sides
    a = attention
    sizes = a.sizes(q.shape, k.shape, v.shape)
    made = [
        _like(q, a.o, sizes, a.o_dtype),
        _like(q, a.statistics, sizes, wide(a.score_dtype)),
    ]
    handed_on = [_like(q, a.k, sizes, k.dtype), _like(q, a.v, sizes, v.dtype)]
    return made if a.is_fused else [*made, *handed_on]


def _backward_types(
    q: Any, k: Any, v: Any, *others: Any, attention: Attention
) -> list[Any]:
    del others
    a = attention
    sizes = a.sizes(q.shape, k.shape, v.shape)
    names = (a.d_q, a.d_k, a.d_v)
    pairs = zip(names, a.gradient_dtypes, strict=True)
    return [_like(q, dims, sizes, dtype) for dims, dtype in pairs]


def _like(aval: Any, names: Labels, sizes: Sizes, dtype: Any) -> Any:
    shape = shape_of(names, sizes)
    return aval.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False)


def without_kernel(kind: str) -> Any:
    """An operator on one device, by plain operators."""

    def run(*operands: Any, attention: Attention) -> list[Any]:
        return _on_shard(kind, attention, operands, Ring(), 0, keeps=False)

    return run


def with_kernel(kernel: Any) -> Any:
    """An operator on one device, by what a kernel makes of its operands."""

    def run(*operands: Any, attention: Attention) -> list[Any]:
        return kernel(attention, *operands)

    return run


def lower(kind: str, run: Any, platform: str | None = None) -> None:
    """Lowers operators of a kind as a function, on all platforms or on one."""
    lowering = mlir.lower_fun(run, multiple_results=True)
    mlir.register_lowering(_PRIMITIVES[kind], lowering, platform=platform)


for _kind, _primitive in _PRIMITIVES.items():
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(
        _forward_types if _is_forward(_kind) else _backward_types
    )
    _primitive.def_impl(without_kernel(_kind))
    lower(_kind, without_kernel(_kind))
for _platform, _kernels in KERNELS.items():
    for _kind, _kernel in zip(FUSED_KINDS, _kernels, strict=True):
        lower(_kind, with_kernel(_kernel), _platform)
