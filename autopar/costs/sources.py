"""What kernels read from memory, through all that they do themselves.

In the order of XLA's `InstructionFusion`: of what a kernel reads it takes the last in
post-order into it, and appends what that reads. So reads have ranks: those of what is
last in post-order come first, and of one node in their own order.
"""

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
    nodes: Nodes, written: InMemory, chosen: np.ndarray, place: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What nodes read from memory, through all that they do themselves.

    Args:
      nodes: all of them.
      written: which values are in memory.
      chosen: the nodes that are asked for.
      place: [nodes] of each in post-order.

    Returns:
      starts, reads: chosen node k reads `reads[starts[k] : starts[k + 1]]`.
    """
    if not len(nodes):
        return np.zeros(1, np.intp), np.zeros(0, np.intp)
    nodes, maker, in_memory = _with_repeated(nodes, written)
    counts = np.diff(nodes.read_start)
    reader = np.repeat(np.arange(len(nodes)), counts)
    ranked = _backwards(place[reader] - place.min(), np.arange(len(reader)))
    rank = np.empty(len(reader), np.intp)
    rank[ranked] = np.arange(len(ranked))
    read, value = rank[_through_single_reads(nodes, maker, in_memory)], nodes.reads
    value = value[ranked]  # [ranks]
    pairs = np.sort(reader * len(in_memory) + value[read])
    reads_twice = pairs[1:][np.diff(pairs) == 0] // len(in_memory)
    is_inside = ~in_memory[value[read]]
    is_mixed = np.bincount(reader[is_inside], minlength=len(nodes)) > 0
    is_mixed[reads_twice] = True
    is_asked = np.zeros(len(nodes), bool)
    is_asked[chosen] = True
    is_mixed &= is_asked | (counts > 1)  # the others are read through
    made = np.where(is_inside, maker[value[read]], -1)
    short = _short_sources(nodes, read, made, np.flatnonzero(is_mixed), value)
    mixed = _mixed_sources(nodes, read, made, short, value)
    counts = short.counts.copy()
    counts[short.left] = [len(each) for each in mixed.values()]
    starts = np.concatenate([[0], np.cumsum(counts[chosen])])
    is_left = np.zeros(len(nodes), bool)
    is_left[short.left] = True
    taken = np.repeat(is_left[chosen], counts[chosen])
    found, of_pool = np.empty(starts[-1], np.intp), chosen[~is_left[chosen]]
    found[~taken] = short.pool[entries(short.first[of_pool], counts[of_pool])[1]]
    found[taken] = _joined([mixed[node] for node in chosen[is_left[chosen]].tolist()])
    owner = np.repeat(np.arange(len(chosen)), counts[chosen])
    return starts, value[_backwards(owner, found)]


def _backwards(owner: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Numbers by their owner, those of one from the highest to the lowest."""
    last = int(numbers.max(initial=0))
    keys = np.sort(owner * (last + 1) + last - numbers, kind="stable")  # long runs
    return last - keys % (last + 1)


def in_post_order(nodes: Nodes, post_order: np.ndarray, num_values: int) -> np.ndarray:
    """[nodes] their places; a conversion comes after what makes its operand.

    `post_order` has those of operators.
    """
    place = np.append(2 * post_order, -1)[nodes.operator]
    converts = np.flatnonzero((nodes.operator < 0) & (np.diff(nodes.read_start) > 0))
    made_by = nodes.makers(num_values)[nodes.reads[nodes.read_start[converts]]]
    place[converts] = np.where(made_by < 0, -1, place[made_by] + 1)
    return place


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


def _as_absorbed(
    nodes: Nodes, maker: np.ndarray, in_memory: np.ndarray, place: np.ndarray
) -> Nodes:
    """Nodes that read first what is in memory, then what they do themselves.

    XLA's `InstructionFusion` takes of what a kernel reads the last in post-order into
    it, and appends what that reads.
    """
    counts = np.diff(nodes.read_start)
    reader = np.repeat(np.arange(len(nodes)), counts)
    is_inside = ~in_memory[nodes.reads]
    later = np.where(is_inside, -place[maker[nodes.reads]], 0)
    order = np.lexsort((np.arange(len(reader)), later, is_inside, reader))
    return replace(nodes, reads=nodes.reads[order])


def _through_single_reads(
    nodes: Nodes, maker: np.ndarray, in_memory: np.ndarray
) -> np.ndarray:
    """[reads] themselves, or that of what the value is made of if that is one value."""
    made = maker[nodes.reads]
    passes = np.flatnonzero(
        ~in_memory[nodes.reads] & (np.diff(nodes.read_start)[made] == 1)
    )
    name = np.arange(len(nodes.reads))
    name[passes] = nodes.read_start[made[passes]]
    return roots(name)


