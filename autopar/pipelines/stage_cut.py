"""Which stage runs each operator of a microbatch, forward and backward.

Stages are cut along the forward work, in trace order, so that the slowest has as few
flops as can be and few bytes cross; scans over layers are cut by length for it first
(`scan_lengths`). The backward work follows by
*where values are available*: a forward value where it is made and where the forward
reads it, a parameter on its stage, a cotangent on its stage and below. What comes from
parameters or from the batch alone, without products, is made again where it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from textwrap import shorten

from ..graph.build_graph import SCAN
from ..graph.dependencies import leading_to, read_by, tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..graph.phases import Phases, sliced_operands
from ..rules.base import is_inexact
from .layers import ForwardOrder, heavy_flops, inseparable


@dataclass(frozen=True)
class StageCut:
    """Stages of a microbatch's operators.

    `forward`, `backward` and `weight` are the operators of each stage in executed
    order, those that are made again everywhere included where needed. `made_on` is the
    stage and phase that makes each tensor another program may read; `home` the stage
    where every parameter lives: the first that reads it. A later one (tied embeddings)
    gets a copy each step.
    """

    num_stages: int
    forward: tuple[tuple[Operator, ...], ...]
    backward: tuple[tuple[Operator, ...], ...]
    weight: tuple[tuple[Operator, ...], ...]
    made_on: dict[int, tuple[int, str]]
    home: dict[int, int]


def made_again(cut: StageCut, stage: int) -> frozenset[int]:
    """What backward makes again and the weight task of the stage reads."""
    again = {op.index for op in cut.forward[stage]}
    made = {t for op in cut.backward[stage] if op.index in again for t in op.results}
    own = {t for op in cut.weight[stage] for t in op.results}
    read = read_by(cut.weight[stage])
    return frozenset((made & set(read)) - own)


def cut_stages(
    graph: OpGraph,
    held: Iterable[int],
    num_stages: int,
    has_weight_tasks: bool = False,
    products: Sequence[int] | None = None,
) -> StageCut:
    """Cut the outermost block of a microbatch's graph into `num_stages` stages.

    `has_weight_tasks` leaves to backward what lower stages wait for, and to weight the
    rest; the first stage, which none waits for, keeps its backward whole.

    `held` are the inputs that live on a stage; the others are fed to every stage.
    `products` says how many products of the forward work each stage has, those of every
    layer of a scan apart; if left out, stages take about the same time.

    Raises:
      ValueError: fewer products than stages.
      NotImplementedError: a backward operator finds no stage that has all it reads.
    """
    cutter = _Cutter(graph, frozenset(held), num_stages)
    cutter.cut_forward(products)
    refused = cutter.place_backward()
    if refused is not None:
        fewer = next(filter(cutter.can_be_cut, range(num_stages - 1, 1, -1)), None)
        raise refused_backward(cutter, refused, fewer)
    return cutter.result(cutter.weight_tasks() if has_weight_tasks else frozenset())


def scan_lengths(
    graph: OpGraph,
    held: Iterable[int],
    num_stages: int,
    products: Sequence[int] | None = None,
) -> dict[int, tuple[int, ...]]:
    """How many layers of each scan over layers go into each of its chunks, by operator.

    Such a scan does products with slices of what lives on stages; it is cut where
    stages begin, as if its layers were written one after the other. Scans that lie in
    one stage are left out.

    Raises:
      ValueError: fewer products than stages, with those of every layer counted.
    """
    if not any(op.kind == SCAN for op in graph.blocks[0].operators):
        return {}
    order = forward_order(graph, held)
    inside: dict[int, list[int]] = {}
    for border in order.borders(num_stages, products):
        op, layer = order.units[border]
        if layer > 0:
            inside.setdefault(op.index, []).append(layer)
    chunks: dict[int, tuple[int, ...]] = {}
    for op in graph.blocks[0].operators:
        if op.index in inside:
            ends = [0, *inside[op.index], op.params["length"]]
            lengths = [last - first for first, last in pairwise(ends)]
            is_reversed = op.params["reverse"]  # the last layers come first
            chunks[op.index] = tuple(reversed(lengths) if is_reversed else lengths)
    return chunks


def forward_order(graph: OpGraph, held: Iterable[int]) -> ForwardOrder:
    """The forward operators of a step, or of a microbatch, that stages are cut along.

    Scans over layers are written out.
    """
    return _Cutter(graph, frozenset(held), 1).order(True)


class _Cutter:
    """Places operators on stages: `stage` by operator, `floating` where read.

    `available` are the stages that have a forward value, by tensor, `cotangent` the one
    that makes a cotangent.
    """

    def __init__(self, graph: OpGraph, held: frozenset[int], num_stages: int) -> None:
        self.graph, self.held, self.num_stages = graph, held, num_stages
        self.operators = graph.blocks[0].operators
        self.made_by = {t: op for op in self.operators for t in op.results}
        self.flops = {op.index: heavy_flops(graph, op) for op in self.operators}
        phases = Phases.of(graph.blocks[0])
        self.backward = {op.index for op in (*phases.backward, *phases.after)}
        self.stage: dict[int, int] = {}
        self.floating: set[int] = set()
        self.available: dict[int, frozenset[int]] = {}
        self.cotangent: dict[int, int] = {}
        self.home: dict[int, int] = {}
        self.from_held, from_fed = set(held), set(graph.blocks[0].inputs) - held
        for op in self.operators:
            reads = tensors_of(op.operands)
            is_held = not self.from_held.isdisjoint(reads)
            is_fed = not from_fed.isdisjoint(reads)
            self.from_held.update(op.results if is_held else ())
            from_fed.update(op.results if is_fed else ())
            is_made_again = not (is_held and is_fed) and self.flops[op.index] == 0
            if is_made_again and op.index not in self.backward:
                self.floating.add(op.index)
        self.from_held -= from_fed

    def order(self, has_layers: bool) -> ForwardOrder:
        """The forward operators in trace order; `has_layers` writes out scans."""
        work = [
            op
            for op in self.operators
            if op.index not in self.backward and op.index not in self.floating
        ]
        crossing = self.live_bytes(work)
        backward = [op for op in self.operators if op.index in self.backward]
        for first, last in inseparable(work, backward, self._sources):
            crossing[first + 1 : last + 1] = [float("inf")] * (last - first)
        costs, live, units = [], [], []
        for op, moved in zip(work, crossing, strict=True):
            is_written_out = has_layers and self.is_over_layers(op)
            number = op.params["length"] if is_written_out else 1
            costs.extend([self.flops[op.index] / number] * number)
            live.extend([moved] * number)
            units.extend((op, layer) for layer in range(number))
        return ForwardOrder(tuple(units), tuple(costs), tuple(live))

    def is_over_layers(self, op: Operator) -> bool:
        """Whether a scan slices parameters, or what is made of nothing else."""
        if op.kind != SCAN or self.flops[op.index] == 0 or op.params["length"] == 1:
            return False
        return any(
            t in self.from_held and is_inexact(self.graph.tensors[t].type)
            for t in tensors_of(sliced_operands(op))
        )

    def live_bytes(self, work: Sequence[Operator]) -> list[float]:
        """Bytes made before each position of `work` and read from there on."""
        made = {t: i for i, op in enumerate(work) for t in op.results}
        last = {
            tensor: position
            for position, op in enumerate(work)
            for tensor in self._sources(op)
            if tensor in made
        }
        change = [0.0] * (len(work) + 2)
        for tensor, position in last.items():
            size = self.graph.tensors[tensor].type.bytes
            change[made[tensor] + 1] += size
            change[position + 1] -= size
        return list(accumulate(change[: len(work)]))

    def cut_forward(self, products: Sequence[int] | None) -> None:
        """Contiguous parts of the forward work in trace order."""
        order = self.order(products is not None)
        borders = order.borders(self.num_stages, products)
        assert all(order.units[p][1] == 0 for p in borders), "a scan is cut elsewhere"
        for stage, (first, end) in enumerate(pairwise([0, *borders, len(order.units)])):
            self.stage.update((op.index, stage) for op, _ in order.units[first:end])
        every = frozenset(range(self.num_stages))
        for tensor in self.graph.blocks[0].inputs:
            self.available[tensor] = frozenset() if tensor in self.held else every
        for op, _ in order.units:
            here = frozenset({self.stage[op.index]})
            for tensor in (*self._sources(op), *op.results):
                self.available[tensor] = self.available.get(tensor, frozenset()) | here
        for tensor in self.held:
            if self.available[tensor]:
                self.home[tensor] = min(self.available[tensor])
            else:  # read by backward alone, if at all: at home where it is first read
                self.available[tensor] = every

    def _sources(self, op: Operator) -> set[int]:
        """What an operator reads, through the operators that are made where read."""
        found: set[int] = set()
        waiting = tensors_of(op.operands)
        while waiting:
            tensor = waiting.pop()
            maker = self.made_by.get(tensor)
            if maker is not None and maker.index in self.floating:
                waiting.extend(tensors_of(maker.operands))
            else:
                found.add(tensor)
        return found

    def can_be_cut(self, num_stages: int) -> bool:
        """Whether the same graph can be cut into so many stages."""
        cutter = _Cutter(self.graph, self.held, num_stages)
        try:
            cutter.cut_forward(None)
        except ValueError:  # fewer products
            return False
        return cutter.place_backward() is None

    def place_backward(self) -> Operator | None:
        """Places backward work; the first operator that finds no stage, if one does."""
        for op in self.operators:
            if op.index not in self.backward:
                continue
            fitting, below = self.stages_of(op)
            if not fitting:
                return op
            if not below and len(fitting) > 1 and self.flops[op.index] == 0:
                self.floating.add(op.index)
                continue
            stage = self.stage[op.index] = max(fitting)
            self.cotangent.update(dict.fromkeys(op.results, stage))
            for tensor in self.held.intersection(self._sources(op)):
                self.home[tensor] = min(self.home.get(tensor, stage), stage)
        return None

    def readable(self, op: Operator) -> dict[int, Sequence[int]]:
        """The stages that have each value which a backward operator reads.

        A cotangent may be read where it is made and below.
        """
        made = self.cotangent
        return {
            t: range(made[t] + 1) if t in made else sorted(self.available[t])
            for t in self._sources(op)
        }

    def stages_of(self, op: Operator) -> tuple[list[int], list[int]]:
        """Where a backward operator may be, and the stages of the cotangents it reads.

        It is not above its cotangents.
        """
        sources = self._sources(op)
        stages = frozenset(range(self.num_stages))
        for tensor in sources:
            if tensor not in self.cotangent:
                stages &= self.available[tensor]
        below = [self.cotangent[t] for t in sources if t in self.cotangent]
        highest = min(below, default=self.num_stages)
        return [stage for stage in stages if stage <= highest], below

    def weight_tasks(self) -> frozenset[int]:
        """The backward operators that no lower stage waits for."""
        placed = [
            op
            for op in self.operators
            if op.index in self.backward and op.index in self.stage
        ]
        awaited = {op.index for op in placed if self.stage[op.index] == 0}
        for op in reversed(placed):
            if op.index in awaited:
                makers = (self.made_by.get(tensor) for tensor in self._sources(op))
                awaited.update(maker.index for maker in makers if maker is not None)
        return frozenset(op.index for op in placed if op.index not in awaited)

    def result(self, weight: frozenset[int]) -> StageCut:
        made_on: dict[int, tuple[int, str]] = {}
        own: dict[tuple[int, str], list[Operator]] = {}
        for op in self.operators:
            if op.index in self.stage:
                is_backward = op.index in self.backward
                phase = "backward" if is_backward else "forward"
                phase = "weight" if op.index in weight else phase
                key = self.stage[op.index], phase
                own.setdefault(key, []).append(op)
                made_on.update(dict.fromkeys(op.results, key))

        def tasks(phase: str) -> tuple[tuple[Operator, ...], ...]:
            stages = range(self.num_stages)
            return tuple(self.with_floating(own.get((s, phase), ())) for s in stages)

        phases = tasks("forward"), tasks("backward"), tasks("weight")
        return StageCut(self.num_stages, *phases, made_on, self.home)

    def with_floating(self, own: Sequence[Operator]) -> tuple[Operator, ...]:
        """The operators and all they need that is made where it is read, in order."""
        floating = [op for op in self.operators if op.index in self.floating]
        needed = {op.index for op in (*own, *leading_to(read_by(own), floating))}
        return tuple(op for op in self.operators if op.index in needed)


def refused_backward(
    cutter: _Cutter, op: Operator, fewer: int | None
) -> NotImplementedError:
    """No stage has all that a backward operator reads: what it reads lies apart."""
    remedy = f"num_stages={fewer}, into which it can be cut, or " if fewer else ""
    read = "; ".join(
        f"{cutter.graph.tensors[t].name} of stages {[*stages]}"
        for t, stages in cutter.readable(op).items()
        if len(stages) < cutter.num_stages
    )
    return NotImplementedError(
        f"Backward work goes from the last stage to the first, each operator on a "
        f"stage that has all it reads, but in a cut into {cutter.num_stages} stages "
        f"{op.name!r} at {op.source or 'an unknown line'} reads {shorten(read, 300)}, "
        f"as derivatives of derivatives and passes behind an update do; use "
        f"{remedy}autopar.ShardParallel(). Two passes with an update between them "
        f"can be two steps."
    )
