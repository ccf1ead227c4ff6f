"""Attention in a graph: which operators it is, forward and backward, and what it does.

It is known by its operators, however they are written: their forms
(`score_algebra.py`) are those of a softmax of scaled, biased and masked
products, and of the gradient of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from ..graph.build_graph import SCAN
from ..graph.op_graph import Block, Constant, Operator, OpGraph
from ..graph.traced_function import TracedFunction
from . import score_algebra as algebra
from .score_algebra import NotAttention
from .score_forms import ScoreForms
from .score_reading import Side, read_scores
from .score_regions import (
    ALLOWED,
    MOST_OPERATORS,
    PRODUCT,
    REDUCTIONS,
    BlockFlow,
    Dims,
    Origins,
    Region,
    region_of,
)
from .spec import Attention, Labels, Scores, named

_GRADIENTS = ("d_q", "d_k", "d_v")


@dataclass(frozen=True, eq=False)
class FoundAttention:
    """One attention of a step, and the operators that it takes the place of.

    `forward_end` makes o, `backward_ends` the gradients of `q`, `k` and `v`; None or
    empty if the step has none. Operands are tensors.
    """

    attention: Attention
    q: int
    k: int
    v: int
    d_o: int | None
    sides: tuple[int, ...]
    replaced: frozenset[int]
    forward_end: Operator | None
    backward_ends: tuple[Operator, ...]

    @property
    def source(self) -> str:
        """The user's line."""
        end = self.forward_end or self.backward_ends[0]
        return end.source


def find_attention(
    traced: TracedFunction, graph: OpGraph
) -> tuple[list[FoundAttention], list[tuple[Operator, str]]]:
    """Every attention of a graph; and products that look like one, with what is amiss.

    What looks like one is a product with dims of a batch whose rows have a maximum.
    """
    values = traced.jaxpr.consts
    inputs = graph.blocks[0].inputs[-len(values) :] if values else ()
    constants = {
        tensor: np.asarray(value)
        for tensor, value in zip(inputs, values, strict=True)
        if getattr(graph.tensors[tensor].type.dtype, "kind", "key") in "bi"
    }
    found: list[FoundAttention] = []
    refused: list[tuple[Operator, str]] = []
    types = {tensor.index: tensor.type for tensor in graph.tensors}
    whole = {t: op for op in graph.operators() for t in op.results}
    outer = {
        inner: operand
        for op in graph.operators()
        if op.kind == SCAN
        for inner, operand in zip(
            graph.blocks[op.bodies[0]].inputs[: op.params["num_consts"]],
            op.operands,
            strict=False,
        )
    }
    for block in graph.blocks:
        flow = BlockFlow.of(block, types, Origins(constants, whole, outer))
        taken: set[int] = set()
        for op in _candidates(flow, block):
            if op.index in taken:
                continue
            try:
                each = _Finder(flow, region_of(flow, op)).found()
            except NotAttention as error:
                if op.params["dimension_numbers"][1][0]:
                    refused.append((op, str(error)))
                continue
            found.append(each)
            taken |= each.replaced
    return found, refused


def _candidates(flow: BlockFlow, block: Block) -> Iterator[Operator]:
    """Products whose rows have a maximum, a few elementwise operators later."""
    for op in block.operators:
        if op.kind == "reduce_max" and len(op.params["axes"]) == 1:
            waiting, seen = [op.operands[0]], set[int]()
            while waiting and len(seen) < MOST_OPERATORS:
                tensor = waiting.pop()
                maker = None if isinstance(tensor, Constant) else flow.maker.get(tensor)
                if maker is None or maker.index in seen:
                    continue
                seen.add(maker.index)
                if maker.kind == PRODUCT:
                    yield maker
                elif maker.kind in ALLOWED and maker.kind not in REDUCTIONS:
                    waiting += maker.operands


