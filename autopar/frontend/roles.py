"""Which arguments are state (returned again) and which are the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from textwrap import shorten
from typing import Any

import jax

from ..graph.op_graph import Role, TensorType
from ..jax_compat import PyTreeDef
from .derived_results import MadeOf


@dataclass(frozen=True)
class Roles:
    """The role of each input leaf; `next_output[i]` is where state leaf i returns."""

    roles: tuple[Role, ...]
    next_output: tuple[int | None, ...]
    notes: tuple[str, ...]  # what a user should know: state that could not be tied

    def summary(self, arguments: Sequence[str]) -> str:
        """One line: `state: params, opt_state; batch: x, y`."""
        names: dict[Role, list[str]] = {}
        for role, path in zip(self.roles, arguments, strict=True):
            root = root_of(path)
            if root not in names.setdefault(role, []):
                names[role].append(root)
        return "; ".join(f"{role}: {', '.join(found)}" for role, found in names.items())


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
    weights: Collection[int] = (),
    derived: Sequence[MadeOf] = (),
    donated: Collection[int] = (),
) -> Roles:
    """State is what comes back with the same tree, shapes and dtypes.

    A container is matched as a whole, else child by child. A bare array counts only if
    the result at its own position has its type and is not a scalar. With `derived`, by
    result what it is made of (`derived_results`), those are no state that are made of
    nothing, as gradients are, or nearer to another argument. Of the rest, what
    has the leading size of the batch is the batch. That size is the one that most
    arguments have in all of their leaves, so that many leaves of a frozen model do not
    outvote `x, y`; beside such arguments, one of which half or less has it is no batch.
    `weights` are leaves that are known to be none, `donated` those that a caller gives
    away by name: results like them are their next values, whatever those are made of.
    """
    inputs = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    outputs = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    candidates = _output_subtrees(outputs)
    next_output: list[int | None] = [None] * len(in_types)
    taken: set[int] = set()
    notes: list[str] = []
    passed_over: set[int] = set()  # first leaves of what has results only like it
    given_away: set[int] = set()

    def types_match(node: _Subtree, other: _Subtree) -> list[int]:
        """Offsets of the leaves whose types differ."""
        return [
            offset
            for offset in range(node.count)
            if in_types[node.first + offset] != out_types[other.first + offset]
        ]

    def may_follow(node: _Subtree, other: _Subtree) -> bool:
        """Whether results may be the next values of these arguments."""
        own = range(node.first, node.first + node.count)
        if not derived or given_away.issuperset(own):
            return True
        is_made, num_others = False, 0
        for offset in range(node.count):
            own, result = node.first + offset, other.first + offset
            made_of = derived[result]
            is_made |= made_of.moved > 0
            distances = [
                distance
                for i, distance in made_of.distances.items()
                if next_output[i] is None and in_types[i] == out_types[result]
            ]
            nearest = min(distances, default=inf)
            num_others += made_of.distances.get(own, inf) > nearest
        return is_made and 2 * num_others <= node.count

    def free(other: _Subtree) -> bool:
        leaves = range(other.first, other.first + other.count)
        return taken.isdisjoint(leaves)

    def tie(node: _Subtree, other: _Subtree, skip: Sequence[int] = ()) -> None:
        for offset in range(node.count):
            if offset not in skip:
                next_output[node.first + offset] = other.first + offset
                taken.add(other.first + offset)

    def match(tree: Any, node: _Subtree, position: int | None) -> None:
        if node.count == 0:
            return
        if node.is_leaf:
            top = _top_level(outputs)
            if position is not None and len(top) > 1 and position < len(top):
                other = top[position]
                same = other.is_leaf and free(other) and not types_match(node, other)
                same = same and may_follow(node, other)
                if same and in_types[node.first].rank > 0:
                    tie(node, other)
            return
        sized = (c for c in candidates if c.count == node.count)
        alike = [c for c in sized if c.structure == node.structure and free(c)]
        if alike and not (alike := [c for c in alike if may_follow(node, c)]):
            passed_over.add(node.first)
        for other in alike:
            if not types_match(node, other):
                return tie(node, other)
        if alike and node.count > 1:
            differing = types_match(node, alike[0])
            if len(differing) <= node.count // 2:
                leaf = node.first + differing[0]
                got = out_types[alike[0].first + differing[0]]
                notes.append(
                    f"State should be returned with the shapes and dtypes it came in "
                    f"with, but {in_paths[leaf]} comes in as {in_types[leaf]} and is "
                    f"returned as {got}; it is planned untied and not donated. Return "
                    f"it with its own type to keep it in place."
                )
                return tie(node, alike[0], differing)
        for child, subtree in _children(tree, node.first):
            match(child, subtree, None)

    args, kwargs = inputs
    first, arguments = 0, list[tuple[Any, _Subtree, int | None]]()
    for position, argument in enumerate(args):
        structure = jax.tree.structure(argument)
        is_leaf = _is_leaf(structure)
        node = _Subtree(structure, first, structure.num_leaves, is_leaf)
        match(argument, node, position)
        first += structure.num_leaves
        arguments.append((argument, node, position))
        top = _top_level(outputs)
        for other in [*top[position : position + 1], candidates[0]]:
            is_known = notes or node.first in passed_over
            if not is_known and _is_almost(node, other, in_types, out_types):
                untied = next_output[node.first : first]
                if all(output is None for output in untied):
                    notes.append(_structure_note(in_paths[node.first], node, other))
    for child, subtree in _children(kwargs, first):
        match(child, subtree, None)
        arguments.append((child, subtree, None))

    def look_again(asked: Callable[[_Subtree], bool]) -> None:
        for argument, node, position in arguments:
            untied = all(next_output[i] is None for i in jax.tree.leaves(argument))
            if untied and asked(node):
                match(argument, node, position)

    # The nearest may have another result now.
    look_again(lambda node: node.first in passed_over)
    given_away.update(donated)
    look_again(lambda node: node.first in given_away)

    rest = [
        [
            i
            for i in jax.tree.leaves(each)
            if next_output[i] is None and i not in weights
        ]
        for each in (*args, *kwargs.values())
    ]
    batch = _batch_leaves(rest, in_types)
    roles: list[Role] = [
        "state" if output is not None else "batch" if index in batch else "other"
        for index, output in enumerate(next_output)
    ]
    return Roles(tuple(roles), tuple(next_output), tuple(notes))


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


def _structure_note(path: str, node: _Subtree, other: _Subtree) -> str:
    def text(each: _Subtree) -> str:
        return shorten(str(each.structure)[len("PyTreeDef(") : -1], 200)

    found = (
        "with other types in each leaf"
        if node.structure == other.structure
        else f"as {text(other)}"
    )
    return (
        f"State should be returned with the tree, shapes and dtypes it came in with, "
        f"but {root_of(path)} comes in as {text(node)} and is returned {found}; it is "
        f"planned untied and not donated. Return it as it came in to keep it in place."
    )


def root_of(path: str) -> str:
    """The argument that a leaf belongs to."""
    return path.split("[")[0].split(".")[0]


def _batch_leaves(
    arguments: Sequence[Sequence[int]], in_types: Sequence[TensorType]
) -> set[int]:
    """The leaves of the batch, of those of each argument that are not state.

    Each argument has one vote, for the leading size of all its leaves; where that
    decides nothing it is divided among them, and then the largest size is taken.
    """
    counts: list[Counter[int]] = []
    for leaves in arguments:
        types = (in_types[i] for i in leaves)
        arrays = (each for each in types if each.rank and not each.is_extended)
        counts.append(Counter(each.shape[0] for each in arrays))
    if not any(counts):
        return set()

    def votes(size: int) -> tuple[int, float, int]:
        shares = [count[size] / count.total() for count in counts if count]
        return shares.count(1), sum(shares), size

    leading = max({size for count in counts for size in count}, key=votes)
    has_own = any(len(count) == 1 and leading in count for count in counts)
    return {
        i
        for leaves, count in zip(arguments, counts, strict=True)
        for i in leaves
        if not has_own or 2 * count[leading] > count.total()
        if in_types[i].shape[:1] == (leading,) and not in_types[i].is_extended
    }


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