class _Chain:
    """Ranks of what a chain of nodes reads, each node some more than the one before.

    `value` has the value of each rank; `place` are places of values.
    """

    def __init__(self, ranks: Sequence[int], value: Sequence[int]) -> None:
        self.value, self.ranks = value, list[int]()
        self.place = dict[int, int]()
        self._array = np.zeros(0, np.intp)
        self.add(ranks)

    def array(self) -> np.ndarray:
        """The same ranks."""
        if len(self._array) < len(self.ranks):
            self._array = np.array(self.ranks, np.intp)
        return self._array

    def add(self, ranks: Sequence[int]) -> None:
        """More of them, of values that are not there yet."""
        for rank in ranks:
            self.place[self.value[rank]] = len(self.ranks)
            self.ranks.append(rank)


@dataclass(frozen=True, eq=False)
class _Many:
    """The first `count` ranks of a chain, then those of `rest`."""

    chain: _Chain
    count: int
    rest: list[int]

    def __len__(self) -> int:
        return self.count + len(self.rest)

    def listed(self) -> list[int]:
        """All of them."""
        return self.chain.ranks[: self.count] + self.rest

    def array(self) -> np.ndarray:
        """All of them."""
        first = self.chain.array()[: self.count]
        return np.concatenate([first, np.array(self.rest, np.intp)])

    def and_then(self, others: Sequence[int]) -> _Many:
        """These, and then those of others whose values are not among them."""
        if not others:
            return self
        chain, count = self.chain, len(self)
        if any(self._is_below(rank) for rank in others):
            listed = _each_value_once([*self.listed(), *others], chain.value)
            return _Many(_Chain(listed, chain.value), len(listed), [])
        if chain.ranks[self.count : count] != self.rest:
            if self.count == len(chain.ranks):
                chain.add(self.rest)
            else:
                chain = _Chain(self.listed(), chain.value)
        place, value = chain.place, chain.value
        new = [rank for rank in others if place.get(value[rank], count) >= count]
        return _Many(chain, count, _each_value_once(new, value))

    def _is_below(self, rank: int) -> bool:
        """Whether the same value is there with a lower rank."""
        chain = self.chain
        at = chain.place.get(chain.value[rank], len(chain.ranks))
        return at < self.count and chain.ranks[at] < rank


def _each_value_once(ranks: Sequence[int], value: Sequence[int]) -> list[int]:
    """The highest rank of each value."""
    return list({value[rank]: rank for rank in sorted(ranks)}.values())


@dataclass(frozen=True, eq=False)
class _Short:
    """Ranks of what nodes read from memory, where they are few: segments of `pool`.

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
    nodes: Nodes,
    read: np.ndarray,
    made: np.ndarray,
    mixed: np.ndarray,
    value: np.ndarray,
) -> _Short:
    """What most nodes read from memory, each once: many at a time.

    `made` [reads] is the node that is read through, -1 for what is in memory. Nodes
    that are not `mixed` read what they name themselves. `value` is that of each rank.
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
        owner, ranks = place[own][segment], pool[entry]
        pairs = owner * (int(value.max()) + 1) + value[ranks]
        order = np.argsort(pairs * len(value) - ranks)
        is_first = np.ones(len(pairs), bool)
        is_first[order[1:][np.diff(pairs[order]) == 0]] = False
        ready, own = left[is_ready], np.bincount(owner[is_first], minlength=len(left))
        counts[ready] = own[is_ready]
        first[ready] = len(pool) + np.cumsum(counts[ready]) - counts[ready]
        pool, left = np.append(pool, ranks[is_first]), left[~is_ready]
    return _Short(pool, first, counts, left)


_Sources = list[int] | _Many


def _mixed_sources(
    nodes: Nodes,
    read: np.ndarray,
    made: np.ndarray,
    short: _Short,
    value: np.ndarray,
) -> dict[int, _Sources]:
    """By node that is left, ranks of what it reads from memory, each value once."""
    left, found = short.left, dict[int, _Sources]()
    value_of = value.tolist() if len(left) else []
    place, at = entries_of(nodes.read_start, left)
    ends = np.searchsorted(place, np.arange(len(left) + 1)).tolist()
    pairs = list(zip(read[at].tolist(), made[at].tolist(), strict=True))
    for node, (low, high) in zip(left.tolist(), pairwise(ends), strict=True):
        each, many = list[int](), None
        for rank, through in pairs[low:high]:
            if through < 0:
                each.append(rank)
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
        elif len(each := _each_value_once(each, value_of)) > _FEW:
            found[node] = _Many(_Chain(each, value_of), len(each), [])
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
