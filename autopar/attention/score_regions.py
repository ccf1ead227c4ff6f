"""What a step does to the scores of attention, forward and backward: one region.

It starts at a product of queries with keys, and at the product that brings the
cotangent of the weights; it ends at the products that read scores. In between are
elementwise operators and reductions over keys, whatever derivative rules they are from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..graph.dependencies import made_from, read_by, tensors_of
from ..graph.op_graph import Block, Constant, Operand, Operator, TensorType
from ..rules.base import factors_of
from ..rules.elementwise import NARY, UNARY
from .score_algebra import NotAttention
from .spec import Labels

Owner = int | tuple[int, int]
Shape = tuple[int, ...]
_Dim = tuple[Owner, int]
PRODUCT = "dot_general"
MOST_OPERATORS = 150  # of one region: beyond is no attention
MOST_BEFORE = 12  # operators between a product and what meets the scores
_SHAPING = ("transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims")
REDUCTIONS = ("reduce_max", "reduce_sum")
ALLOWED = frozenset((*UNARY, *NARY, *_SHAPING, *REDUCTIONS)) - {"bitcast_convert_type"}


@dataclass(frozen=True, eq=False)
class Origins:
    """Where the tensors of all blocks come from: values, operators, or outer blocks."""

    constants: Mapping[int, np.ndarray]
    maker: Mapping[int, Operator]
    outer: Mapping[int, Operand]  # what a scan's constants are outside of its body

    def of(self, tensor: int) -> int:
        """The tensor that a constant of loops is outside of them."""
        while isinstance(found := self.outer.get(tensor), int):
            tensor = found
        return tensor


@dataclass(frozen=True, eq=False)
class BlockFlow:
    """Who makes and who reads the tensors of one block, in order."""

    block: Block
    types: Mapping[int, TensorType]
    maker: Mapping[int, Operator]
    readers: Mapping[int, Sequence[Operator]]
    position: Mapping[int, int]  # of an operator, by index
    origins: Origins

    @classmethod
    def of(
        cls, block: Block, types: Mapping[int, TensorType], origins: Origins
    ) -> BlockFlow:
        maker, readers = {}, {}
        for op in block.operators:
            maker.update(dict.fromkeys(op.results, op))
            for tensor in dict.fromkeys(tensors_of(op.operands)):
                readers.setdefault(tensor, []).append(op)
        position = {op.index: i for i, op in enumerate(block.operators)}
        return cls(block, types, maker, readers, position, origins)


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

    @property
    def products(self) -> tuple[Operator, ...]:
        seeds = (self.first,) if self.seed is None else (self.first, self.seed)
        return (*seeds, *self.ends)

    def sides(self) -> set[int]:
        """What is read from outside."""
        return {*read_by(self.operators)} - self.inside


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
    if not inside.isdisjoint(tensors_of(flow.block.outputs)):
        why = "its scores leave the step or the loop; scan layers in jax.checkpoint"
        raise NotAttention(why)
    seed = seeds[1] if len(seeds) == 2 else None
    ordered = sorted(operators.values(), key=lambda op: flow.position[op.index])
    of_seed = made_from(seed.results if seed else (), ordered)
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
    """Which dims are one: those that a region's operators, and its products, pair.

    An owner of dims is a tensor of the region, or what a product reads or makes beside
    it: its index, and 0 and 1 for operands or 2 for the result.
    """

    def __init__(self, flow: BlockFlow, region: Region) -> None:
        self._scores, self._shapes = region.first.results[0], dict[Owner, Shape]()
        self._parent, self._numbers = dict[_Dim, _Dim](), dict[_Dim, int]()
        for op in region.operators:
            for position, operand in enumerate(op.operands):
                if isinstance(operand, Constant):
                    continue
                for old, new in paired_dims(op, position):
                    self._join((operand, old), (op.results[0], new))
        for op in region.products:
            self._add_product(op, region)
        for tensor in (*region.inside, *region.sides()):
            self._shapes[tensor] = flow.types[tensor].shape

    def labels(self, owner: Owner) -> Labels:
        """Numbers of the dims of an owner, those of the scores first; None for size 1.

        Raises:
          NotAttention: two dims of the scores are one, or a tensor has others.
        """
        if not self._numbers:
            rank = len(self._shapes[self._scores])
            for dim in range(rank):
                if self._shapes[self._scores][dim] > 1:
                    root = self._root((self._scores, dim))
                    if self._numbers.setdefault(root, dim) != dim:
                        raise NotAttention("two dims of its scores meet")
            self._next = rank
        found: list[int | None] = []
        for dim, size in enumerate(self._shapes[owner]):
            root = self._root((owner, dim))
            if size > 1 and root not in self._numbers:
                if isinstance(owner, int):
                    raise NotAttention("its scores meet other dims than their own")
                self._numbers[root], self._next = self._next, self._next + 1
            found.append(self._numbers[root] if size > 1 else None)
        return tuple(found)

    def join(self, first: Owner, second: Owner) -> None:
        """Makes the dims of two owners of one tensor one."""
        for dim in range(len(self._shapes[first])):
            self._join((first, dim), (second, dim))

    def _root(self, node: _Dim) -> _Dim:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _join(self, first: _Dim, second: _Dim) -> None:
        first, second = self._root(first), self._root(second)
        if first != second:
            self._parent[first] = second
            self._numbers.clear()

    def _add_product(self, op: Operator, region: Region) -> None:
        tensors = (*op.operands, *op.results)
        owners = tuple(
            t if isinstance(t, int) and t in region.inside else (op.index, i)
            for i, t in enumerate(tensors)
        )
        types = (*op.operand_types, *op.result_types)
        for owner, kind in zip(owners, types, strict=True):
            self._shapes[owner] = kind.shape
        for factor in factors_of(op):
            dims = (*factor.operands, *factor.results)
            places = [p for p in zip(owners, dims, strict=True) if p[1] >= 0]
            for first, second in pairwise(places):
                self._join(first, second)


def paired_dims(op: Operator, position: int) -> list[tuple[int, int]]:
    """Dims of an operand, and those of the result that they are.

    Raises:
      NotAttention: dims are joined or cut.
    """
    old, new = op.operand_types[position].shape, op.result_types[0].shape
    if op.kind == "reshape" and [n for n in old if n > 1] != [n for n in new if n > 1]:
        raise NotAttention("its scores are reshaped")
    pairs = ((each.operands[position], each.results[0]) for each in factors_of(op))
    return [(i, j) for i, j in pairs if min(i, j) >= 0 and old[i] == new[j]]
