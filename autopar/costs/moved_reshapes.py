"""Which elementwise operators XLA runs before a reshape of what they read.

`ReshapeMover`: where all that an elementwise operator reads is reshaped alike, and all
who read that do so too, it runs first and what it makes is reshaped. Products of joined
dims are such reshapes (of matrices). A reshape is another name for what it reads, and
is made by everyone who reads it, together with what only it reads. A product reads
what is before it, and so does a reduction of all dims that the reshape changes.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ..graph.op_graph import GraphColumns, Operator
from ..rules.elementwise import NARY, UNARY
from .segments import entries_of

_ELEMENTWISE = frozenset((*UNARY, *NARY))
_RESHAPES = ("reshape", "squeeze", "expand_dims")
_Shape = tuple[int, ...]


def rows_before_reshapes(columns: GraphColumns) -> np.ndarray:
    """bool [rows], those only a reshape reads, be it their own or one moved there."""
    return _Reshapes(columns).before()


class _Reshapes:
    """`source` [tensors + 1] numbers the shape that each is reshaped from, -1 if it is
    not; `moved` bool [rows] run before a reshape. The last tensor is what is none."""

    def __init__(self, columns: GraphColumns) -> None:
        self.columns = columns
        count, num_tensors = len(columns.operators), len(columns.type_of)
        pairs = np.sort(columns.operands * max(count, 1) + columns.rows_of_operands)
        pairs = pairs[np.searchsorted(pairs, 0) :]
        tensor, self._readers = np.divmod(pairs, max(count, 1))
        counts = np.bincount(tensor, minlength=num_tensors + 1)
        self._reader_start = np.concatenate([[0], np.cumsum(counts)])
        fills = columns.where(_fills)[columns.rows_of_results]
        self._filled = np.zeros(num_tensors + 1, bool)
        self._filled[columns.results[fills]] = True
        self._filled[-1] = True  # a literal is the same in all places
        self._elementwise = columns.where(lambda op: op.kind in _ELEMENTWISE)
        self.source = np.full(num_tensors + 1, -1)
        self.moved = np.zeros(count, bool)
        self._add_reshapes()
        self._move()

    def _add_reshapes(self) -> None:
        """Reshapes and products; a reshape of what is reshaped comes from its source.

        That of a product starts anew.
        """
        columns, numbers = self.columns, dict[_Shape, int]()
        shapes = [_reshaped_from(op) for op in columns.distinct]
        own = [-1 if s is None else numbers.setdefault(s, len(numbers)) for s in shapes]
        made = [
            numbers.get(op.result_types[0].shape, -1) if op.result_types else -1
            for op in columns.distinct
        ]
        is_product = columns.where(lambda op: op.kind == "dot_general")
        rows = np.flatnonzero((np.array(own, np.intp) >= 0)[columns.alike])
        operand = columns.operands[columns.operand_start[rows]]
        result = columns.results[columns.result_start[rows]]
        is_read = is_product[rows] | (operand >= 0)
        operand[is_product[rows]] = -1
        ends = (columns.alike[rows], operand, result)
        ends = (each[is_read].tolist() for each in ends)
        self._shapes = list(numbers)
        source = dict[int, int]()
        for kind, read, new in zip(*ends, strict=True):
            shape = source[read] if read in source else own[kind]
            if shape != made[kind]:
                source[new] = shape
        self.source[list(source)] = list(source.values())

    def _move(self) -> None:
        """Moves reshapes behind their readers until none can be."""
        new = np.flatnonzero(self.source >= 0)
        while new.size:
            rows = np.unique(self._readers[entries_of(self._reader_start, new)[1]])
            rows = rows[self._elementwise[rows] & ~self.moved[rows]]
            rows, shapes = self._candidates(rows)
            rows, shapes = self._without_torn(rows, shapes)
            self.moved[rows] = True
            new = self.columns.results[self.columns.result_start[rows]]
            self.source[new] = shapes

    def _candidates(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of which all that they read is reshaped alike, or the same in all
        places, and what it is reshaped from."""
        place, at = entries_of(self.columns.operand_start, rows)
        shape = self.source[self.columns.operands[at]]
        is_there = np.ones(len(rows), bool)
        is_there[place[(shape < 0) & ~self._filled[self.columns.operands[at]]]] = False
        found = np.full(len(rows), -1)
        place, shape = place[shape >= 0], shape[shape >= 0]
        found[place] = shape
        is_there[place[found[place] != shape]] = False
        is_there &= found >= 0
        return rows[is_there], found[is_there]

    def _without_torn(
        self, rows: np.ndarray, shapes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Those that read nothing reshaped which others read as well."""
        is_left = np.zeros(len(self.moved), bool)
        while rows.size:
            is_left[:] = False
            is_left[rows] = True
            read = self.columns.operands[
                entries_of(self.columns.operand_start, rows)[1]
            ]
            read = np.unique(read[self.source[read] >= 0])
            place, at = entries_of(self._reader_start, read)
            readers = self._readers[at]
            is_torn = np.zeros(len(read), bool)
            is_torn[place[~is_left[readers]]] = True
            gone = readers[is_torn[place]]
            if not is_left[gone].any():
                break
            is_left[gone] = False
            rows, shapes = rows[is_left[rows]], shapes[is_left[rows]]
        return rows, shapes

    def before(self) -> np.ndarray:
        """bool [rows]; see `rows_before_reshapes`."""
        columns, start = self.columns, self._reader_start
        reshapes = columns.where(lambda op: op.kind in _RESHAPES)[self._readers]
        reads = np.concatenate([[0], np.cumsum(reshapes)])
        is_one = (np.diff(start) == 1) & (np.diff(reads[start]) == 1)
        found = np.zeros(len(self.moved), bool)
        found[columns.rows_of_results[is_one[columns.results]]] = True
        found &= np.diff(columns.result_start) == 1
        moved = np.flatnonzero(self.moved)
        made = columns.results[columns.result_start[moved]]
        place, at = entries_of(start, made)
        readers, is_last = self._readers[at], np.zeros(len(moved), bool)
        is_last[place[~self.moved[readers]]] = True
        is_last[place[self._read_before(readers, self.source[made][place])]] = False
        found[moved] = is_last
        return found

    def _read_before(self, readers: np.ndarray, source: np.ndarray) -> np.ndarray:
        """Which rows read what is reshaped from shape `source` [n] as it is before."""
        kinds = self.columns.alike[readers] * len(self._shapes) + source
        kinds, kind_of = np.unique(kinds, return_inverse=True)
        found = [
            _reads_before(self.columns.distinct[number], self._shapes[shape])
            for number, shape in zip(
                *(each.tolist() for each in np.divmod(kinds, len(self._shapes) or 1)),
                strict=True,
            )
        ]
        return np.array(found, bool)[kind_of.reshape(-1)]


def matrix_shape(op: Operator) -> _Shape:
    """The shape of a product as XLA's `DotDecomposer` makes it."""
    summed, batch = op.params["dimension_numbers"]
    sides = zip(op.operand_types[:2], batch, summed, strict=True)
    own = [
        prod(size for dim, size in enumerate(kind.shape) if dim not in (*b, *c))
        for kind, b, c in sides
    ]
    return (*(op.operand_types[0].shape[dim] for dim in batch[0]), *own)


def _reads_before(op: Operator, source: _Shape) -> bool:
    """Whether an operator reads what is reshaped from `source` as it is before that."""
    if op.kind == "dot_general":
        return True
    if not op.kind.startswith("reduce_") or "axes" not in op.params:
        return False
    shape, axes = op.operand_types[0].shape, op.params["axes"]
    unchanged = _unchanged_dims(source, shape)
    return all(dim in axes or dim in unchanged for dim in range(len(shape)))


def _unchanged_dims(source: _Shape, target: _Shape) -> set[int]:
    """The dims of the target that are dims of the source, with as much before them."""
    before = {(prod(source[:dim]), size) for dim, size in enumerate(source)}
    return {d for d, size in enumerate(target) if (prod(target[:d]), size) in before}


def _fills(op: Operator) -> bool:
    """Whether the result is one number in all places."""
    return op.kind == "broadcast_in_dim" and op.operand_types[0].rank == 0


def _reshaped_from(op: Operator) -> _Shape | None:
    """The shape that a reshape or product is made in; None for all others."""
    if op.kind in _RESHAPES:
        return op.operand_types[0].shape
    if op.kind != "dot_general":
        return None
    shape = matrix_shape(op)
    return None if shape == op.result_types[0].shape else shape
