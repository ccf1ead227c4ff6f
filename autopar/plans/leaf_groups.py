"""Groups the leaves of arguments that are split alike, so that deep models stay short.

Leaves that differ in the number of a layer only become one row, its number a `*`; trees
that mirror another (an optimizer's moments) join the rows of the tree they mirror.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

# A layer's number: `[3]`, or the end of a key as in `['layers_3']`.
_NUMBER = re.compile(r"(?<=\[)\d+(?=\])|(?<=_)\d+(?='\])")
_TOKEN = re.compile(r"\[[^\]]*\]|\.?[^.\[]+")
_LEAST_MIRRORED = 3  # leaves: below that likeness is chance


# An argument's leaf, as it lies in one plan (`LeafView`) or in two (`ChangedLeaf`).
L = TypeVar("L", bound=Any)


@dataclass(frozen=True)
class LeafGroup(Generic[L]):
    """Leaves of one shape, spec and role.

    `tree` is the path of the mirrored tree that the group is of, if any; `mirrors` are
    the trees that mirror it and whose leaves are counted here too.
    """

    path: str
    leaves: tuple[L, ...]
    tree: str = ""
    mirrors: tuple[str, ...] = ()

    @property
    def first(self) -> L:
        """A leaf that stands for all."""
        return self.leaves[0]

    @property
    def bytes(self) -> int:
        """Bytes of all leaves on one device."""
        return sum(leaf.bytes for leaf in self.leaves)


def group_leaves(leaves: Iterable[L]) -> tuple[LeafGroup[L], ...]:
    """The leaves in groups, in the order of each group's first leaf."""
    by_pattern: dict[object, list[L]] = {}
    for leaf in leaves:
        pattern = without_numbers(leaf.path)
        key = (pattern, leaf.shape, _home(leaf), leaf.role, leaf.bytes)
        by_pattern.setdefault(key, []).append(leaf)
    groups = [
        LeafGroup(common_path([leaf.path for leaf in same]), tuple(same))
        for same in by_pattern.values()
    ]
    return _join_mirrors(groups)


def _home(leaf: Any) -> Hashable:
    """Where a leaf lies: its spec, and whose memory it is in."""
    return leaf.spec, getattr(leaf, "memory", "device")


def without_numbers(path: str) -> str:
    """The path with `*` for the number of each layer."""
    return _NUMBER.sub("*", path)


def common_path(paths: Sequence[str]) -> str:
    """The path with `*` for each number in which some, alike without them, differ."""
    numbers = zip(*map(_NUMBER.findall, paths), strict=True)
    shown = iter([n[0] if len(set(n)) == 1 else "*" for n in numbers])
    return _NUMBER.sub(lambda _: next(shown), paths[0])


def _join_mirrors(groups: Sequence[LeafGroup[L]]) -> tuple[LeafGroup[L], ...]:
    """Groups of the trees that look like the largest tree, joined with its own."""
    trees = _mirrored_trees(groups)
    if len(trees) < 2:
        return tuple(groups)
    joined: dict[object, LeafGroup[L]] = {}
    for group in groups:
        tree = next((t for t in trees if _is_below(group.path, t)), None)
        if tree is None:
            joined[group.path, _home(group.first)] = group
            continue
        home = _home(group.first)
        key = (group.path[len(tree) :], group.first.shape, home, "mirrored")
        if key in joined:
            known = joined[key]
            leaves, mirrors = known.leaves + group.leaves, (*known.mirrors, tree)
            joined[key] = LeafGroup(known.path, leaves, known.tree, mirrors)
        else:
            joined[key] = LeafGroup(group.path, group.leaves, tree)
    return tuple(joined.values())


def _is_below(path: str, tree: str) -> bool:
    return path.startswith(tree) and path[len(tree) :][:1] in (".", "[")


def _mirrored_trees(groups: Sequence[LeafGroup[L]]) -> list[str]:
    """The paths of the largest trees of state that have the same leaves."""
    members: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for group in groups:
        if group.first.role != "state":
            continue
        prefix = ""
        for token in _TOKEN.findall(group.path):
            prefix += token
            tail = group.path[len(prefix) :]
            members.setdefault(prefix, set()).add((tail, group.first.shape))
    alike: dict[frozenset[tuple[str, tuple[int, ...]]], list[str]] = {}
    for prefix, tails in members.items():
        if len(tails) >= _LEAST_MIRRORED:
            alike.setdefault(frozenset(tails), []).append(prefix)
    repeated = [(len(tails), trees) for tails, trees in alike.items() if len(trees) > 1]
    return max(repeated, key=lambda item: item[0])[1] if repeated else []
