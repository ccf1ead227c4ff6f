"""What kernels read from memory, through all that they do themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from .fusion import InMemory, Nodes
from .names import roots
from .segments import entries, entries_of

_FEW = 16  # longer lists are kept as what they add to another
_MANY = 32  # fewer nodes are looked at one by one


def sources(
    nodes: Nodes, written: InMemory, chosen: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What nodes read from memory, through all that they do themselves.

    Args:
      nodes: all of them.
      written: which values are in memory.
      chosen: the nodes that are asked for.

    Returns:
      starts, reads: chosen node k reads `reads[starts[k] : starts[k + 1]]`.
    """
    if not len(nodes):
        return np.zeros(1, np.intp), np.zeros(0, np.intp)
    nodes, maker, in_memory = _with_repeated(nodes, written)
    read = _through_single_reads(nodes, maker, in_memory)[nodes.reads]
    counts = np.diff(nodes.read_start)
    reader = np.repeat(np.arange(len(nodes)), counts)
    pairs = np.sort(reader * len(in_memory) + read)
    reads_twice = pairs[1:][np.diff(pairs) == 0] // len(in_memory)
    is_mixed = np.bincount(reader[~in_memory[read]], minlength=len(nodes)) > 0
    is_mixed[reads_twice] = True
    is_asked = np.zeros(len(nodes), bool)
    is_asked[chosen] = True
    is_mixed &= is_asked | (counts > 1)  # the others are read through
    made = np.where(in_memory[read], -1, maker[read])
    short = _short_sources(nodes, read, made, np.flatnonzero(is_mixed))
    mixed = _mixed_sources(nodes, read, made, short)
    counts = short.counts.copy()
    counts[short.left] = [len(each) for each in mixed.values()]
    starts = np.concatenate([[0], np.cumsum(counts[chosen])])
    is_left = np.zeros(len(nodes), bool)
    is_left[short.left] = True
    taken = np.repeat(is_left[chosen], counts[chosen])
    found, of_pool = np.empty(starts[-1], np.intp), chosen[~is_left[chosen]]
    found[~taken] = short.pool[entries(short.first[of_pool], counts[of_pool])[1]]
    found[taken] = _joined([mixed[node] for node in chosen[is_left[chosen]].tolist()])
    return starts, found


def _with_repeated(
    nodes: Nodes, written: InMemory
) -> tuple[Nodes, np.ndarray, np.ndarray]:
    """Nodes, makers of values and which are in memory, with others for what is again.

    Of value v that is value [values] + v, which is in nobody's memory.
    """
    count = len(written.is_written)
    maker = nodes.makers(count)
    again = written.is_inside(nodes, maker) & written.is_written[nodes.reads]
    if not again.any():
        return nodes, maker, written.is_written
    reads = np.where(again, nodes.reads + count, nodes.reads)
    in_memory = np.concatenate([written.is_written, maker < 0])
    return replace(nodes, reads=reads), np.concatenate([maker, maker]), in_memory


def _through_single_reads(
    nodes: Nodes, maker: np.ndarray, in_memory: np.ndarray
) -> np.ndarray:
    """[values] themselves, or what they are made of if that is one value."""
    passes = np.flatnonzero(~in_memory & (np.diff(nodes.read_start)[maker] == 1))
    name = np.arange(len(in_memory))
    name[passes] = nodes.reads[nodes.read_start[maker[passes]]]
    return roots(name)


class _Chain:
    """Values that a chain of nodes reads, each node some more than the one before."""

    def __init__(self, values: Sequence[int]) -> None:
        self.place = {value: k for k, value in enumerate(values)}
        self.values = list(self.place)
        self._array = np.zeros(0, np.intp)

    def array(self) -> np.ndarray:
        """The same values."""
        if len(self._array) < len(self.values):
            self._array = np.array(self.values, np.intp)
        return self._array

    def add(self, values: Sequence[int]) -> None:
        """More values, which are not there yet."""
        for value in values:
            self.place[value] = len(self.values)
            self.values.append(value)


