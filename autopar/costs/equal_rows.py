"""Operators that make what another one makes: XLA keeps the first (`HloCSE`).

Dims of size one are moved behind elementwise operators before, so the mean of a batch
is the same with and without the dims that it was summed over.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import (
    GraphColumns,
    Operator,
    TensorType,
    constant_key,
    params_key,
)
from ..rules.elementwise import NARY, UNARY
from .plan_arrays import PlanArrays

MOST_ROUNDS = 8  # each finds what reads equal results of the round before
_ELEMENTWISE = frozenset((*UNARY, *NARY))
_RESHAPES = ("broadcast_in_dim", "expand_dims", "reshape", "squeeze")
_MIX = np.uint64(0x9E3779B97F4A7C15)  # spreads keys, which wrap around


@lru_cache(maxsize=4)
def first_equals(columns: GraphColumns) -> np.ndarray:
    """[rows] the first row that does the same to equal tensors: mostly the row itself.

    What has bodies or effects is equal to nothing else, nor is what tensors pass.
    """
    rows = len(columns.operators)
    first, named = np.arange(rows), np.arange(len(columns.type_of))
    if not rows:
        return first
    reads = np.diff(columns.operand_start) > 0
    can = np.flatnonzero(columns.where(_is_mergeable) & reads)
    if not can.size:
        return first
    place = np.arange(len(columns.operands)) - columns.operand_start[:-1].repeat(
        np.diff(columns.operand_start)
    )
    weights = _MIX * (2 * place.astype(np.uint64) + 1)
    kind = columns.block_of * len(columns.examples) + _kinds(columns)
    only_ones = np.flatnonzero(columns.where(_is_of_ones))
    renames = (
        columns.results[columns.result_start[only_ones]].tolist(),
        columns.operands[columns.operand_start[only_ones]].tolist(),
    )
    for _ in range(MOST_ROUNDS):
        for result, operand in zip(*renames, strict=True):
            named[result] = named[operand]
        read = np.where(columns.operands >= 0, named[columns.operands], -1)
        mixed = np.add.reduceat(
            np.append(read.astype(np.uint64) * weights, np.uint64(0)),
            columns.operand_start[:-1],
        )
        keys = mixed[can] ^ (kind[can].astype(np.uint64) * _MIX)
        order = np.argsort(keys)
        is_same = np.diff(keys[order]) == 0
        is_there_twice = np.zeros(len(keys), bool)
        is_there_twice[order[1:][is_same]] = is_there_twice[order[:-1][is_same]] = True
        known: dict[tuple[int, ...], int] = {}
        new: list[int] = []
        for row in can[is_there_twice].tolist():
            own = read[columns.operand_start[row] : columns.operand_start[row + 1]]
            earliest = known.setdefault((int(kind[row]), *own.tolist()), row)
            if first[row] != earliest:
                first[row] = earliest
                new.append(row)
        if not new:
            break
        for row in new:
            made = columns.operators[first[row]].results
            named[list(columns.operators[row].results)] = made
    return first


def equals_among(
    arrays: PlanArrays, rows: slice, read_start: np.ndarray, read_spec: np.ndarray
) -> dict[int, int]:
    """By row of a block, the earlier one that makes the same in the same specs.

    Row k of the block, the graph's row `rows.start + k`, reads the specs
    `read_spec[read_start[k] : read_start[k + 1]]`.
    """
    operators, first = arrays.columns.operators, first_equals(arrays.columns)[rows]
    first = first - rows.start

    def specs(row: int) -> tuple[list[int], list[int]]:
        read = read_spec[slice(*read_start[[row, row + 1]])]
        made = arrays.made[list(operators[rows.start + row].results)]
        return read.tolist(), made.tolist()

    repeats = np.flatnonzero(first != np.arange(len(first))).tolist()
    pairs = {row: int(first[row]) for row in repeats}
    return {row: other for row, other in pairs.items() if specs(row) == specs(other)}


@lru_cache(maxsize=4)
def exponentials_of_erfc(columns: GraphColumns) -> dict[int, int]:
    """By row of an erfc, the row that makes exp(-x^2) of the same x.

    XLA's erfc takes that exponential itself, and takes the one that is there, as the
    gradient of erf leaves it: then it is in memory from the erfc on.
    """
    kinds = {op.kind for op in columns.distinct}
    if not kinds.issuperset(("erfc", "exp", "neg")):
        return {}
    maker: dict[int, Operator] = {}
    erfc: dict[object, int] = {}
    found: dict[int, int] = {}
    for row, op in enumerate(columns.operators):
        if op.kind in ("square", "neg", "mul", "integer_pow"):
            maker[op.results[0]] = op
        elif op.kind == "erfc":
            erfc[op.operands[0]] = row
        elif op.kind == "exp" and (squared := _squared_in(op, maker)) in erfc:
            found[erfc[squared]] = row
    return found


def shared_exponentials(
    columns: GraphColumns, rows: slice, value_of: np.ndarray
) -> dict[int, int]:
    """By operator of a block's `rows`, the value of another that it would make inside.

    `value_of` [tensors] is -1 for those of other blocks.
    """
    return {
        int(columns.index[row]): int(value)
        for row, other in exponentials_of_erfc(columns).items()
        if rows.start <= row < rows.stop
        and (value := value_of[columns.operators[other].results[0]]) >= 0
    }


def _squared_in(op: Operator, maker: dict[int, Operator]) -> object:
    """The x of exp(-x^2), or None."""
    negated = _maker_of(op.operands[0], maker)
    if negated is None or negated.kind != "neg":
        return None
    power = _maker_of(negated.operands[0], maker)
    if power is None:
        return None
    is_square = power.kind == "square" or power.params.get("y") == 2
    is_product = power.kind == "mul" and power.operands[0] == power.operands[1]
    return power.operands[0] if is_square or is_product else None


def _maker_of(operand: object, maker: dict[int, Operator]) -> Operator | None:
    return maker.get(operand) if isinstance(operand, int) else None


def _kinds(columns: GraphColumns) -> np.ndarray:
    """[rows] equal numbers for what does the same, dims of size one apart."""
    numbers: dict[object, int] = {}
    found = [
        numbers.setdefault(_key_without_ones(op) or number, len(numbers))
        for number, op in enumerate(columns.distinct)
    ]
    return np.array(found, np.intp)[columns.alike]


def _key_without_ones(op: Operator) -> object:
    """Of an elementwise operator of one shape; None for others."""
    if op.kind not in _ELEMENTWISE:
        return None
    shape = _without_ones(op.result_types[0])
    types = [op.result_types[0]]
    for position, kind in enumerate(op.operand_types):
        if not op.is_constant(position):
            types.append(kind)
    if not shape or any(_without_ones(kind) != shape for kind in types):
        return None
    constants = tuple(map(constant_key, op.operands))
    dtypes = tuple(str(kind.dtype) for kind in types)
    return op.kind, shape, dtypes, constants, params_key(op.params)


def _is_of_ones(op: Operator) -> bool:
    """Whether it only adds or takes away dims of size one."""
    if op.kind not in _RESHAPES or op.is_constant(0):
        return False
    return _without_ones(op.operand_types[0]) == _without_ones(op.result_types[0])


def _without_ones(kind: TensorType) -> tuple[int, ...]:
    return tuple(size for size in kind.shape if size != 1)


def _is_mergeable(op: Operator) -> bool:
    return not (op.bodies or op.kind in STRUCTURED or op.eqn.effects)
