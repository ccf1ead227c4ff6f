"""Which arguments are state (returned again) and which are the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import jax

from ..graph.op_graph import Role, TensorType
from ..graph.traced_function import Roles, root_of
from ..jax_compat import PyTreeDef
from .derived_results import MadeOf


@dataclass(frozen=True)
class _Subtree:
    """A node of an argument or result tree and the leaves below it."""

    structure: PyTreeDef
    first: int
    count: int
    is_leaf: bool


def _is_leaf(structure: PyTreeDef) -> bool:
    """Whether a tree is one bare leaf; JAX says so of an empty container too."""
    return structure.num_leaves == 1 and jax.tree_util.treedef_is_leaf(structure)


def _children(tree: Any, first: int) -> list[tuple[Any, _Subtree]]:
    found = []
    children = jax.tree.flatten(tree, is_leaf=lambda node: node is not tree)[0]
    for child in children:
        structure = jax.tree.structure(child)
        count = structure.num_leaves
        leaf = _is_leaf(structure)
        found.append((child, _Subtree(structure, first, count, leaf)))
        first += count
    return found


def infer_roles(
    in_tree: PyTreeDef,
    out_tree: PyTreeDef,
    in_types: Sequence[TensorType],
    out_types: Sequence[TensorType],
    in_paths: Sequence[str],
    derived: Sequence[MadeOf] = (),
    donated: Collection[int] = (),
) -> Roles:
    """State is what comes back with the same tree, shapes and dtypes.

    A container is matched as a whole, else child by child. A bare array counts only if
    the result at its own position has its type and is not a scalar. With `derived`, by
    result what it is made of (`derived_results`), those are no state that are made of
    nothing, as gradients are, or nearer to another argument. `donated` are leaves that
    a caller gives away by name: results like them are their next values, whatever those
    are made of. Of the rest, what has the leading size of most is the batch.
    """
    tying = _Tying(
        jax.tree.unflatten(out_tree, range(out_tree.num_leaves)),
        in_types,
        out_types,
        in_paths,
        derived,
    )
    args, kwargs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    first, arguments = 0, list[_Argument]()
    for position, argument in enumerate(args):
        structure = jax.tree.structure(argument)
        node = _Subtree(structure, first, structure.num_leaves, _is_leaf(structure))
        arguments.append(_Argument(argument, node, position))
        tying.match(arguments[-1])
        tying.note_almost(node, position)
        first += structure.num_leaves
    for child, subtree in _children(kwargs, first):
        arguments.append(_Argument(child, subtree, None))
        tying.match(arguments[-1])
    tying.look_again(arguments, tying.passed_over)  # another result may be nearest now
    tying.given_away.update(donated)
    tying.look_again(arguments, tying.given_away)
    found = tuple(tying.next_output)
    roles = tuple[Role, ...]("other" if o is None else "state" for o in found)
    inferred = Roles(roles, found, tuple(tying.notes))
    untied = untied_arrays(inferred, in_tree, in_types)
    sizes = leading_sizes(untied, in_types)[:1]
    return inferred.with_batch(batch_leaves(untied, in_types, sizes))


@dataclass(frozen=True)
class _Argument:
    tree: Any
    node: _Subtree
    position: int | None  # None if it is given by keyword


@dataclass(eq=False)
class _Tying:
    """The results that are the next values of arguments, found one by one.

    `passed_over` are first leaves of what has results only like it, and `given_away`
    leaves whose next values may be made of anything.
    """

    outputs: Any
    in_types: Sequence[TensorType]
    out_types: Sequence[TensorType]
    in_paths: Sequence[str]
    derived: Sequence[MadeOf]
    taken: set[int] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    passed_over: set[int] = field(default_factory=set)
    given_away: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.next_output: list[int | None] = [None] * len(self.in_types)
        self.candidates = _output_subtrees(self.outputs)
        self.top = _top_level(self.outputs)

    def match(self, argument: _Argument) -> None:
        """Tie an argument, or what of it has results of its own."""
        node, position = argument.node, argument.position
        if node.count == 0:
            return
        if node.is_leaf:
            if position is not None and 1 < len(self.top) > position:
                self._match_bare(node, self.top[position])
            return
        alike = [
            c
            for c in self.candidates
            if c.count == node.count
            and c.structure == node.structure
            and self._is_free(c)
        ]
        if alike and not (alike := [c for c in alike if self._may_follow(node, c)]):
            self.passed_over.add(node.first)
        for other in alike:
            if not self._differing(node, other):
                return self._tie(node, other)
        if alike and node.count > 1:
            differing = self._differing(node, alike[0])
            if len(differing) <= node.count // 2:
                self._note_differing(node, alike[0], differing[0])
                return self._tie(node, alike[0], differing)
        for child, subtree in _children(argument.tree, node.first):
            self.match(_Argument(child, subtree, None))

    def look_again(
        self, arguments: Sequence[_Argument], first: Collection[int]
    ) -> None:
        """Match those arguments that begin with one of the leaves `first` again."""
        for each in arguments:
            leaves = jax.tree.leaves(each.tree)
            if each.node.first in first and self._is_untied(leaves):
                self.match(each)

    def note_almost(self, node: _Subtree, position: int) -> None:
        """Tell of a result that could be meant as the next value of an argument."""
        for other in [*self.top[position : position + 1], self.candidates[0]]:
            if self.notes or node.first in self.passed_over:
                return
            if _is_almost(node, other, self.in_types, self.out_types):
                if self._is_untied(range(node.first, node.first + node.count)):
                    self.notes.append(
                        f"State should be returned with the tree, shapes and dtypes it "
                        f"came in with, but {root_of(self.in_paths[node.first])} is "
                        f"returned otherwise; it is planned untied and not donated. "
                        f"Return it as it came in to keep it in place."
                    )

    def _match_bare(self, node: _Subtree, other: _Subtree) -> None:
        same = other.is_leaf and self._is_free(other)
        if same and not self._differing(node, other) and self._may_follow(node, other):
            if self.in_types[node.first].rank > 0:
                self._tie(node, other)

    def _differing(self, node: _Subtree, other: _Subtree) -> list[int]:
        """Offsets of the leaves whose types differ."""
        return [
            offset
            for offset in range(node.count)
            if self.in_types[node.first + offset]
            != self.out_types[other.first + offset]
        ]

    def _may_follow(self, node: _Subtree, other: _Subtree) -> bool:
        """Whether results may be the next values of these arguments."""
        own = range(node.first, node.first + node.count)
        if not self.derived or self.given_away.issuperset(own):
            return True
        is_made, num_others = False, 0
        for offset in range(node.count):
            own, result = node.first + offset, other.first + offset
            made_of = self.derived[result]
            is_made |= made_of.moved > 0
            distances = [
                distance
                for i, distance in made_of.distances.items()
                if self.next_output[i] is None
                and self.in_types[i] == self.out_types[result]
            ]
            nearest = min(distances, default=inf)
            num_others += made_of.distances.get(own, inf) > nearest
        return is_made and 2 * num_others <= node.count

    def _is_free(self, other: _Subtree) -> bool:
        return self.taken.isdisjoint(range(other.first, other.first + other.count))

    def _is_untied(self, leaves: Iterable[int]) -> bool:
        return all(self.next_output[leaf] is None for leaf in leaves)

    def _tie(self, node: _Subtree, other: _Subtree, skip: Sequence[int] = ()) -> None:
        for offset in range(node.count):
            if offset not in skip:
                self.next_output[node.first + offset] = other.first + offset
                self.taken.add(other.first + offset)

    def _note_differing(self, node: _Subtree, other: _Subtree, offset: int) -> None:
        leaf = node.first + offset
        self.notes.append(
            f"State should be returned with the shapes and dtypes it came in with, but "
            f"{self.in_paths[leaf]} comes in as {self.in_types[leaf]} and is returned "
            f"as {self.out_types[other.first + offset]}; it is planned untied and not "
            f"donated. Return it with its own type to keep it in place."
        )


def _is_almost(
    node: _Subtree,
    other: _Subtree,
    in_types: Sequence[TensorType],
    out_types: Sequence[TensorType],
) -> bool:
    """Whether a result could be meant as the next value of an argument.

    Both are containers, and one holds half of the other's types, or has its structure.
    """
    if node.is_leaf or other.is_leaf or node.count < 2:
        return False
    ours = Counter(in_types[node.first : node.first + node.count])
    theirs = Counter(out_types[other.first : other.first + other.count])
    shared = (ours & theirs).total()
    return node.structure == other.structure or 2 * shared >= max(
        node.count, other.count
    )


def untied_arrays(
    roles: Roles, in_tree: PyTreeDef, in_types: Sequence[TensorType]
) -> list[list[int]]:
    """By argument, the leaves that are no state and have a dim 0."""
    args, kwargs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    return [
        [
            leaf
            for leaf in jax.tree.leaves(each)
            if roles.roles[leaf] != "state"
            and in_types[leaf].rank
            and not in_types[leaf].is_extended
        ]
        for each in (*args, *kwargs.values())
    ]


def leading_sizes(
    arguments: Sequence[Sequence[int]], in_types: Sequence[TensorType]
) -> list[int]:
    """The sizes along dim 0 of the leaves of arguments, that of most arguments first.

    Each argument has one vote, for the size of all its leaves, so that many leaves of a
    frozen model do not outvote `x, y`; where that decides nothing it is divided among
    them, and then the largest size comes first.
    """
    counts = [Counter(in_types[i].shape[0] for i in leaves) for leaves in arguments]

    def votes(size: int) -> tuple[int, float, int]:
        shares = [count[size] / count.total() for count in counts if count]
        return shares.count(1), sum(shares), size

    return sorted({size for count in counts for size in count}, key=votes, reverse=True)


def batch_leaves(
    arguments: Sequence[Sequence[int]],
    in_types: Sequence[TensorType],
    sizes: Collection[int],
) -> set[int]:
    """The leaves that have one of the `sizes` of the batch along dim 0.

    Beside arguments that have it in all leaves, one of which half or less has it is no
    batch.
    """
    found: set[int] = set()
    for size in sizes:
        alike = [[i for i in own if in_types[i].shape[0] == size] for own in arguments]
        pairs = [*zip(arguments, alike, strict=True)]
        has_own = any(len(some) == len(own) > 0 for own, some in pairs)
        for own, some in pairs:
            if not has_own or 2 * len(some) > len(own):
                found.update(some)
    return found


def _top_level(outputs: Any) -> list[_Subtree]:
    return [subtree for _, subtree in _children(outputs, 0)]


def _output_subtrees(outputs: Any) -> list[_Subtree]:
    """The result itself, then its nodes in breadth-first order."""
    structure = jax.tree.structure(outputs)
    leaf = _is_leaf(structure)
    found = [_Subtree(structure, 0, structure.num_leaves, leaf)]
    queue = [] if leaf else _children(outputs, 0)
    while queue:
        tree, subtree = queue.pop(0)
        found.append(subtree)
        if not subtree.is_leaf and subtree.count:
            queue.extend(_children(tree, subtree.first))
    return found