@dataclass(frozen=True, eq=False)
class _Many:
    """The first `count` values of a chain, then those of `rest`."""

    chain: _Chain
    count: int
    rest: list[int]

    def __len__(self) -> int:
        return self.count + len(self.rest)

    def listed(self) -> list[int]:
        """All of them."""
        return self.chain.values[: self.count] + self.rest

    def array(self) -> np.ndarray:
        """All of them."""
        first = self.chain.array()[: self.count]
        return np.concatenate([first, np.array(self.rest, np.intp)])

    def and_then(self, others: Sequence[int]) -> _Many:
        """These, and then those of others that are not among them."""
        if not others:
            return self
        chain, count = self.chain, len(self)
        if chain.values[self.count : count] != self.rest:
            if self.count == len(chain.values):
                chain.add(self.rest)
            else:
                chain = _Chain(self.listed())
        place = chain.place
        new = [value for value in others if place.get(value, count) >= count]
        return _Many(chain, count, list(dict.fromkeys(new)))


@dataclass(frozen=True, eq=False)
class _Short:
    """What nodes read from memory where that is a short list, as segments of `pool`.

    Node k reads `counts[k]` entries from `first[k]` on; -1 of those that are `left`.
    """

    pool: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    left: np.ndarray

    def listed(self, node: int) -> list[int]:
        """What one of the others reads."""
        first = self.first[node]
        return self.pool[first : first + self.counts[node]].tolist()


def _short_sources(
    nodes: Nodes, read: np.ndarray, made: np.ndarray, mixed: np.ndarray
) -> _Short:
    """What most nodes read from memory, each once: many at a time.

    `made` [reads] is the node that is read through, -1 for what is in memory. Nodes
    that are not `mixed` read what they name themselves.
    """
    pool, left = read, mixed
    first, counts = nodes.read_start[:-1].copy(), np.diff(nodes.read_start)
    counts[mixed] = -1
    while len(left):
        place, at = entries_of(nodes.read_start, left)
        inside = made[at]
        begins = np.where(inside < 0, at, first[inside])
        length = np.where(inside < 0, 1, counts[inside])
        is_ready = np.bincount(place, length, len(left)) <= _FEW
        is_ready[place[length < 0]] = False
        if np.count_nonzero(is_ready) < _MANY:
            break
        own = is_ready[place]
        segment, entry = entries(begins[own], length[own])
        owner, value = place[own][segment], pool[entry]
        pairs = owner * (int(read.max()) + 1) + value
        order = np.argsort(pairs, kind="stable")
        is_first = np.ones(len(pairs), bool)
        is_first[order[1:][np.diff(pairs[order]) == 0]] = False
        ready, own = left[is_ready], np.bincount(owner[is_first], minlength=len(left))
        counts[ready] = own[is_ready]
        first[ready] = len(pool) + np.cumsum(counts[ready]) - counts[ready]
        pool, left = np.append(pool, value[is_first]), left[~is_ready]
    return _Short(pool, first, counts, left)


_Sources = list[int] | _Many


def _mixed_sources(
    nodes: Nodes, read: np.ndarray, made: np.ndarray, short: _Short
) -> dict[int, _Sources]:
    """By node that is left, what it reads from memory, each once."""
    left, found = short.left, dict[int, _Sources]()
    place, at = entries_of(nodes.read_start, left)
    ends = np.searchsorted(place, np.arange(len(left) + 1)).tolist()
    pairs = list(zip(read[at].tolist(), made[at].tolist(), strict=True))
    for node, (low, high) in zip(left.tolist(), pairwise(ends), strict=True):
        each, many = list[int](), None
        for value, through in pairs[low:high]:
            if through < 0:
                each.append(value)
            elif through not in found:
                each += short.listed(through)
            elif isinstance(inside := found[through], list):
                each += inside
            elif each or many is not None:
                each += inside.listed()
            else:
                many = inside
        if many is not None:
            found[node] = many.and_then(each)
        elif len(each := list(dict.fromkeys(each))) > _FEW:
            found[node] = _Many(_Chain(each), len(each), [])
        else:
            found[node] = each
    return found


def _joined(parts: Sequence[_Sources]) -> np.ndarray:
    """All of them, one after the other."""
    found = np.empty(sum(map(len, parts)), np.intp)
    few, at = list[int](), 0
    is_few = np.ones(len(found), bool)
    for part in parts:
        if isinstance(part, list):
            few += part
        else:
            found[at : at + len(part)] = part.array()
            is_few[at : at + len(part)] = False
        at += len(part)
    found[is_few] = few
    return found
