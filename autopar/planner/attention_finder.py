"""Attention in a graph: which operators it is, forward and backward, and what it does.

Nothing hangs on how it is written: f and g of `rules/attention_spec.py` are what the
step does to its scores before and after a softmax, and whether that is so, and whether
the backward pass is the gradient of it, is tried out on random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..graph.op_graph import Block, Constant, Operator, OpGraph
from ..rules.attention_spec import Attention, named
from ..rules.score_programs import Labels
from .attention_check import weights_of_softmax
from .score_programs_of import ProgramBuilder
from .score_regions import PRODUCT, BlockFlow, Dims, NotAttention, Region, region_of


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
    graph: OpGraph,
) -> tuple[list[FoundAttention], list[tuple[Operator, str]]]:
    """Every attention of a graph; and products that look like one, with what is amiss.

    What looks like one is a product with dims of a batch whose rows have a maximum.
    """
    found: list[FoundAttention] = []
    refused: list[tuple[Operator, str]] = []
    types = {tensor.index: tensor.type for tensor in graph.tensors}
    for block in graph.blocks:
        flow = BlockFlow.of(block, types)
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
            tensor = op.operands[0]
            for _ in range(24):
                maker = None if isinstance(tensor, Constant) else flow.maker.get(tensor)
                if maker is None:
                    break
                if maker.kind == PRODUCT:
                    yield maker
                    break
                shape = op.operand_types[0].size
                big = [
                    o
                    for o, kind in zip(maker.operands, maker.operand_types, strict=True)
                    if kind.size == shape and not isinstance(o, Constant)
                ]
                if not big:
                    break
                tensor = big[-1]  # a mask comes first


@dataclass(frozen=True, eq=False)
class _Named:
    """A tensor and the labels of its dims."""

    tensor: int
    names: Labels


def _operand_labels(op: Operator, result: Labels, summed: int) -> tuple[Labels, Labels]:
    """Of a product's operands, from those of its result.

    Dims that are summed over get labels from `summed` on.
    """
    ((left_sum, right_sum), (left_batch, right_batch)) = op.params["dimension_numbers"]
    names = iter(result)
    batch = [next(names) for _ in left_batch]
    labels = []
    for kind, sums, batches in (
        (op.operand_types[0], left_sum, left_batch),
        (op.operand_types[1], right_sum, right_batch),
    ):
        found: dict[int, int | None] = dict(zip(batches, batch, strict=True))
        for i, dim in enumerate(sums):
            found[dim] = summed + i if kind.shape[dim] > 1 else None
        for dim in range(kind.rank):
            if dim not in found:
                found[dim] = next(names)
        labels.append(tuple(found[dim] for dim in range(kind.rank)))
    return labels[0], labels[1]


def _result_labels(op: Operator, left: Labels, right: Labels) -> Labels:
    """Of a product of operands with these labels.

    Raises:
      NotAttention: dims that do not belong together meet.
    """
    ((left_sum, right_sum), (left_batch, right_batch)) = op.params["dimension_numbers"]
    pairs = [
        *zip(left_sum, right_sum, strict=True),
        *zip(left_batch, right_batch, strict=True),
    ]
    if any(left[i] != right[j] for i, j in pairs):
        raise NotAttention("a product pairs other dims of it")
    free_left = (n for i, n in enumerate(left) if i not in (*left_sum, *left_batch))
    free_right = (n for j, n in enumerate(right) if j not in (*right_sum, *right_batch))
    return (*(left[i] for i in left_batch), *free_left, *free_right)


class _Finder:
    def __init__(self, flow: BlockFlow, region: Region) -> None:
        self.flow, self.region = flow, region
        self.dims = Dims(flow, region)
        self.raw: Labels = self.dims.labels(region.first.results[0])
        self.rank = len(self.raw)
        self.ends: dict[str, Operator] = {}
        self.inner: dict[str, int] = {}  # what each end reads of the region

    def found(self) -> FoundAttention:
        """The attention of the region.

        Raises:
          NotAttention: it is none.
        """
        softmax_input, keys = self.softmax()
        self.classify(keys)
        q, k = self.first_operands(keys)
        next_label = 1 + max((*named(q.names), *named(k.names)))
        v, d_o = self.value_operands(keys, next_label)
        weights = self.inner["o" if "o" in self.ends else "d_v"]
        if "o" in self.ends:
            made = self.result("o", v)
            if d_o is not None and d_o.names != made:
                raise NotAttention("its result and the cotangent are laid out unlike")
        else:
            assert d_o is not None
            made = d_o.names
        gradients = {"d_q": q.names, "d_k": k.names, "d_v": v.names}
        if d_o is not None:
            for name, by in (("d_q", k), ("d_k", q), ("d_v", d_o)):
                result = self.result(name, by)
                if sorted(named(result)) != sorted(named(gradients[name])):
                    raise NotAttention("a gradient is a sum over other dims")
                gradients[name] = result
            if self.inner["d_q"] != self.inner["d_k"] or self.inner["d_v"] != weights:
                raise NotAttention("its gradients are not those of one score")
        names = {"q": q.names, "k": k.names, "v": v.names, "o": made, **gradients}
        tensors = (q.tensor, k.tensor, v.tensor, d_o.tensor if d_o else None)
        return self.spec(softmax_input, keys, weights, tensors, names)

    def first_operands(self, keys: int) -> tuple[_Named, _Named]:
        """Queries and keys."""
        k, q = self.both(self.region.first, self.raw, self.rank)
        if keys in q.names:
            q, k = k, q
        if keys in q.names or keys not in k.names:
            raise NotAttention("queries have the dim of its keys, too")
        return q, k

    def value_operands(
        self, keys: int, next_label: int
    ) -> tuple[_Named, _Named | None]:
        """Values, and the cotangent of the result."""
        seed = self.region.seed
        if seed is not None:
            d_o, v = self.both(seed, self.labels(seed.results[0]), next_label)
            return (v, d_o) if keys in v.names else (d_o, v)
        end = self.ends["o"]
        v = self.operand(end, 1 - self.inner_at(end))
        return _Named(v, self.values_names(end, next_label)), None

    def both(self, op: Operator, result: Labels, summed: int) -> tuple[_Named, _Named]:
        """Both operands of a product, from the labels of its result."""
        left, right = _operand_labels(op, result, summed)
        return (
            _Named(self.operand(op, 0), left),
            _Named(self.operand(op, 1), right),
        )

    def spec(
        self,
        softmax_input: int,
        keys: int,
        weights: int,
        tensors: tuple[int, int, int, int | None],
        names: dict[str, Labels],
    ) -> FoundAttention:
        """What was found, if it is what it looks like.

        `tensors` are q, k, v and the cotangent of the result.
        """
        region, flow = self.region, self.flow
        q, k, v, d_o = tensors
        first, seed, types = region.first, region.seed, self.flow.types
        builder = ProgramBuilder(flow, region, self.dims)
        gradient = self.inner.get("d_q")
        softmax, softmax_input = weights_of_softmax(
            builder, softmax_input, weights, gradient, self.labels, keys
        )
        scores = self.labels(softmax)
        if named(scores)[-1] != keys:
            raise NotAttention("its softmax is over another dim than the last")
        statistics = {*named(scores)} - {keys}
        if not statistics <= {*names["o"]} or keys in names["o"]:
            raise NotAttention("its result lacks a dim of the scores")
        raw = first.results[0]
        f = builder.steps(raw, softmax_input)
        g = builder.steps(softmax, weights)
        sides = tuple(dict.fromkeys((*builder.sides_of(f), *builder.sides_of(g))))
        ends = tuple(self.ends[each] for each in ("d_q", "d_k", "d_v") if seed)
        o_end = self.ends.get("o")
        made = [types[end.results[0]].dtype.name for end in ends]
        o_type = types[o_end.results[0]] if o_end else types[v if d_o is None else d_o]
        attention = Attention(
            **names,
            raw=self.raw,
            scores=scores,
            weights=self.labels(weights),
            sides=tuple(builder.labels_of(side) for side in sides),
            f=builder.program(f, raw, softmax_input, sides),
            g=builder.program(g, softmax, weights, sides),
            score_dtype=first.result_types[0].dtype.name,
            o_dtype=o_type.dtype.name,
            gradient_dtypes=(
                *(made or [types[each].dtype.name for each in (q, k, v)]),
            ),
            precision=first.params["precision"],
        )
        if seed is not None:
            start = min(flow.position[end.index] for end in ends)
            for tensor in (*tensors, *sides):
                maker = None if tensor is None else flow.maker.get(tensor)
                if maker is not None and flow.position[maker.index] > start:
                    raise NotAttention("a gradient is made before its operands")
        replaced = {op.index for op in (*region.operators, first, *region.ends)}
        if seed is not None:
            replaced.add(seed.index)
        return FoundAttention(
            attention, q, k, v, d_o, sides, frozenset(replaced), o_end, ends
        )

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
            inner = self.operand(end, at)
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
        if sorted(named(found)) != sorted(named(self.raw)):
            raise NotAttention("its scores lose a dim")
        return found

    def inner_at(self, end: Operator) -> int:
        inside = [t in self.region.inside for t in end.operands]
        if sum(inside) != 1:
            raise NotAttention("its scores are multiplied with each other")
        return inside.index(True)

    def operand(self, op: Operator, at: int) -> int:
        operand = op.operands[at]
        if isinstance(operand, Constant):
            raise NotAttention("a literal is multiplied")
        return operand

    def values_names(self, end: Operator, next_label: int) -> Labels:
        """Labels of the values that a product of weights reads."""
        at = self.inner_at(end)
        inner = self.labels(self.operand(end, at))
        sums, batches = end.params["dimension_numbers"]
        found = {
            dim: inner[i]
            for pairs in (sums, batches)
            for i, dim in zip(pairs[at], pairs[1 - at], strict=True)
        }
        shape = end.operand_types[1 - at].shape
        for dim, size in enumerate(shape):
            if dim not in found:
                found[dim] = next_label if size > 1 else None
                next_label += 1
        return tuple(found[dim] for dim in range(len(shape)))

    def result(self, name: str, by: _Named) -> Labels:
        """Labels of what the product `name` at the end of the region makes."""
        end = self.ends[name]
        at = self.inner_at(end)
        if self.operand(end, 1 - at) != by.tensor:
            raise NotAttention("a product reads something else than q, k, v")
        both = (self.labels(self.inner[name]), by.names)
        return _result_labels(end, *(both if at == 0 else both[::-1]))
