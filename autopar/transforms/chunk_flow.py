"""Which values of a step come in chunks when its scans over layers are cut by length.

A scan of 12 layers that is cut into [4, 8] reads its stacked inputs in two chunks and
stacks its results in two. From there chunks spread by the same rules that split
operators over devices: elementwise work, casts, reductions, broadcasts run chunk by
chunk, on whatever dim the layers lie. What has no such form reads the whole, and so
does what reads forward values of the batch, which several scans may stack.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..graph.build_graph import BARRIER, PINS, SCAN, STRUCTURED
from ..graph.dependencies import made_from, tensors_of
from ..graph.op_graph import Block, Constant, Operand, Operator, OpGraph, is_zero
from ..graph.phases import Phases, sliced_operands, stacked_results
from ..graph.work import is_heavy_operator
from ..microbatches.microbatch_flow import keeps, num_cut
from ..rules.base import Factor, cuts_evenly, factors_of
from ..sharding.spec import MAX, MIN, REPLICATED, SUM

PASSING = (BARRIER, *PINS)  # results are the operands
_JOINED = (SUM, MAX, MIN)


@dataclass(frozen=True)
class Cut:
    """A tensor in chunks along `dim`: `lengths[k]` layers are in chunk k."""

    dim: int
    lengths: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return sum(self.lengths)

    def borders(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each chunk and the first behind it."""
        ends = [sum(self.lengths[: k + 1]) for k in range(len(self.lengths))]
        return tuple(
            (end - length, end) for end, length in zip(ends, self.lengths, strict=True)
        )


@dataclass
class ChunkFlow:
    """Cuts of the tensors of the outermost block, found by walks until none changes.

    `lengths` are those of the scans over layers, by operator; `fixed` are inputs that
    stay whole: those of an initialiser, or of a step (`is_step`) the batch, and then
    `examples` are what the forward pass makes of it. A reader that needs a value in
    chunks asks whoever makes it, back to the inputs, so that a parameter, its cast and
    its moments are cut alike.
    """

    graph: OpGraph
    lengths: Mapping[int, tuple[int, ...]]
    fixed: frozenset[int]
    cut: dict[int, Cut] = field(default_factory=dict)  # by tensor
    factor: dict[int, Factor] = field(default_factory=dict)  # by operator
    operator_lengths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    wanted: dict[int, Cut] = field(default_factory=dict)  # by tensor
    scans: list[Operator] = field(default_factory=list[Operator])  # as visited
    is_step: bool = True

    def __post_init__(self) -> None:
        operators = self.graph.blocks[0].operators
        self.made = {t for op in operators for t in op.results}
        forward = Phases.of(self.graph.blocks[0]).forward
        self.examples = made_from(self.fixed if self.is_step else (), forward)

    def run(self) -> None:
        inputs = self.graph.blocks[0].inputs
        num_wanted = -1
        while len(self.wanted) > num_wanted:
            num_wanted = len(self.wanted)
            self.cut = {t: self.wanted[t] for t in inputs if t in self.wanted}
            self.factor, self.operator_lengths, self.scans = {}, {}, []
            for op in self.graph.blocks[0].operators:
                self.visit(op)
            self.tie_state()

    def visit(self, op: Operator) -> None:
        if op.kind == SCAN:
            self.visit_scan(op)
        elif op.kind in PASSING:
            for operand, result in zip(op.operands, op.results, strict=True):
                if isinstance(operand, int) and operand in self.cut:
                    self.cut[result] = self.cut[operand]
                elif result in self.wanted:
                    self.want(operand, self.wanted[result])
        elif op.kind not in STRUCTURED and not self.reads_examples(op):
            lengths = self.lengths_at(op)
            factor = self.match(op, lengths) if lengths else None
            if lengths and factor:
                self.take(op, factor, lengths)

    def reads_examples(self, op: Operator) -> bool:
        """Whether an operator reads forward values of the batch: these it reads whole.

        Forward and backward then read them alike, on the stage of the forward operator.
        """
        return not self.examples.isdisjoint(tensors_of(op.operands))

    def lengths_at(self, op: Operator) -> tuple[int, ...] | None:
        """How an operator's operands are cut, or how a reader wants its result."""
        known = [self.cut[t] for t in tensors_of(op.operands) if t in self.cut]
        known.extend(self.wanted[t] for t in op.results if t in self.wanted)
        return known[0].lengths if known else None

    def match(self, op: Operator, lengths: tuple[int, ...]) -> Factor | None:
        """The factor that keeps all chunks; whole operands can be cut for it."""
        if op.kind == "conv_general_dilated":
            return None  # its groups are dealt out in equal parts only
        cuts = map(self.cut_of, op.operands)
        has = [c.dim if c and c.lengths == lengths else REPLICATED for c in cuts]
        is_cut = any(state >= 0 for state in has)
        wanted = map(self.wanted.get, op.results)
        asked = [cut.dim if cut else REPLICATED for cut in wanted]
        found = [
            factor
            for factor in factors_of(op)
            if self.is_chunkwise(op, factor, sum(lengths))
            and keeps(has, factor.operands)
            and (is_cut or keeps(asked, factor.results))
        ]

        def num_changed(factor: Factor) -> tuple[int, int]:
            """How many whole operands it needs cut, and how many results it joins."""
            num_joined = sum(state < 0 for state in factor.results)
            return num_cut(has, factor.operands), num_joined

        return min(found, key=num_changed, default=None)

    def is_chunkwise(self, op: Operator, factor: Factor, num_layers: int) -> bool:
        """Whether a factor may be cut between any two of `num_layers`."""
        return (
            any(state >= 0 for state in (*factor.operands, *factor.results))
            and factor.size % num_layers == 0
            and not factor.halos
            and all(state >= REPLICATED for state in factor.operands)
            and all(state >= 0 or state in _JOINED for state in factor.results)
            and cuts_evenly(op, factor, num_layers)
        )

    def take(self, op: Operator, factor: Factor, lengths: tuple[int, ...]) -> None:
        """The operator runs chunk by chunk."""
        self.factor[op.index] = factor
        self.operator_lengths[op.index] = lengths
        for operand, state in zip(op.operands, factor.operands, strict=True):
            if state >= 0:
                self.want(operand, Cut(state, lengths))
        for result, state in zip(op.results, factor.results, strict=True):
            if state >= 0:
                self.cut[result] = Cut(state, lengths)

    def visit_scan(self, op: Operator) -> None:
        slices = sliced_operands(op)
        lengths = self.lengths_of(op, slices)
        self.scans.append(op)
        if lengths is None:
            return
        self.operator_lengths[op.index] = lengths
        for operand in slices:
            self.want(operand, Cut(0, lengths))
        for result in stacked_results(op):
            self.cut[result] = Cut(0, lengths)

    def lengths_of(
        self, op: Operator, slices: Sequence[Operand]
    ) -> tuple[int, ...] | None:
        """The chunks of a scan: its own, or those of the scan that it differentiates.

        That is the last of those it shares most slices with: what a scan slices and
        stacks is what its backward pass reads, besides cotangents.
        """
        if op.index in self.lengths:
            return self.lengths[op.index]
        cuts = [cut for cut in map(self.cut_of, slices) if cut and cut.dim == 0]
        known = [cut.lengths for cut in cuts if cut.num_layers == op.params["length"]]
        if not known or not self.examples.isdisjoint(op.results):
            return None
        read = set(tensors_of(slices))

        def num_shared(scan: Operator) -> int:
            values = (*sliced_operands(scan), *stacked_results(scan))
            return len(read.intersection(tensors_of(values)))

        nearest = max(reversed(self.scans), key=num_shared, default=None)
        if nearest is None or num_shared(nearest) == 0:
            return known[0]
        return self.operator_lengths.get(nearest.index)

    def want(self, operand: Operand, cut: Cut) -> None:
        """A reader would have `operand` in chunks; the next walk may make it so."""
        if isinstance(operand, Constant) or operand in self.cut:
            return
        kind = self.graph.tensors[operand].type
        if operand not in self.made and (
            operand in self.fixed or cut.dim != 0 or kind.is_extended
        ):
            return
        self.wanted.setdefault(operand, cut)

    def tie_state(self) -> None:
        """The next value of a leaf comes in the chunks that the leaf is taken in."""
        for graph_input in self.graph.inputs:
            if graph_input.output is None:
                continue
            after = self.graph.outputs[graph_input.output]
            before, cut = self.cut_of(graph_input.tensor), self.cut_of(after)
            if before is not None:
                self.want(after, before)
            elif cut is not None and cut.dim == 0:
                self.want(graph_input.tensor, cut)

    def cut_of(self, operand: Operand) -> Cut | None:
        return self.cut.get(operand) if isinstance(operand, int) else None


