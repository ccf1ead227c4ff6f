"""What a loop reads: the same in each iteration, or what it returns in its place.

A scatter, too, returns its first operand in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ..graph.build_graph import SCAN, WHILE
from ..graph.op_graph import Operator

_Found = TypeVar("_Found")


def num_constants(op: Operator) -> int:
    """How many operands of an operator with bodies are the same in each iteration."""
    if op.kind == SCAN:
        return op.params["num_consts"]
    if op.kind == WHILE:
        return op.params["cond_nconsts"] + op.params["body_nconsts"]
    return 0


def is_scatter(op: Operator) -> bool:
    """Whether an operator writes over its first operand."""
    return op.kind.startswith("scatter")


def made_inside(
    operators: Sequence[Operator], rows: Sequence[int], read_start: np.ndarray
) -> list[int]:
    """The reads of loops that are one number in all places: each iteration makes them.

    `rows` are those of `operators`, all of one block, that may be loops. Row k reads at
    `read_start[k]` and after what of its operands is no literal.
    """
    loops = [row for row in rows if operators[row].bodies]
    if not loops:
        return []
    filled = {
        op.results[0]
        for op in operators
        if op.kind == "broadcast_in_dim" and op.is_constant(0)
    }
    found: list[int] = []
    for row in loops:
        op = operators[row]
        consts = op.operands[: num_constants(op)]
        read = [operand for operand in consts if isinstance(operand, int)]
        places = enumerate(read, int(read_start[row]))
        found += [at for at, tensor in places if tensor in filled]
    return found


def carries(
    op: Operator, reads: Sequence[int], writes: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Pairs of what a loop or scatter reads and what it returns in the same place.

    `reads` are values of its operands that are no literals, `writes` of its results.
    """
    first = num_constants(op)
    if op.kind == SCAN:
        count = op.params["num_carry"]
    elif op.kind == WHILE:
        count = len(op.operands) - first
    elif is_scatter(op):
        count = 1
    else:
        return ()
    read = iter(reads)
    by_operand = [
        None if op.is_constant(i) else next(read) for i in range(first + count)
    ]
    pairs = zip(by_operand[first:], writes, strict=False)
    return tuple((old, new) for old, new in pairs if old is not None)


def read_again(op: Operator, reads: Sequence[int]) -> set[int]:
    """What a loop reads in every iteration: constants, and what it goes along.

    `reads` are values of its operands that are no literals.
    """
    if op.kind not in (SCAN, WHILE):
        return set()
    first, last = num_constants(op), len(op.operands)
    if op.kind == SCAN:
        last = first + op.params["num_carry"]
    read, places = iter(reads), range(len(op.operands))
    by_operand = [-1 if op.is_constant(place) else next(read) for place in places]
    return {each for each in (*by_operand[:first], *by_operand[last:]) if each >= 0}


def written_apart(
    again: Mapping[int, Collection[int]],
    maker: Mapping[int, int],
    replaced: Iterable[tuple[int, int | None]],
) -> list[int]:
    """Results of loops that read in every iteration what these replace.

    A loop gathers them in other memory, and they are copied at its end.

    Args:
      again: by loop, what it reads in every iteration.
      maker: by result of a loop, that loop.
      replaced: pairs of an input and the result that is returned in its memory.
    """
    pairs = [(old, new) for old, new in replaced if new is not None and new in maker]
    return list(dict.fromkeys(new for old, new in pairs if old in again[maker[new]]))


def by_loop(
    found: Callable[[Operator, list[int]], _Found],
    operators: Sequence[Operator],
    rows: Sequence[int],
    read_start: np.ndarray,
    read: np.ndarray,
) -> dict[int, _Found]:
    """What is found of loops, by operator; see `made_inside` for the arguments."""
    reads = [read[slice(*read_start[[row, row + 1]])].tolist() for row in rows]
    return {
        operators[row].index: found(operators[row], each)
        for row, each in zip(rows, reads, strict=True)
    }
