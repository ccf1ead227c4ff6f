"""What a step does to the scores of attention, forward and backward: one region.

It starts at a product of queries with keys, and at the product that brings the
cotangent of the weights; it ends at the products that read scores. In between are
elementwise operators and reductions over keys, whatever derivative rules they are from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..graph.dependencies import read_by, tensors_of
from ..graph.op_graph import Block, Constant, Operator, TensorType
from ..rules.elementwise import NARY, UNARY

PRODUCT = "dot_general"
MOST_OPERATORS = 150  # of one region: beyond is no attention
MOST_BEFORE = 12  # operators between a product and what meets the scores
_SHAPING = ("transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims")
REDUCTIONS = ("reduce_max", "reduce_sum")
ALLOWED = frozenset((*UNARY, *NARY, *_SHAPING, *REDUCTIONS)) - {"bitcast_convert_type"}


class NotAttention(Exception):
    """Why a product is not the first of an attention that is understood."""


@dataclass(frozen=True, eq=False)
class BlockFlow:
    """Who makes and who reads the tensors of one block, in order."""

    block: Block
    types: Mapping[int, TensorType]
    maker: Mapping[int, Operator]
    readers: Mapping[int, Sequence[Operator]]
    position: Mapping[int, int]  # of an operator, by index

    @classmethod
    def of(cls, block: Block, types: Mapping[int, TensorType]) -> BlockFlow:
        maker, readers = {}, {}
        for op in block.operators:
            maker.update(dict.fromkeys(op.results, op))
            for tensor in dict.fromkeys(tensors_of(op.operands)):
                readers.setdefault(tensor, []).append(op)
        position = {op.index: i for i, op in enumerate(block.operators)}
        return cls(block, types, maker, readers, position)


@dataclass(frozen=True, eq=False)
class Region:
    """Operators on scores in executed order, from `first`, and `seed` if any.

    `ends` are the products that read what they make. `of_seed` are the tensors that the
    cotangent reaches; `inside` all of the region's.
    """

    first: Operator
    seed: Operator | None
    operators: tuple[Operator, ...]
    ends: tuple[Operator, ...]
    inside: frozenset[int]
    of_seed: frozenset[int]

    def sides(self) -> tuple[int, ...]:
        """What is read from outside, in the order of the first reading."""
        read = read_by(self.operators)
        return tuple(dict.fromkeys(t for t in read if t not in self.inside))


def region_of(flow: BlockFlow, first: Operator) -> Region:
    """The region of the scores that `first` makes.

    Raises:
      NotAttention: it reaches what no score does, or leaves the block.
    """
    seeds, inside, operators = [first], {*first.results}, dict[int, Operator]()
    ends: dict[int, Operator] = {}
    waiting = list(flow.readers.get(first.results[0], ()))
    while waiting:
        op = waiting.pop()
        if op.index in operators or op.index in ends:
            continue
        if op.kind == PRODUCT:
            ends[op.index] = op
            continue
        if op.kind not in ALLOWED:
            raise NotAttention(f"{op.kind} reads its scores")
        operators[op.index] = op
        if len(operators) > MOST_OPERATORS:
            raise NotAttention("too much is done to its scores")
        inside.update(op.results)
        waiting += [r for t in op.results for r in flow.readers.get(t, ())]
        for tensor in tensors_of(op.operands):
            for each in _chain_to_product(flow, tensor, inside):
                inside.update(each.results)
                waiting += [r for t in each.results for r in flow.readers.get(t, ())]
                if each.kind == PRODUCT:
                    seeds.append(each)
                else:
                    operators[each.index] = each
    if len(seeds) > 2:
        raise NotAttention("more than one product meets its scores")
    for tensor in inside:
        if tensor in flow.block.outputs:
            raise NotAttention("its scores leave the step or the loop")
    seed = seeds[1] if len(seeds) == 2 else None
    ordered = sorted(operators.values(), key=lambda op: flow.position[op.index])
    of_seed = {*seed.results} if seed else set[int]()
    for op in ordered:
        if not of_seed.isdisjoint(tensors_of(op.operands)):
            of_seed.update(op.results)
    return Region(
        first,
        seed,
        tuple(ordered),
        tuple(sorted(ends.values(), key=lambda op: flow.position[op.index])),
        frozenset(inside),
        frozenset(of_seed),
    )


def _chain_to_product(
    flow: BlockFlow, tensor: int, inside: set[int], depth: int = MOST_BEFORE
) -> Iterator[Operator]:
    """The operators that lead from another product to `tensor`, if any do."""
    op = flow.maker.get(tensor)
    if op is None or tensor in inside or not depth:
        return
    if op.kind == PRODUCT:
        yield op
    elif op.kind in ALLOWED and op.kind not in REDUCTIONS:
        found = [
            each
            for operand in tensors_of(op.operands)
            for each in _chain_to_product(flow, operand, inside, depth - 1)
        ]
        if found:
            yield from found
            yield op


class Dims:
    """Which dims of tensors are one: those that operators of a region pair."""

    def __init__(self, flow: BlockFlow, region: Region) -> None:
        self._types, self._parent = flow.types, dict[tuple[int, int], tuple[int, int]]()
        for op in region.operators:
            self._add(op)
        scores = region.first.results[0]
        shape = flow.types[scores].shape
        large = [dim for dim, size in enumerate(shape) if size > 1]
        self._labels = {self._root((scores, dim)): dim for dim in large}
        if len(self._labels) < len(large):
            raise NotAttention("two dims of its scores meet")

    def labels(self, tensor: int) -> tuple[int | None, ...]:
        """The dim of the scores that each dim of a tensor is; None for size 1.

        Raises:
          NotAttention: a dim is none of the scores'.
        """
        found = []
        for dim, size in enumerate(self._types[tensor].shape):
            label = None if size == 1 else self._labels.get(self._root((tensor, dim)))
            if label is None and size != 1:
                raise NotAttention("its scores meet other dims than their own")
            found.append(label)
        return tuple(found)

    def _root(self, node: tuple[int, int]) -> tuple[int, int]:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _join(self, first: tuple[int, int], second: tuple[int, int]) -> None:
        sizes = [self._types[tensor].shape[dim] for tensor, dim in (first, second)]
        first, second = self._root(first), self._root(second)
        if first != second and sizes[0] == sizes[1]:
            self._parent[first] = second

    def _add(self, op: Operator) -> None:
        result = op.results[0]
        rank = op.result_types[0].rank
        pairs: list[tuple[int, int]]
        for operand, kind in zip(op.operands, op.operand_types, strict=True):
            if isinstance(operand, Constant):
                continue
            match op.kind:
                case "transpose":
                    order = op.params["permutation"]
                    pairs = [(old, new) for new, old in enumerate(order)]
                case "broadcast_in_dim":
                    pairs = list(enumerate(op.params["broadcast_dimensions"]))
                case "reduce_max" | "reduce_sum":
                    axes = op.params["axes"]
                    left = [d for d in range(kind.rank) if d not in axes]
                    pairs = [(old, new) for new, old in enumerate(left)]
                case "reshape" | "squeeze" | "expand_dims":
                    pairs = _unit_dims_apart(kind.shape, op.result_types[0].shape)
                case _:
                    dims = range(rank) if kind.rank == rank else ()
                    pairs = [(dim, dim) for dim in dims]
            for old, new in pairs:
                self._join((operand, old), (result, new))


def _unit_dims_apart(old: Sequence[int], new: Sequence[int]) -> list[tuple[int, int]]:
    """Equal dims of a reshape that adds or drops dims of size 1 only.

    Raises:
      NotAttention: it does more.
    """
    pairs, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        if i < len(old) and j < len(new) and old[i] == new[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif j < len(new) and new[j] == 1:
            j += 1
        elif i < len(old) and old[i] == 1:
            i += 1
        else:
            raise NotAttention("its scores are reshaped")
    return pairs
