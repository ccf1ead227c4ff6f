"""The form (`score_algebra.py`) of every tensor that a step makes of its scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..graph.dependencies import tensors_of
from ..graph.op_graph import Constant, Operand, Operator
from . import score_algebra as algebra
from .score_algebra import AT, HOLDS, SIDE, Atom, Form, NotAttention
from .score_regions import BlockFlow, Dims, Region, paired_dims
from .spec import Labels

_SAME = frozenset(
    "convert_element_type copy stop_gradient reduce_precision transpose reshape squeeze"
    " expand_dims broadcast_in_dim".split()
)
_NOT_WHOLE = ("and", "or", "not", "div", "integer_pow")  # of bits, or rounded
_MOST_BEFORE = 24  # operators that make a mask of indices


class ScoreForms:
    """Forms of the tensors of a region, whose softmax is over the dim `keys`.

    `known` are forms that tensors are given. Other tensors from outside are atoms, but
    for what is made of indices and numbers alone.
    """

    def __init__(
        self,
        flow: BlockFlow,
        region: Region,
        dims: Dims,
        keys: int,
        known: Mapping[int, Form],
    ) -> None:
        self.flow, self.region, self.dims, self.keys = flow, region, dims, keys
        self._forms: dict[tuple[int, Labels], Form] = {}
        self.known = known

    def of(self, tensor: int, labels: Labels | None = None) -> Form:
        """The form of a tensor, by its dims of the scores; those of the region know."""
        labels = self.dims.labels(tensor) if labels is None else labels
        if tensor in self.known:
            return self.known[tensor]
        if (tensor, labels) not in self._forms:
            self._forms[tensor, labels] = self._made(tensor, labels)
        return self._forms[tensor, labels]

    def size_of_keys(self, tensor: int) -> int:
        """How many keys there are, from a tensor that has all dims of the scores."""
        shape = self.flow.types[tensor].shape
        return shape[self.dims.labels(tensor).index(self.keys)]

    def is_row(self, atom: Atom) -> bool:
        """Whether an atom is the same for all keys."""
        if atom in (algebra.RAW, algebra.COTANGENT):
            return False
        if atom[0] == AT:
            return atom[1] != self.keys
        if SIDE in atom[:2]:
            return self.keys not in atom[-1]
        is_reduced = atom[0] in ("sum", "max over keys")
        return is_reduced or all(map(self.is_row, algebra.parts_of(atom)))

    def _made(self, tensor: int, labels: Labels) -> Form:
        origins, origin = self.flow.origins, self.flow.origins.of(tensor)
        op, constant = origins.maker.get(origin), origins.constants.get(origin)
        if constant is not None:
            made = _indices(constant, labels)
            return self._side(tensor, labels) if made is None else made
        is_inside = tensor in self.region.inside
        if op is None or not (is_inside or self._is_of_indices(origin)):
            return self._side(tensor, labels)
        if op.kind == "iota":
            label = labels[op.params["dimension"]]
            return algebra.of((AT, label)) if label is not None else {}
        if op.kind.startswith("reduce_"):
            return self._reduced(op)
        operands = [self._operand(o, op, i, labels) for i, o in enumerate(op.operands)]
        return _applied(op, operands)

    def _side(self, tensor: int, labels: Labels) -> Form:
        named = (SIDE, tensor, labels)
        is_bool = self.flow.types[tensor].dtype == np.bool_
        return algebra.of((HOLDS, *named) if is_bool else named)

    def _operand(
        self, operand: Operand, op: Operator, position: int, labels: Labels
    ) -> Form:
        if isinstance(operand, Constant):
            return algebra.number(float(np.asarray(operand.value)))
        if operand in self.region.inside:
            return self.of(operand)
        return self.of(operand, _labels_before(op, position, labels))

    def _reduced(self, op: Operator) -> Form:
        (operand,) = tensors_of(op.operands)
        labels = self.dims.labels(operand)
        over = {labels[dim] for dim in op.params["axes"]} - {None}
        form = self.of(operand)
        if not over:
            return form
        if over != {self.keys}:
            raise NotAttention("its scores are reduced over another dim than keys")
        if op.kind == "reduce_max":
            return algebra.function("max over keys", "", form)
        return algebra.summed(form, self.size_of_keys(operand), self.is_row)

    def _is_of_indices(self, tensor: int, left: int = _MOST_BEFORE) -> bool:
        """Whether a tensor is made of indices and numbers alone."""
        origins, tensor = self.flow.origins, self.flow.origins.of(tensor)
        op = origins.maker.get(tensor)
        if tensor in origins.constants:
            return True
        if op is None or not left or len(op.results) > 1:
            return False
        is_known = op.kind in _SAME or op.kind in _FUNCTIONS or op.kind == "iota"
        return is_known and all(
            self._is_of_indices(each, left - 1) for each in tensors_of(op.operands)
        )


def _labels_before(op: Operator, position: int, labels: Labels) -> Labels:
    """Labels of an operand of an operator whose result has `labels`."""
    shape = op.operand_types[position].shape
    found: list[int | None] = [None] * len(shape)
    for old, new in paired_dims(op, position):
        found[old] = labels[new] if shape[old] > 1 else None
    return tuple(found)


def _indices(constant: np.ndarray, labels: Labels) -> Form | None:
    """The form of an array of numbers that is an index, or a triangle; else None."""
    named = [each for each in labels if each is not None]
    flat = constant.reshape([size for size in constant.shape if size > 1])
    if constant.size == 1:
        return algebra.number(float(constant.reshape(())))
    if len(named) == 1 and np.array_equal(flat, np.arange(flat.size)):
        return algebra.of((AT, named[0]))
    if (
        len(named) == 2
        and flat.dtype == np.bool_
        and np.array_equal(flat, np.tril(np.ones_like(flat)))
    ):
        first, second = (algebra.of((AT, each)) for each in named)
        return algebra.holds(algebra.subtract(first, second))
    return None


def _applied(op: Operator, x: Sequence[Form]) -> Form:
    """An elementwise operator."""
    if op.kind in _SAME:
        return _converted(op, x[0])
    is_whole = np.issubdtype(op.result_types[0].dtype, np.integer)
    if op.kind in _FUNCTIONS and not (is_whole and op.kind in _NOT_WHOLE):
        return _FUNCTIONS[op.kind](op, *x)
    settings = str(sorted((k, str(v)) for k, v in op.params.items()))
    return algebra.function(op.kind, settings, *x)


def _converted(op: Operator, x: Form) -> Form:
    is_bool = op.result_types[0].dtype == np.bool_
    if is_bool and op.operand_types[0].dtype != np.bool_:
        return algebra.opposite(_equal_to_zero(x))
    was_whole = not jnp.issubdtype(op.operand_types[0].dtype, jnp.inexact)
    if np.issubdtype(op.result_types[0].dtype, np.integer) and not was_whole:
        return algebra.function(op.kind, "", x)
    return x


def _equal_to_zero(x: Form) -> Form:
    """Of a form that is 0 or 1, what is left of 1."""
    if all(algebra.is_bool(atom) for monomial in x for atom, _ in monomial):
        return algebra.opposite(x)
    return algebra.of((HOLDS, "zero", algebra.key(x)))


def _at_least(op: Operator, left: Form, right: Form, gap: int) -> Form:
    """Whether `left >= right`; with a `gap` of 1, `left > right`."""
    difference = algebra.subtract(left, right)
    if np.issubdtype(op.operand_types[0].dtype, np.integer):
        return algebra.holds(algebra.subtract(difference, algebra.number(gap)))
    if not gap:
        return algebra.holds(difference)
    return algebra.opposite(algebra.holds(algebra.scaled(difference, -1.0)))


def _chosen(op: Operator, which: Form, *cases: Form) -> Form:
    if len(cases) != 2 or op.operand_types[0].dtype != np.bool_:
        raise NotAttention("its scores are chosen among more than two")
    other = algebra.multiply(algebra.opposite(which), cases[0])
    return algebra.add(other, algebra.multiply(which, cases[1]))


def _maximum(op: Operator, left: Form, right: Form) -> Form:
    """Beside minus infinity it is the other."""
    for form, other in ((left, right), (right, left)):
        if form == algebra.number(-np.inf):
            return other
    return algebra.function(op.kind, "", left, right)


_FUNCTIONS: Mapping[str, Any] = {
    "add": lambda op, x, y: algebra.add(x, y),
    "add_any": lambda op, x, y: algebra.add(x, y),
    "sub": lambda op, x, y: algebra.subtract(x, y),
    "neg": lambda op, x: algebra.scaled(x, -1.0),
    "mul": lambda op, x, y: algebra.multiply(x, y),
    "and": lambda op, x, y: algebra.multiply(x, y),
    "or": lambda op, x, y: algebra.opposite(
        algebra.multiply(algebra.opposite(x), algebra.opposite(y))
    ),
    "not": lambda op, x: algebra.opposite(x),
    "div": lambda op, x, y: algebra.multiply(x, algebra.inverse(y)),
    "integer_pow": lambda op, x: algebra.power(x, op.params["y"]),
    "square": lambda op, x: algebra.power(x, 2),
    "exp": lambda op, x: algebra.exponential(x),
    "log": lambda op, x: algebra.logarithm(x),
    "max": _maximum,
    "ge": lambda op, x, y: _at_least(op, x, y, 0),
    "gt": lambda op, x, y: _at_least(op, x, y, 1),
    "le": lambda op, x, y: _at_least(op, y, x, 0),
    "lt": lambda op, x, y: _at_least(op, y, x, 1),
    "eq": lambda op, x, y: _equal_to_zero(algebra.subtract(x, y)),
    "ne": lambda op, x, y: algebra.opposite(_equal_to_zero(algebra.subtract(x, y))),
    "select_n": _chosen,
}
