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

_ELEMENTWISE = frozenset((*UNARY, *NARY))
_RESHAPES = ("reshape", "squeeze", "expand_dims")
_Shape = tuple[int, ...]


def rows_before_reshapes(columns: GraphColumns) -> np.ndarray:
    """bool [rows], those only a reshape reads, be it their own or one moved there."""
    return _Reshapes(columns).before()


class _Reshapes:
    def __init__(self, columns: GraphColumns) -> None:
        self.columns, self.operators = columns, columns.operators
        count = max(len(self.operators), 1)
        pairs = np.sort(columns.operands * count + columns.rows_of_operands)
        self._rows = (pairs % count).tolist()
        tensors = np.arange(len(columns.type_of) + 1)
        self._starts = np.searchsorted(pairs, count * tensors).tolist()
        fills = np.flatnonzero(columns.where(_fills)).tolist()
        self.filled = {self.operators[row].results[0] for row in fills}
        self.source: dict[int, _Shape] = {}  # by tensor, what it is reshaped from
        self.moved: set[int] = set()
        is_elementwise = columns.where(lambda op: op.kind in _ELEMENTWISE)
        self._elementwise = is_elementwise.tolist()
        self._add_reshapes()
        self._move()

    def readers(self, tensor: int) -> list[int]:
        """The rows that read a tensor."""
        return self._rows[self._starts[tensor] : self._starts[tensor + 1]]

    def _add_reshapes(self) -> None:
        """Reshapes and products; a reshape of what is reshaped comes from its source.

        That of a product starts anew.
        """
        columns, source = self.columns, self.source
        shapes = [_reshaped_from(op) for op in columns.distinct]
        made = [
            op.result_types[0].shape if op.result_types else ()
            for op in columns.distinct
        ]
        is_product = columns.where(lambda op: op.kind == "dot_general")
        is_reshape = np.array([shape is not None for shape in shapes], bool)
        rows = np.flatnonzero(is_reshape[columns.alike])
        operand = columns.operands[columns.operand_start[rows]]
        result = columns.results[columns.result_start[rows]]
        is_read = is_product[rows] | (operand >= 0)
        operand[is_product[rows]] = -1
        ends = (columns.alike[rows], operand, result)
        ends = (each[is_read].tolist() for each in ends)
        for kind, read, new in zip(*ends, strict=True):
            shape = source.get(read, shapes[kind] or ())
            if shape != made[kind]:
                source[new] = shape

    def _move(self) -> None:
        """Moves reshapes behind their readers until none can be."""
        new = list(self.source)
        while new:
            rows = {row for tensor in new for row in self.readers(tensor)}
            rows = {row for row in rows - self.moved if self._elementwise[row]}
            rows = set(filter(self._is_candidate, rows))
            while True:
                read = {each for row in rows for each in self._reshaped(row)}
                torn = [t for t in read if not rows.issuperset(self.readers(t))]
                gone = rows.intersection(r for t in torn for r in self.readers(t))
                if not gone:
                    break
                rows -= gone
            self.moved |= rows
            new = list[int]()
            for row in sorted(rows):
                op = self.operators[row]
                self.source[op.results[0]] = self.source[self._reshaped(row)[0]]
                new.append(op.results[0])

    def _reshaped(self, row: int) -> list[int]:
        found = self.operators[row].operands
        return [each for each in found if isinstance(each, int) and each in self.source]

    def _is_candidate(self, row: int) -> bool:
        """Whether all that a row reads is reshaped alike, or the same in all places."""
        shapes = set[_Shape]()
        for each in self.operators[row].operands:
            if isinstance(each, int) and each in self.source:
                shapes.add(self.source[each])
            elif isinstance(each, int) and each not in self.filled:
                return False
        return len(shapes) == 1

    def before(self) -> np.ndarray:
        """bool [rows]; see `rows_before_reshapes`."""
        columns = self.columns
        is_read = columns.operands >= 0
        tensor, row = columns.operands[is_read], columns.rows_of_operands[is_read]
        reshapes = columns.where(lambda op: op.kind in _RESHAPES)
        count = np.bincount(tensor, minlength=len(columns.type_of))
        reshaped = np.bincount(tensor[reshapes[row]], minlength=len(count))
        is_one = (count == 1) & (reshaped == 1)
        found = np.zeros(len(self.operators), bool)
        found[columns.rows_of_results[is_one[columns.results]]] = True
        found &= np.diff(columns.result_start) == 1
        for moved in self.moved:
            made = self.operators[moved].results[0]
            readers = self.readers(made)
            is_last = not self.moved.issuperset(readers)
            found[moved] = is_last and not any(
                _reads_before(self.operators[reader], self.source[made])
                for reader in readers
            )
        return found


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
