"""Which stage runs each operator of a microbatch, forward and backward.

Stages are cut along the forward work, in trace order, so that the slowest has as few
flops as can be and few bytes cross; scans over layers are cut by length for it first
(`scan_lengths`). The backward work follows by
*where values are available*: a forward value where it is made and where the forward
reads it, a parameter on its stage, a cotangent on its stage and below. What comes from
parameters or from the batch alone, without products, is made again where it is read;
so is what backward alone reads, without products, where no stage has it at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from ..graph.build_graph import SCAN
from ..graph.dependencies import read_by, tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..rules.base import is_inexact
from .layers import WorkLine, heavy_flops, inseparable


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
    cutter.place_backward()
    if has_weight_tasks:
        cutter.split_backward()
    return cutter.result()


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
    cutter = _Cutter(graph, frozenset(held), num_stages)
    work = cutter.forward_work()
    line = cutter.work_line()
    chunks: dict[int, tuple[int, ...]] = {}
    inside: dict[int, list[int]] = {}
    for border in line.borders(num_stages, products):
        op, layer = line.units[border]
        if layer > 0:
            inside.setdefault(op.index, []).append(layer)
    for op in work:
        if op.index in inside:
            ends = [0, *inside[op.index], op.params["length"]]
            lengths = [last - first for first, last in pairwise(ends)]
            is_reversed = op.params["reverse"]  # the last layers come first
            chunks[op.index] = tuple(reversed(lengths) if is_reversed else lengths)
    return chunks


def work_line(graph: OpGraph, held: Iterable[int]) -> WorkLine:
    """The forward work of a step, or of a microbatch, that stages are cut along."""
    return _Cutter(graph, frozenset(held), 1).work_line()


@dataclass
class _Cutter:
    graph: OpGraph
    held: frozenset[int]
    num_stages: int
    stage: dict[int, int] = field(default_factory=dict)  # by operator
    floating: set[int] = field(default_factory=set)  # operators made where read
    backward: set[int] = field(default_factory=set)  # operators
    weight: set[int] = field(default_factory=set)  # operators of backward that can wait
    made_by: dict[int, Operator] = field(default_factory=dict)
    available: dict[int, frozenset[int]] = field(default_factory=dict)
    cotangent: dict[int, int] = field(default_factory=dict)  # stage by tensor
    home: dict[int, int] = field(default_factory=dict)
    from_held: dict[int, bool] = field(default_factory=dict)  # by tensor
    from_fed: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operators = self.graph.blocks[0].operators
        from_held, from_fed = self.from_held, self.from_fed
        for tensor in self.graph.blocks[0].inputs:
            from_held[tensor] = tensor in self.held
            from_fed[tensor] = tensor not in self.held
        for op in self.operators:
            reads = tensors_of(op.operands)
            makers = [self.made_by[t] for t in reads if t in self.made_by]
            is_backward = "transpose(" in op.name or any(
                maker.index in self.backward for maker in makers
            )
            held = any(from_held[t] for t in reads)
            fed = any(from_fed[t] for t in reads)
            if is_backward:
                self.backward.add(op.index)
            elif not (held and fed) and heavy_flops(self.graph, op) == 0:
                self.floating.add(op.index)
            for result in op.results:
                self.made_by[result] = op
                from_held[result], from_fed[result] = held, fed

    def forward_work(self) -> list[Operator]:
        """What stages are cut along, in trace order."""
        return [
            op
            for op in self.operators
            if op.index not in self.backward and op.index not in self.floating
        ]

    def costs(self, work: Sequence[Operator]) -> list[float]:
        return [heavy_flops(self.graph, op) for op in work]

    def is_over_layers(self, op: Operator) -> bool:
        """Whether a scan slices parameters, or what is made of nothing else."""
        if op.kind != SCAN or heavy_flops(self.graph, op) == 0:
            return False
        slices = op.operands[op.params["num_consts"] + op.params["num_carry"] :]
        return op.params["length"] > 1 and any(
            self.from_held[t]
            and not self.from_fed[t]
            and is_inexact(self.graph.tensors[t].type)
            for t in tensors_of(slices)
        )

    def work_line(self) -> WorkLine:
        """The forward work, scans over layers written out."""
        work = self.forward_work()
        costs, live, units = [], [], []
        crossing = self.crossing_bytes(work)
        for op, cost, moved in zip(work, self.costs(work), crossing, strict=True):
            number = op.params["length"] if self.is_over_layers(op) else 1
            costs.extend([cost / number] * number)
            live.extend([moved] * number)
            units.extend((op, layer) for layer in range(number))
        return WorkLine(tuple(units), tuple(costs), tuple(live))

    def crossing_bytes(self, work: Sequence[Operator]) -> list[float]:
        """What a border before each position moves; infinite where none may lie."""
        crossing = self.live_bytes(work)[:-1]
        backward = [op for op in self.operators if op.index in self.backward]
        for first, last in inseparable(work, backward, self._sources):
            crossing[first + 1 : last + 1] = [float("inf")] * (last - first)
        return crossing

    def cut_forward(self, products: Sequence[int] | None = None) -> None:
        """Contiguous parts of the forward work in trace order."""
        work = self.forward_work()
        if products is None:
            line = WorkLine(
                tuple((op, 0) for op in work),
                tuple(self.costs(work)),
                tuple(self.crossing_bytes(work)),
            )
            borders = line.borders(self.num_stages, None)
        else:
            borders = self.chunk_borders(work, products)
        for stage, (first, last) in enumerate(
            zip([0, *borders], [*borders, len(work)], strict=True)
        ):
            for op in work[first:last]:
                self.stage[op.index] = stage
        every = frozenset(range(self.num_stages))
        for tensor in self.graph.blocks[0].inputs:
            self.available[tensor] = frozenset() if tensor in self.held else every
        for op in work:
            for tensor in self._sources(op):
                here = self.available.get(tensor, frozenset())
                self.available[tensor] = here | {self.stage[op.index]}
            for result in op.results:
                here = self.available.get(result, frozenset())
                self.available[result] = here | {self.stage[op.index]}
        for tensor in self.held:
            if self.available[tensor]:
                self.home[tensor] = min(self.available[tensor])
            else:  # read by backward alone, if at all: at home where it is first read
                self.available[tensor] = every

    def chunk_borders(
        self, work: Sequence[Operator], products: Sequence[int]
    ) -> list[int]:
        """Positions of stages' first operators where scans are cut by length."""
        line = self.work_line()
        position = {op.index: i for i, op in enumerate(work)}
        found = []
        for border in line.borders(self.num_stages, products):
            op, layer = line.units[border]
            assert layer == 0, f"the scan {op.name} is cut elsewhere"
            found.append(position[op.index])
        return found

    def live_bytes(self, work: Sequence[Operator]) -> list[float]:
        """Bytes made before each position of `work` and read from there on."""
        made = {t: i for i, op in enumerate(work) for t in op.results}
        last: dict[int, int] = {}
        for i, op in enumerate(work):
            for tensor in self._sources(op):
                if tensor in made:
                    last[tensor] = i
        change = [0.0] * (len(work) + 2)
        for tensor, position in last.items():
            size = self.graph.tensors[tensor].type.bytes
            change[made[tensor] + 1] += size
            change[position + 1] -= size
        live, total = [], 0.0
        for position in range(len(work) + 1):
            total += change[position]
            live.append(total)
        return live

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

    def place_backward(self) -> None:
        for op in self.operators:
            if op.index not in self.backward:
                continue
            fitting, below = self.stages_of(op)
            while not fitting and self.float_residuals(op):
                fitting, below = self.stages_of(op)
            if not fitting:
                at = self.available, self.cotangent, self.num_stages
                raise torn_backward(self.graph, op, self._sources(op), *at)
            if not below and len(fitting) > 1 and heavy_flops(self.graph, op) == 0:
                self.floating.add(op.index)
                continue
            self.stage[op.index] = max(fitting)
            for result in op.results:
                self.cotangent[result] = max(fitting)
            for tensor in self.held.intersection(self._sources(op)):
                stage = max(fitting)
                self.home[tensor] = min(self.home.get(tensor, stage), stage)

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

    def float_residuals(self, op: Operator) -> bool:
        """Make again where it is read what `op` reads and backward alone does.

        False if there is nothing. Such operators follow their last reader in trace
        order, which may be far from the stage that has what they are made of: slices of
        residuals of work on the whole batch are.
        """
        makers = {self.made_by[t].index for t in self._sources(op) if t in self.made_by}
        found = makers & self.residual_work
        self.floating |= found
        for index in found:
            del self.stage[index]
        return bool(found)

    @cached_property
    def residual_work(self) -> frozenset[int]:
        """Forward operators without products that backward alone reads.

        Those that are made where they are read are left out, as their own sources count
        as theirs.
        """
        elsewhere = set(tensors_of(self.graph.outputs))
        found: set[int] = set()
        for op in reversed(self.operators):
            if op.index in self.backward:
                continue
            is_read = not elsewhere.isdisjoint(op.results)
            if is_read or heavy_flops(self.graph, op) > 0:
                elsewhere.update(tensors_of(op.operands))
            elif op.index not in self.floating:
                found.add(op.index)
        return frozenset(found)

    def split_backward(self) -> None:
        """Finds the backward work that no lower stage waits for."""
        stage_of, makers = self.stage, self.made_by
        waiting = [
            op for op in self.operators if op.index in self.backward & stage_of.keys()
        ]
        awaited = {op.index for op in waiting if stage_of[op.index] == 0}
        for op in reversed(waiting):
            if op.index not in awaited:
                self.weight.add(op.index)
                continue
            for tensor in self._sources(op):
                if tensor in makers:
                    awaited.add(makers[tensor].index)

    def phase(self, op: Operator) -> str:
        if op.index in self.weight:
            return "weight"
        return "backward" if op.index in self.backward else "forward"

    def result(self) -> StageCut:
        tasks: dict[str, list[tuple[Operator, ...]]] = {
            "forward": [],
            "backward": [],
            "weight": [],
        }
        made_on: dict[int, tuple[int, str]] = {}
        for stage in range(self.num_stages):
            for phase, of_stages in tasks.items():
                own = [
                    op
                    for op in self.operators
                    if self.stage.get(op.index) == stage and self.phase(op) == phase
                ]
                for op in own:
                    made_on.update(dict.fromkeys(op.results, (stage, phase)))
                of_stages.append(self.with_floating(own))
        return StageCut(
            self.num_stages,
            tuple(tasks["forward"]),
            tuple(tasks["backward"]),
            tuple(tasks["weight"]),
            made_on,
            self.home,
        )

    def with_floating(self, own: Sequence[Operator]) -> tuple[Operator, ...]:
        """The operators and all they need that is made where it is read, in order."""
        needed = {op.index for op in own}
        waiting = [t for op in own for t in tensors_of(op.operands)]
        while waiting:
            maker = self.made_by.get(waiting.pop())
            if maker is None or maker.index in needed:
                continue
            if maker.index in self.floating:
                needed.add(maker.index)
                waiting.extend(tensors_of(maker.operands))
        return tuple(op for op in self.operators if op.index in needed)


