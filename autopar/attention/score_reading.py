"""What a softmax is taken of, read from forms; and whether a gradient is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf

from . import score_algebra as algebra
from .score_algebra import AT, COTANGENT, ONE, RAW, SIDE, Atom, Form, NotAttention
from .score_forms import ScoreForms
from .spec import Labels, Scores

_LOW = -65504.0  # the least of float16: no score is below
_MOST_MASKS = 6
Side = tuple[int, Labels]  # a tensor, and its dims of the scores


def read_scores(
    forms: ScoreForms, softmax_input: int, weights: int, gradient: int | None
) -> tuple[Scores, int | None, list[Side]]:
    """What happens to scores, the dim that positions count along, and the sides.

    Args:
      forms: of the region.
      softmax_input: the tensor whose rows have a maximum.
      weights: what is multiplied with values.
      gradient: that of the scores, if the region has one.

    Raises:
      NotAttention: weights are no softmax, or `gradient` is another gradient.
    """
    x = forms.of(softmax_input)
    p = algebra.exponential(x)
    size = forms.size_of_keys(softmax_input)
    softmax = algebra.multiply(
        p, algebra.inverse(algebra.summed(p, size, forms.is_row))
    )
    factor = algebra.multiply(forms.of(weights), algebra.inverse(softmax))
    if algebra.has(factor, RAW) or not algebra.has(x, RAW):
        raise NotAttention("its weights are no softmax")
    if gradient is not None:
        d_p = algebra.multiply(factor, algebra.of(COTANGENT))
        weighted = algebra.multiply(softmax, d_p)
        mean = algebra.summed(weighted, size, forms.is_row)
        d_x = algebra.subtract(weighted, algebra.multiply(softmax, mean))
        expected = algebra.multiply(algebra.slope(x, RAW), d_x)
        if algebra.subtract(forms.of(gradient), expected):
            raise NotAttention("what comes back is not the gradient of its scores")
    kept, low, masks = _kept(x)
    scores, row, sides = _scores(forms, kept, low, masks)
    if algebra.with_values(factor, masks) != algebra.number(1.0):
        raise NotAttention("its weights are changed after the softmax, as by dropout")
    return scores, row, sides


def _kept(x: Form) -> tuple[Form, float | None, Mapping[Atom, float]]:
    """Scores where no mask is, what is in their place elsewhere, and values of masks.

    Raises:
      NotAttention: no or several values of the masks keep scores.
    """
    masks = {atom for monomial in x for atom, _ in monomial if algebra.is_bool(atom)}
    if len(masks) > _MOST_MASKS:
        raise NotAttention("too many masks")
    kept, lows = [], []
    for values in product((1.0, 0.0), repeat=len(masks)):
        chosen = dict(zip(sorted(masks, key=repr), values, strict=True))
        form = algebra.with_values(x, chosen)
        if algebra.is_low(form, _LOW):
            lows.append(form)
        else:
            kept.append((form, chosen))
    if len(kept) != 1 or algebra.is_low(kept[0][0], _LOW):
        raise NotAttention("its mask is not understood")
    form, chosen = kept[0]
    return form, _low(lows, form), chosen


def _low(lows: Sequence[Form], kept: Form) -> float | None:
    """What scores are replaced by; None if a number is added to them instead."""
    if lows and all(algebra.subtract(form, kept).keys() <= {ONE} for form in lows):
        return None
    if any(form != lows[0] for form in lows):
        raise NotAttention("its mask is not understood")
    if not lows or lows[0] == algebra.number(-inf):
        return -inf
    if set(lows[0]) != {ONE}:
        raise NotAttention("its mask is not understood")
    return lows[0][ONE]


def _scores(
    forms: ScoreForms, kept: Form, low: float | None, masks: Mapping[Atom, float]
) -> tuple[Scores, int | None, list[Side]]:
    scale, biases = 0.0, list[tuple[float, Side]]()
    for monomial, factor in kept.items():
        atom = algebra.only(monomial)
        if atom == RAW and not scale:
            scale = factor
        elif atom[0] == SIDE and algebra.RAW not in atom:
            biases.append((factor, (atom[1], atom[2])))
        else:
            raise NotAttention("its scores are no multiple of a product")
    if not scale:
        raise NotAttention("its scores are no multiple of a product")
    sides, wanted, ends = [side for _, side in biases], [], dict[str, int]()
    row = None
    for atom, value in masks.items():
        if SIDE in atom:
            sides.append((atom[-2], atom[-1]))
            wanted.append(bool(value))
            continue
        row, name, end = _end(dict(atom[-1]), bool(value), forms.keys)
        ends[name] = min(end, ends.get(name, end))
    found = Scores(
        *(scale, tuple(factor for factor, _ in biases), tuple(wanted)),
        low=-inf if low is None else low,
        **ends,
    )
    if low is None and (wanted or "before" in ends or ends.get("after", 0) < 0):
        raise NotAttention("a mask by which a query may read nothing is added")
    return found, row, sides


def _end(form: Form, is_so: bool, keys: int) -> tuple[int, str, int]:
    """The dim of queries, and which end of the keys that a query reads is how far.

    Raises:
      NotAttention: `form >= 0` being so or not is no end of such a band.
    """
    if not is_so:  # of whole numbers
        form = algebra.subtract(algebra.number(-1.0), form)
    distance = int(form.get(ONE, 0.0))
    rest = {monomial: c for monomial, c in form.items() if monomial != ONE}
    at_keys = rest.pop(frozenset({((AT, keys), 1)}), None)
    ((monomial, at_row), *more) = rest.items() or [(ONE, 0.0)]
    atom = algebra.only(monomial)
    if more or atom[0] != AT or (at_keys, at_row) not in ((-1.0, 1.0), (1.0, -1.0)):
        raise NotAttention("its mask is not understood")
    return atom[1], "after" if at_keys == -1.0 else "before", distance
