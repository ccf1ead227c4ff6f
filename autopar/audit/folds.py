"""Finds sums over one group of devices and then another that a compiler made one sum.

XLA makes an all_reduce of an all_reduce's result one all_reduce over both groups.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from autopar.audit.rewrites import Piece, executions, total
from autopar.sharding.collective import Collective, Groups

# Kind, reduction, groups: what is compared with what.
Key = tuple[str, str, Groups]
_ByKey = Mapping[Key, Sequence[Collective]]
# What is planned and what is seen, where it is known how often it runs.
_Change = tuple[Counter[Piece], Counter[Piece]]


def fold(
    planned: _ByKey, compiled: _ByKey, name: Callable[[str, Groups], str]
) -> tuple[_ByKey, Mapping[Key, Sequence[str]]]:
    """Folds planned all_reduces where the compiled program has folded ones.

    Pieces of the same type and size, gone equally often from two groups, must make up
    all the bytes by which the groups that are their product have more than planned.

    Args:
      planned: by kind, reduction and groups.
      compiled: the same.
      name: what groups of a kind are called.

    Returns:
      The planned collectives after it, and a text for each key that it changed.
    """
    after = {key: list(pieces) for key, pieces in planned.items()}
    told: dict[Key, list[str]] = defaultdict(list)
    for whole in (key for key in sorted(compiled) if key[0] == "all_reduce"):
        parts = [k for k in sorted(after) if k[:2] == whole[:2] and k != whole]
        for pair in combinations(parts, 2):
            pieces = _folded(*(_change(after, compiled, key) for key in (*pair, whole)))
            if not pieces or not _is_product(pair[0][2], pair[1][2], whole[2]):
                continue
            taken, after[pair[0]] = _split(after[pair[0]], pieces)
            _, after[pair[1]] = _split(after[pair[1]], pieces)
            added = [replace(each, groups=whole[2]) for each in taken]
            after[whole] = [*after.get(whole, ()), *added]
            axes = " and ".join(name(kind, groups) for kind, _, groups in pair)
            text = f"fold: {total(pieces):,} B over {axes} sent as one"
            for key in (*pair, whole):
                told[key].append(text)
    return after, told


def _change(planned: _ByKey, compiled: _ByKey, key: Key) -> _Change:
    wanted, seen = (
        executions(each for each in pieces.get(key, ()) if not each.unbounded)
        for pieces in (planned, compiled)
    )
    return wanted, seen


def _folded(first: _Change, second: _Change, whole: _Change) -> Counter[Piece]:
    """Pieces gone from both parts that make up the bytes not planned in the whole."""
    gone = (first[0] - first[1]) & (second[0] - second[1])
    new = whole[1] - whole[0]
    folded: Counter[Piece] = Counter()
    for dtype in {dtype for dtype, _ in new}:
        wanted, seen = (
            sum(size * times for (each, size), times in pieces.items() if each == dtype)
            for pieces in whole
        )
        left = seen - wanted
        # What is there as it was, before what may be combined with others.
        for choice in (gone & new, gone - new):
            for piece in sorted(choice, reverse=True):
                if piece[0] == dtype:
                    times = min(choice[piece], max(left, 0) // piece[1])
                    folded[piece] += times
                    left -= times * piece[1]
        if left > 0:
            return Counter()
    return +folded


def _is_product(first: Groups, second: Groups, whole: Groups) -> bool:
    """Whether sums over one, then over the other, add each value of `whole` once."""
    if len(first[0]) * len(second[0]) != len(whole[0]):
        return False
    firsts, seconds, wholes = (
        {device: group for group in groups for device in group}
        for groups in (first, second, whole)
    )
    return firsts.keys() == seconds.keys() == wholes.keys() and all(
        sorted(each for member in seconds[device] for each in firsts[member])
        == sorted(group)
        for device, group in wholes.items()
    )


def _split(
    collectives: Iterable[Collective], pieces: Counter[Piece]
) -> tuple[list[Collective], list[Collective]]:
    """The executions that are among `pieces`, and all others."""
    left = Counter(pieces)
    taken, others = [], []
    for each in collectives:
        piece = each.dtype, each.bytes
        times = 0 if each.unbounded else min(each.count, left[piece])
        left[piece] -= times
        if times:
            taken.append(replace(each, count=times))
        if times < each.count:
            left_over = replace(each, count=each.count - times) if times else each
            others.append(left_over)
    return taken, others