class _Finder:
    def __init__(self, flow: BlockFlow, region: Region) -> None:
        self.flow, self.region = flow, region
        self.dims = Dims(flow, region)
        self.ends: dict[str, Operator] = {}
        self.inner: dict[str, int] = {}  # what each end reads of the region

    def found(self) -> FoundAttention:
        """The attention of the region.

        Raises:
          NotAttention: it is none.
        """
        region, flow = self.region, self.flow
        softmax_input, keys = self.softmax()
        self.classify(keys)
        owners = self.owners(keys)
        q, k, v, d_o = (
            self.operand(*owners[each]) if each in owners else None
            for each in ("q", "k", "v", "d_o")
        )
        assert q is not None and k is not None and v is not None
        names = {name: self.dims.labels(owner) for name, owner in owners.items()}
        names["o"] = names.get("o", names.get("d_o", ()))
        if names.pop("d_o", names["o"]) != names["o"]:
            raise NotAttention("its result and the cotangent are laid out unlike")
        for name in ("q", "k", "v"):
            own = names.setdefault(f"d_{name}", names[name])
            if sorted(named(own)) != sorted(named(names[name])):
                raise NotAttention("a gradient is a sum over other dims")
        raw = self.labels(region.first.results[0])
        if keys in names["o"] or not {*named(raw)} - {keys} <= {*names["o"]}:
            raise NotAttention("its result lacks a dim of the scores")
        scores, row, sides = self.scores(softmax_input, keys)
        first, types = region.first, flow.types
        o_end = self.ends.get("o")
        ends = tuple(self.ends[each] for each in _GRADIENTS if each in self.ends)
        made = [end.result_types[0] for end in ends] or [types[t] for t in (q, k, v)]
        o_type = o_end.result_types[0] if o_end else types[v if d_o is None else d_o]
        attention = Attention(
            *(names["q"], names["k"], names["v"], names["o"]),
            *(names[each] for each in _GRADIENTS),
            raw=raw,
            keys=keys,
            row=row,
            sides=tuple(labels for _, labels in sides),
            scores=scores,
            score_dtype=first.result_types[0].dtype.name,
            o_dtype=o_type.dtype.name,
            gradient_dtypes=(
                made[0].dtype.name,
                made[1].dtype.name,
                made[2].dtype.name,
            ),
            precision=first.params["precision"],
        )
        if row is not None and row not in attention.rows:
            raise NotAttention("its mask is not of its queries")
        met = tuple(tensor for tensor, _ in sides)
        start = min((flow.position[end.index] for end in ends), default=inf)
        for tensor in (q, k, v, *(() if d_o is None else (d_o,)), *met):
            if tensor in flow.maker and flow.position[flow.maker[tensor].index] > start:
                raise NotAttention("a gradient is made before its operands")
        replaced = frozenset(op.index for op in (*region.operators, *region.products))
        return FoundAttention(attention, q, k, v, d_o, met, replaced, o_end, ends)

    def owners(self, keys: int) -> dict[str, tuple[int, int]]:
        """What of which product has the dims of each operand and result."""
        first, seed = self.region.first, self.region.seed
        found: dict[str, tuple[int, int]] = {}
        found["q"], found["k"] = self.apart(first.index, keys)
        if seed is not None:
            found["d_o"], found["v"] = self.apart(seed.index, keys)
        else:
            end = self.ends["o"]
            found["v"] = end.index, 1 - self.inner_at(end)
        for name, role in (("o", "v"), ("d_q", "k"), ("d_k", "q"), ("d_v", "d_o")):
            if name not in self.ends:
                continue
            end = self.ends[name]
            other = end.index, 1 - self.inner_at(end)
            if self.operand(*other) != self.operand(*found[role]):
                raise NotAttention("a product reads something else than q, k, v")
            self.dims.join(other, found[role])
            found[name] = end.index, 2
        return found

    def apart(self, product: int, keys: int) -> list[tuple[int, int]]:
        """The operands of a product, the one with the dim `keys` last."""
        both = [(product, 0), (product, 1)]
        has_keys = [keys in self.dims.labels(each) for each in both]
        if sum(has_keys) != 1:
            raise NotAttention("queries have the dim of its keys, too")
        return both[::-1] if has_keys[0] else both

    def scores(
        self, softmax_input: int, keys: int
    ) -> tuple[Scores, int | None, list[Side]]:
        """What happens to scores; errors are those of `read_scores`."""
        region, inner = self.region, self.inner
        known = {region.first.results[0]: algebra.of(algebra.RAW)}
        weights = inner["o" if "o" in inner else "d_v"]
        if region.seed is not None:
            known[region.seed.results[0]] = algebra.of(algebra.COTANGENT)
            if inner["d_q"] != inner["d_k"] or inner["d_v"] != weights:
                raise NotAttention("its gradients are not those of one score")
        forms = ScoreForms(self.flow, region, self.dims, keys, known)
        return read_scores(forms, softmax_input, weights, inner.get("d_q"))

    def softmax(self) -> tuple[int, int]:
        """What the softmax is taken of, and over which dim of the scores."""
        region = self.region
        found = [
            op
            for op in region.operators
            if op.kind == "reduce_max" and region.of_seed.isdisjoint(op.results)
        ]
        if len(found) != 1 or len(found[0].params["axes"]) != 1:
            raise NotAttention("its rows have not one maximum")
        tensor = found[0].operands[0]
        assert isinstance(tensor, int)
        keys = self.labels(tensor)[found[0].params["axes"][0]]
        if keys is None:
            raise NotAttention("there is one key")
        return tensor, keys

    def classify(self, keys: int) -> None:
        """Which product at the end of the region is which."""
        for end in self.region.ends:
            at = self.inner_at(end)
            inner = self.operand(end.index, at)
            summed = end.params["dimension_numbers"][0][at]
            is_over_keys = keys in [self.labels(inner)[dim] for dim in summed]
            if inner in self.region.of_seed:
                name = "d_q" if is_over_keys else "d_k"
            else:
                name = "o" if is_over_keys else "d_v"
            if name in self.ends:
                raise NotAttention("several products read its scores alike")
            self.ends[name], self.inner[name] = end, inner
        wanted = {"d_q", "d_k", "d_v"} if self.region.seed else {"o"}
        if set(self.ends) - {"o"} != wanted - {"o"} or not wanted <= set(self.ends):
            raise NotAttention("some of the products that read scores are missing")

    def labels(self, tensor: int) -> Labels:
        """Those of a tensor with all dims of the scores."""
        found = self.dims.labels(tensor)
        raw = self.dims.labels(self.region.first.results[0])
        if sorted(named(found)) != sorted(named(raw)):
            raise NotAttention("its scores lose a dim")
        return found

    def inner_at(self, end: Operator) -> int:
        inside = [t in self.region.inside for t in end.operands]
        if sum(inside) != 1:
            raise NotAttention("its scores are multiplied with each other")
        return inside.index(True)

    def operand(self, product: int, at: int) -> int:
        op = next(each for each in self.region.products if each.index == product)
        operand = op.operands[at]
        if isinstance(operand, Constant):
            raise NotAttention("a literal is multiplied")
        return operand
