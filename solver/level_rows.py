"""Rows of memory that say the same of equal layers.

The row of a plan in which layers differ says of each what its own choices hold there,
and of other choices what they would hold beside its own. Of a layer that makes the
choices of another one, that one knows better. So the equal layers before a program
point weigh alike, and those behind it:

    choices that some of them make    what these say
    other choices                     the least that one says

Of the plan itself the row says what it said, and of plans that have its layers in
another order, too. Prices on it leave the layers equal (`folded.py`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np


class Weighed:
    """By node: the bytes [k] of its choices, and how much less all of them hold."""

    def __init__(
        self, weights: Mapping[int, np.ndarray], less: Mapping[int, float], count: int
    ) -> None:
        self.weights, self.less = weights, less
        number: dict[int, int] = {}
        kinds = [number.setdefault(id(w), len(number)) for w in weights.values()]
        by_id = {id(w): w for w in weights.values()}
        self.distinct = [*(by_id[key] for key in number), np.zeros(1)]
        self.nothing = len(number)
        self.kind = np.full(count, self.nothing)
        self.kind[list(weights)] = kinds
        self.less_of = np.zeros(count)
        self.less_of[list(less)] = list(less.values())

    @cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray]:
        sizes = [each.size for each in self.distinct[:-1]]
        return np.concatenate(self.distinct), np.cumsum([0, *sizes])

    def held(self, nodes: np.ndarray, choices: np.ndarray) -> np.ndarray:
        """The bytes that nodes hold under their choices."""
        flat, starts = self._flat
        kind = self.kind[nodes]
        is_told = kind < self.nothing
        return flat[starts[kind] + choices * is_told] - self.less_of[nodes]


def levelled(
    weighed: Weighed, own: Sequence[int], layers: np.ndarray
) -> tuple[dict[int, np.ndarray], float]:
    """Weights by node, and a constant, that say the same of equal layers.

    Args:
      weighed: what a row says.
      own: the choices of the plan that brought it.
      layers: [n, p] the nodes of n equal layers.
    """
    weights, constant = dict(weighed.weights), -float(weighed.less_of.sum())
    kind, less = weighed.kind[layers], weighed.less_of[layers]
    differs = (kind != kind[0]).any(axis=0) | (less != less[0]).any(axis=0)
    if not differs.any():
        return weights, constant
    nodes, kind, less = layers[:, differs], kind[:, differs], less[:, differs]
    choices = np.asarray(own, np.intp)[nodes]
    number = _numbered(kind, less, choices)
    known: dict[bytes, tuple[np.ndarray, float]] = {}
    for first, last in _stretches(weighed.held(nodes, choices), choices):
        constant += float(less[first:last].sum())
        for role in np.flatnonzero((kind[first:last] < weighed.nothing).any(axis=0)):
            part = slice(first, last), role
            key = number[part].tobytes()
            if key not in known:
                kinds = [weighed.distinct[each] for each in kind[part].tolist()]
                known[key] = _said_by_all(kinds, less[part], choices[part])
            together, least = known[key]
            constant += least * (last - first)
            weights.update(dict.fromkeys(nodes[part].tolist(), together))
    return weights, constant


def _numbered(*tables: np.ndarray) -> np.ndarray:
    """Tables of one shape as one, equal where all are."""
    number = np.zeros(tables[0].shape, np.intp)
    for table in tables:
        found = np.unique(table, return_inverse=True)[1].reshape(table.shape)
        number = number * (found.max() + 1) + found
        number = np.unique(number, return_inverse=True)[1].reshape(table.shape)
    return number


def _stretches(held: np.ndarray, choices: np.ndarray) -> list[tuple[int, int]]:
    """Layers before a point, the one of the point, and those behind: [first, last).

    `held` and `choices` are [layers, roles]. The point is where equal choices of each
    of the stretches hold the most alike.
    """
    count = len(held)
    order = np.argsort(choices, axis=0, kind="stable")
    in_order = np.take_along_axis(choices, order, axis=0)
    rank = np.cumsum(np.diff(in_order, axis=0, prepend=in_order[:1]) > 0, axis=0)
    group = np.empty_like(choices)
    np.put_along_axis(group, order, rank, axis=0)
    is_in = group[:, :, None] == np.arange(group.max() + 1)
    scaled = (held / max(float(np.abs(held).max()), 1e-250))[:, :, None]
    sums = [
        np.concatenate([np.zeros((1, *is_in.shape[1:])), np.cumsum(each, axis=0)])
        for each in (is_in, is_in * scaled, is_in * scaled**2)
    ]

    def unlike(first: np.ndarray, last: np.ndarray) -> np.ndarray:
        number, total, squares = (each[last] - each[first] for each in sums)
        return (squares - total**2 / np.maximum(number, 1)).sum(axis=(1, 2))

    at = np.arange(count)
    before, behind = unlike(0 * at, at), unlike(at + 1, 0 * at + count)
    point = int((before + behind).argmin())
    borders = (0, point, point + 1, count)
    pairs = zip(borders[:-1], borders[1:], strict=True)
    return [(first, last) for first, last in pairs if last > first]


def _said_by_all(
    weights: Sequence[np.ndarray], less: np.ndarray, own: np.ndarray
) -> tuple[np.ndarray, float]:
    """What equal nodes say together, at least 0, and what each of them says besides.

    Each says `weights` [k], `less` and that its own choice is `own`; [1] says nothing.
    """
    size = max(each.size for each in weights)
    table = np.array([np.broadcast_to(each, size) for each in weights]) - less[:, None]
    together = table.min(axis=0)
    for choice in np.unique(own).tolist():
        together[choice] = table[own == choice, choice].mean()
    least = float(together.min())
    return together - least, least