def torn_backward(
    graph: OpGraph,
    op: Operator,
    sources: Iterable[int],
    available: Mapping[int, Iterable[int]],
    cotangent: Mapping[int, int],
    num_stages: int,
) -> NotImplementedError:
    """No stage has all that a backward operator reads: its `sources` lie apart.

    `available` are the stages of values, `cotangent` the one that makes a cotangent,
    which may be read there and below.
    """
    readable = {
        t: range(cotangent[t] + 1) if t in cotangent else sorted(available[t])
        for t in sources
    }
    low = min(readable, key=lambda t: max(readable[t], default=-1))
    high = max(readable, key=lambda t: min(readable[t], default=-1))
    fewer = "PipelineParallel(num_stages=2) may do; if not, " if num_stages > 2 else ""
    return NotImplementedError(
        f"Backward work goes from the last stage to the first, each operator on a "
        f"stage that has all it reads, but in a cut into {num_stages} stages "
        f"{op.name!r} at {op.source or 'an unknown line'} reads "
        f"{_at(graph, low, readable)} and {_at(graph, high, readable)}, as derivatives "
        f"of derivatives and passes behind an update do; {fewer}use "
        f"autopar.ShardParallel(), which takes num_microbatches and "
        f"microbatch_semantics as well. Two passes with an update between them can be "
        f"two steps."
    )


def _at(graph: OpGraph, tensor: int, readable: Mapping[int, Sequence[int]]) -> str:
    stages = readable[tensor]
    where = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages)) or 'none'}"
    return f"{graph.tensors[tensor].name} ({where})"
