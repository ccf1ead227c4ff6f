"""What a step does to its scores as sums of products, so that equals look the same.

A form is a sum of monomials, each a product of powers of atoms: the score itself, a
side, the exponential, maximum or tanh of a form, a sum over keys, or whether a form is
from 0 up. Numbers are added up and equal factors cancel, so that the maximum that a
softmax takes off is gone, and a softmax and its gradient are one form however they are
written. Dims are left out: an atom is an element, or the one of its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from itertools import product
from math import isinf, log, prod, sqrt
from typing import Any

Atom = tuple[Any, ...]
Monomial = frozenset[tuple[Atom, int]]
Form = Mapping[Monomial, float]

ONE: Monomial = frozenset()
RAW: Atom = ("score",)
COTANGENT: Atom = ("cotangent",)
# Whether a form is from 0 up; the index along a dim; a tensor and its dims.
HOLDS, AT, SIDE = "holds", "at", "side"
_INFINITE: Atom = ("infinite",)
_NONE: Atom = ("none",)
_MOST_TERMS = 64
_CANCELS = 1e-6  # of what is added up, is nothing: numbers are rounded in a step


class NotAttention(Exception):
    """Why a product is not the first of an attention that is understood."""


def number(value: float) -> Form:
    if isinf(value):
        return {frozenset({(_INFINITE, 1)}): 1.0 if value > 0 else -1.0}
    return {ONE: value} if value else {}


def of(atom: Atom) -> Form:
    return {frozenset({(atom, 1)}): 1.0}


def holds(form: Form) -> Form:
    """1 where `form` is from 0 up, else 0."""
    if set(form) <= {ONE}:
        return number(float(form.get(ONE, 0.0) >= 0))
    return of((HOLDS, key(form)))


def key(form: Form) -> frozenset[Any]:
    return frozenset((m, float(f"{c:.9g}")) for m, c in form.items())


def only(monomial: Monomial) -> Atom:
    """The one atom that a monomial is; another has none, or several."""
    ((atom, n), *more) = monomial or [(_NONE, 1)]
    return atom if n == 1 and not more else _NONE


def is_bool(atom: Atom) -> bool:
    return atom[0] == HOLDS


def add(*forms: Form) -> Form:
    made: dict[Monomial, float] = {}
    for form in forms:
        for monomial, factor in form.items():
            before = made.get(monomial, 0.0)
            after = before + factor
            if abs(after) <= _CANCELS * max(abs(before), abs(factor)):
                made.pop(monomial, None)
            else:
                made[monomial] = after
    return made


def scaled(form: Form, factor: float) -> Form:
    return {m: factor * c for m, c in form.items()} if factor else {}


def subtract(left: Form, right: Form) -> Form:
    return add(left, scaled(right, -1.0))


def opposite(form: Form) -> Form:
    """1 where a form that is 0 or 1 is 0, and 0 where it is 1."""
    return subtract(number(1.0), form)


def multiply(left: Form, right: Form) -> Form:
    if len(left) * len(right) > _MOST_TERMS:
        raise NotAttention("too much is done to its scores")
    pairs = product(left.items(), right.items())
    return add(*({_joined(m, n): c * d} for (m, c), (n, d) in pairs))


def _joined(left: Monomial, right: Monomial) -> Monomial:
    powers = dict(left)
    for atom, power in right:
        powers[atom] = 1 if is_bool(atom) else powers.get(atom, 0) + power
    return frozenset((atom, power) for atom, power in powers.items() if power)


def inverse(form: Form) -> Form:
    if len(form) != 1:
        return of(("inverse", key(form)))
    ((monomial, factor),) = form.items()
    return {frozenset((atom, -power) for atom, power in monomial): 1.0 / factor}


def power(form: Form, exponent: int) -> Form:
    base = form if exponent >= 0 else inverse(form)
    return reduce(multiply, [base] * abs(exponent), number(1.0))


def exponential(form: Form) -> Form:
    """The product of those of all terms."""
    parts: list[Form] = []
    for monomial, c in form.items():
        atom = only(monomial)
        if abs(c) == 1 and atom[0] == "log":
            parts.append(power(dict(atom[1]), int(c)))
        else:
            atom = ("exp", key({monomial: abs(c)}))
            parts.append({frozenset({(atom, 1 if c > 0 else -1)}): 1.0})
    return reduce(multiply, parts, number(1.0))


def logarithm(form: Form) -> Form:
    if len(form) != 1:
        return of(("log", key(form)))
    ((monomial, factor),) = form.items()
    if factor <= 0:
        return of(("log", key(form)))
    parts = [scaled(_logarithm_of(atom), n) for atom, n in monomial]
    return add(number(log(factor)), *parts)


def _logarithm_of(atom: Atom) -> Form:
    return dict(atom[1]) if atom[0] == "exp" else of(("log", key(of(atom))))


def summed(form: Form, size: int, is_row: Callable[[Atom], bool]) -> Form:
    """The sum over `size` keys; what `is_row` is the same for all of them."""
    parts = []
    for monomial, factor in form.items():
        outer = frozenset(each for each in monomial if is_row(each[0]))
        inner = monomial - outer
        made = of(("sum", inner)) if inner else number(size)
        parts.append(multiply({outer: factor}, made))
    return add(*parts)


def function(kind: str, settings: str, *forms: Form) -> Form:
    """A function that nothing is known of, but for numbers."""
    known = {"sqrt": sqrt, "rsqrt": lambda x: 1 / sqrt(x)}
    if kind in known and set(forms[0]) == {ONE}:
        return number(known[kind](forms[0][ONE]))
    return of((kind, settings, *map(key, forms)))


def parts_of(atom: Atom) -> Iterator[Atom]:
    """The atoms of the forms that an atom is made of."""
    for part in atom[1:]:
        if isinstance(part, frozenset):
            monomials = [part] if atom[0] == "sum" else [m for m, _ in part]
            yield from (inner for monomial in monomials for inner, _ in monomial)


def is_made_of(atom: Atom, other: Atom) -> bool:
    return atom == other or any(is_made_of(each, other) for each in parts_of(atom))


def has(form: Form, other: Atom) -> bool:
    """Whether anything in a form is made of an atom."""
    return any(is_made_of(atom, other) for monomial in form for atom, _ in monomial)


def slope(form: Form, by: Atom) -> Form:
    """What an atom is multiplied with in a form.

    Raises:
      NotAttention: a function of it is there.
    """
    parts = []
    for monomial, factor in form.items():
        for atom, n in monomial:
            if atom == by and n == 1:
                parts.append({monomial - {(by, 1)}: factor})
            elif is_made_of(atom, by):
                raise NotAttention(f"the {atom[0]} of its scores is taken")
    return add(*parts)


def with_values(form: Form, values: Mapping[Atom, float]) -> Form:
    """The form where atoms have these values."""
    parts = []
    for monomial, factor in form.items():
        rest = frozenset(each for each in monomial if each[0] not in values)
        known = prod(values[atom] ** n for atom, n in monomial - rest)
        parts.append({rest: factor * known} if known else {})
    return add(*parts)


def is_low(form: Form, below: float) -> bool:
    """Whether a form is minus infinity, or a number of at most `below` and others."""
    if form.get(frozenset({(_INFINITE, 1)}), 0.0) < 0:
        return True
    return form.get(ONE, 0.0) <= below