def accumulating_carries(graph: OpGraph, op: Operator) -> frozenset[int]:
    """Carries of a scan that start at zero and that an iteration only adds to.

    Each chunk of the scan may start such a sum at zero, and the sums are added.
    """
    made_by = {t: o for o in graph.blocks[op.block].operators for t in o.results}
    body = graph.blocks[op.bodies[0]]
    first = op.params["num_consts"]
    return frozenset(
        i
        for i in range(op.params["num_carry"])
        if _starts_at_zero(op.operands[first + i], made_by)
        and _is_added_to(body.inputs[first + i], i, op, graph)
    )


def _starts_at_zero(operand: Operand, made_by: Mapping[int, Operator]) -> bool:
    maker = made_by.get(operand) if isinstance(operand, int) else None
    if maker is not None and maker.kind == "broadcast_in_dim":
        return is_zero(maker.operands[0])
    return is_zero(operand)


def _is_added_to(tensor: int, carry: int, op: Operator, graph: OpGraph) -> bool:
    """Whether a carry reaches its next value through sums, and nothing else."""
    body = graph.blocks[op.bodies[0]]
    while True:
        readers = [o for o in body.operators for t in o.operands if t == tensor]
        returned = [i for i, t in enumerate(body.outputs) if t == tensor]
        if not readers:
            return returned == [carry]
        if returned or len(readers) > 1 or readers[0].kind not in ("add", "add_any"):
            return False
        (tensor,) = readers[0].results


def unchanged_carries(graph: OpGraph, op: Operator) -> frozenset[int]:
    """Carries that every iteration hands on as they are."""
    body, first = graph.blocks[op.bodies[0]], op.params["num_consts"]
    return frozenset(
        i
        for i in range(op.params["num_carry"])
        if body.outputs[i] == body.inputs[first + i]
    )


def light_makers(body: Block, slices: Collection[int]) -> dict[int, Operator]:
    """Operators of a body that are no products and read its `slices` alone, by result.

    In executed order; what they make of a slice does not depend on other iterations.
    """
    known, makers = set(slices), {}
    for op in body.operators:
        is_light = op.kind not in STRUCTURED and not is_heavy_operator(op)
        if (
            is_light
            and op.kind != "random_bits"
            and known.issuperset(tensors_of(op.operands))
        ):
            known.update(op.results)
            makers.update(dict.fromkeys(op.results, op))
    return makers
