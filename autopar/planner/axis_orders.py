"""Other orders of the axes of one dim than mesh order: those that a step asks for.

Every order that a pin or a border names, and what is left of it when its most minor
axes are gathered, is a choice for all tensors and operators of the step. A step that
names none has the choices of mesh order alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from ..graph.build_graph import PINS, SHARD_MAP
from ..graph.op_graph import Operator, OpGraph, TensorType
from ..rules.base import Factor
from ..rules.halos import has_traffic
from ..sharding.constraints import Constraint, border_constraints, constraint_of
from ..sharding.mesh import MeshShape
from ..sharding.pins import Pin
from ..sharding.spec import TURN, Spec, axes_of_dim, dim_of, turns_of, with_axes
from .strategies import Strategies

Orders = frozenset[tuple[int, ...]]  # of two axes or more each, not in mesh order


def orders_of_step(
    graph: OpGraph, mesh: MeshShape, pins: Iterable[Pin], demanded: Iterable[Spec]
) -> Orders:
    """The orders that pins of arguments, what rules demand and the step itself name."""
    asked = (each for op in graph.columns.distinct for each in _asked(op))
    own = [constraint.pin(kind, mesh) for constraint, kind in asked]
    named = {
        axes[:count]
        for pin in (*pins, *own)
        if pin is not None
        for axes in pin.axes_by_dim
        if axes is not None
        for count in range(2, len(axes) + 1)
    }
    named |= {axes_of_dim(s, dim_of(state)) for s in demanded for state in s}
    return frozenset(axes for axes in named if axes != tuple(sorted(axes)))


def _asked(op: Operator) -> Iterator[tuple[Constraint, TensorType]]:
    """What an operator asks for that puts several axes on one dim."""
    found: list[tuple[Constraint, TensorType]] = []
    if op.kind in PINS:
        found.append((constraint_of(op), op.operand_types[0]))
    elif op.kind == SHARD_MAP:
        operands, results = border_constraints(op)
        found += zip(operands, op.operand_types, strict=True)
        found += zip(results, op.result_types, strict=True)
    for constraint, kind in found:
        entries: Iterable[Any] = constraint.spec or ()
        if any(isinstance(entry, tuple) and len(entry) > 1 for entry in entries):
            yield constraint, kind


def in_orders(specs: Iterable[Spec], orders: Orders) -> Iterator[Spec]:
    """Specs in mesh order, each followed by itself in the other orders."""
    if not orders:
        yield from specs
        return
    for spec in specs:
        dims = sorted({state for state in spec if state >= 0})
        each = [_orders_of(axes_of_dim(spec, dim), orders) for dim in dims]
        for arranged in product(*each):
            found = spec
            for dim, axes in zip(dims, arranged, strict=True):
                found = with_axes(found, dim, axes)
            yield found


def _orders_of(axes: tuple[int, ...], orders: Orders) -> list[tuple[int, ...]]:
    """Axes in mesh order, then in the others."""
    return [axes, *sorted(order for order in orders if sorted(order) == list(axes))]


def strategies_in_orders(
    op: Operator, strategies: Strategies, orders: Orders
) -> Strategies:
    """The strategies, and those in which the axes of a factor are in another order.

    Factors whose shards send to their neighbours keep mesh order.
    """
    if has_traffic(op):
        return strategies
    rows: list[int] = []
    operands: list[np.ndarray] = []
    results: list[np.ndarray] = []
    for row, chosen in enumerate(strategies.factor_index.tolist()):
        groups = [
            tuple(axis for axis, other in enumerate(chosen) if other == index)
            for index in _movable(strategies.factors, set(chosen))
        ]
        seen: set[bytes] = set()
        for arranged in product(*(_orders_of(axes, orders) for axes in groups)):
            turns = np.zeros(len(chosen), int)
            for axes in arranged:
                turns[list(axes)] = turns_of(axes)
            reads, writes = (
                np.where(specs[row] >= 0, specs[row] + TURN * turns, specs[row])
                for specs in (strategies.operand_specs, strategies.result_specs)
            )
            key = reads.tobytes() + writes.tobytes()
            if key not in seen:  # else no dim shows the order
                seen.add(key)
                rows.append(row)
                operands.append(reads)
                results.append(writes)
    return Strategies(
        strategies.factors,
        strategies.factor_index[rows],
        np.array(operands),
        np.array(results),
        strategies.share[rows],
    )


def _movable(factors: Sequence[Factor], chosen: Collection[int]) -> list[int]:
    """Those of the chosen factors whose axes may be in any order.

    Not those that know their neighbours, nor those that share a dim with others.
    """
    owners: dict[tuple[int, int], list[int]] = {}
    for index in sorted(chosen):
        states = (*factors[index].operands, *factors[index].results)
        for place in enumerate(states):
            owners.setdefault(place, []).append(index)
    shared = {
        index
        for (_, state), those in owners.items()
        if state >= 0 and len(those) > 1
        for index in those
    }
    return [
        index
        for index in sorted(chosen)
        if index not in shared and not factors[index].halos
    ]
