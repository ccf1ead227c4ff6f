"""Which operators the backward pass does again, and what it reads to do so.

In unrolled code a *group* is the part of one segment (`segments.py`) that a level does
again. A tensor is kept if the level does not make it again, or if a later segment reads
it; the group does what leads from kept tensors to the residuals that are not kept.

A loop over layers is one group: its backward loop does the body again on what entered
each iteration (a carry is stacked for it, slices and constants are there), and on what
the level keeps of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ..graph.build_graph import BARRIER, SHARD_MAP
from ..graph.dependencies import leading_to, read_by, tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..graph.phases import Phases, ScanPair, scan_pairs
from ..graph.work import holds_heavy_work
from ..option_values import Remat
from ..sharding.state_flow import Flow
from .segments import segments_of


@dataclass(frozen=True, eq=False)
class Group:
    """Operators of one block that its backward pass does again, in order.

    `reads` are the kept tensors that they start from, `makes` the residuals that are
    not kept.
    """

    operators: tuple[Operator, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ScanGroup:
    """What a backward loop does again of the body of `forward`.

    `slices` are the positions of its slices that tensors replace, `saved` the tensors
    of the forward body that are stacked for it; all else that `group` reads is an input
    of that body.
    """

    forward: Operator
    group: Group
    slices: Mapping[int, int]
    saved: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RecomputeSets:
    """All groups of a graph: those of unrolled code by block, loops by operator.

    `backward` are the operators that read what is made again, `cotangents` what they
    make.
    """

    groups: Mapping[int, tuple[Group, ...]]
    scans: Mapping[int, tuple[ScanGroup, ...]]
    backward: frozenset[int]
    cotangents: frozenset[int]
    num_segments: int

    @property
    def is_empty(self) -> bool:
        return not self.groups and not self.scans


def recompute_sets(graph: OpGraph, batch: Sequence[int], remat: Remat) -> RecomputeSets:
    """What a level does again; `batch` are the graph's inputs that hold examples."""
    finder = _Finder(graph, remat, Flow(graph).made_of(batch))
    for block in graph.blocks:
        finder.add_block(Phases.of(block))
    return RecomputeSets(
        finder.groups,
        finder.scans,
        frozenset(finder.backward),
        frozenset(finder.cotangents),
        finder.num_segments,
    )


def group_of(
    graph: OpGraph,
    batch: Sequence[int],
    remat: Remat,
    forward: Sequence[Operator],
    wanted: Collection[int],
    known: Collection[int],
) -> tuple[Operator, ...] | None:
    """What of `forward`, outermost operators, makes the tensors in `wanted` again.

    `batch` are the graph's inputs that hold examples, `known` tensors that are there
    anyhow. None where no bytes would be saved.
    """
    finder = _Finder(graph, remat, Flow(graph).made_of(batch))
    group = finder.group(forward, finder.done_again(forward), wanted, ())
    if group is None or not finder.saves_bytes(group, known):
        return None
    return group.operators


class _Finder:
    def __init__(self, graph: OpGraph, remat: Remat, examples: Collection[int]) -> None:
        self.graph, self.remat, self.examples = graph, remat, examples
        self.groups: dict[int, tuple[Group, ...]] = {}
        self.scans: dict[int, tuple[ScanGroup, ...]] = {}
        self.backward: set[int] = set()
        self.cotangents: set[int] = set()
        self.num_segments = 0

    def add_block(self, phases: Phases) -> None:
        pairs = scan_pairs(phases)
        for pair in pairs:
            found = self.scan_group(pair)
            if found is not None:
                others = self.scans.get(pair.backward.index, ())
                self.scans[pair.backward.index] = (*others, found)
        if not pairs and phases.residuals():
            self.add_unrolled(phases)

    def add_unrolled(self, phases: Phases) -> None:
        residuals = phases.residuals()
        is_heavy = partial(holds_heavy_work, self.graph)
        segments = segments_of(phases.forward, residuals, self.num_bytes, is_heavy)
        most = len(segments) - 1  # the last is read at once
        self.num_segments = max(self.num_segments, most)
        number = most if self.remat.num_segments is None else self.remat.num_segments
        again = self.done_again(phases.forward)
        known = {*residuals, *self.graph.blocks[phases.forward[0].block].inputs}
        found = []
        for i, segment in enumerate(segments[: min(number, most)]):
            later = set(read_by(op for other in segments[i + 1 :] for op in other))
            group = self.group(segment, again, set(residuals) - later, later)
            if group is not None and self.saves_bytes(group, known):
                found.append(group)
        if found:
            self.groups[phases.forward[0].block] = tuple(found)
            self.backward.update(op.index for op in phases.backward)
            self.cotangents.update(t for op in phases.backward for t in op.results)

    def scan_group(self, pair: ScanPair) -> ScanGroup | None:
        body = self.graph.blocks[pair.forward.bodies[0]]
        num_carry = pair.forward.params["num_carry"]
        first = pair.forward.params["num_consts"]
        entering = body.inputs[:first] + body.inputs[first + num_carry :]
        outputs = body.outputs[num_carry:]
        slices = {
            position: tensor
            for stacked, position in pair.residuals
            if isinstance(tensor := outputs[stacked], int)
        }
        forward = Phases.of(body).forward
        again = self.done_again(forward)
        group = self.group(forward, again, set(slices.values()), ())
        stacked = {*slices.values(), *outputs, *entering}
        if group is None or not self.saves_bytes(group, stacked):
            return None
        replaced = {p: t for p, t in slices.items() if t in group.makes}
        saved = tuple(t for t in group.reads if t not in entering)
        self.num_segments = max(self.num_segments, 1)
        return ScanGroup(pair.forward, group, replaced, saved)

    def group(
        self,
        segment: Sequence[Operator],
        again: Collection[int],
        wanted: Collection[int],
        kept: Collection[int],
    ) -> Group | None:
        """What makes the residuals in `wanted` again, by operators in `again`."""
        needed: set[int] = set()
        makes: list[int] = []
        operators: list[Operator] = []
        for op in reversed(segment):
            if op.index not in again:
                continue
            made = [t for t in op.results if t in wanted]
            if made or not needed.isdisjoint(op.results):
                operators.append(op)
                makes += made
                reads = tensors_of(op.operands)
                needed.update(t for t in reads if t not in kept)
        if not makes:
            return None
        done = {t for op in operators for t in op.results}
        outside = (
            t for t in read_by(reversed(operators)) if t not in done or t in kept
        )
        return Group(
            tuple(reversed(operators)),
            tuple(dict.fromkeys(outside)),
            tuple(reversed(makes)),
        )

    def saves_bytes(self, group: Group, known: Collection[object]) -> bool:
        """Whether less has to be kept for a group than it makes again.

        `known` are tensors that are there anyhow.
        """
        kept = sum(self.num_bytes(t) for t in group.reads if t not in known)
        return kept < sum(map(self.num_bytes, group.makes))

    def done_again(self, forward: Sequence[Operator]) -> set[int]:
        """The operators that the level may do twice."""
        able = [op for op in forward if _is_repeatable(op)]
        if self.remat.level == "cheap":
            able = [op for op in able if not holds_heavy_work(self.graph, op)]
        elif self.remat.level == "selective":
            core = self.attention_core(forward)
            able = [op for op in able if op.index in core]
        return {op.index for op in able}

    def attention_core(self, forward: Sequence[Operator]) -> set[int]:
        """What lies between two products of examples with each other, the first too."""
        products = {op.index for op in forward if holds_heavy_work(self.graph, op)}
        crossed = {op.index for op in forward if self.is_of_examples_alone(op)}
        below: set[int] = set()
        reached: set[int] = set()
        for op in forward:
            is_reached = not reached.isdisjoint(tensors_of(op.operands))
            if op.index in crossed or (is_reached and op.index not in products):
                below.add(op.index)
                reached.update(op.results)
        core: set[int] = set()
        wanted: set[int] = set()
        for op in reversed(forward):
            is_wanted = not wanted.isdisjoint(op.results) and op.index in below
            if is_wanted:
                core.add(op.index)
            if op.index in crossed or (is_wanted and op.index not in products):
                wanted.update(tensors_of(op.operands))
        return core | self.derivatives(forward, core, products)

    def derivatives(
        self,
        forward: Sequence[Operator],
        core: Collection[int],
        products: Collection[int],
    ) -> set[int]:
        """What is made of a core's values for the backward pass alone."""
        made = {t for op in forward if op.index in core for t in op.results}
        reached = []
        for op in forward:
            reads = made.intersection(tensors_of(op.operands))
            if reads and op.index not in core and op.index not in products:
                reached.append(op)
                made.update(op.results)
        of_core = {op.index for op in reached}
        others = read_by(op for op in forward if op.index not in of_core)
        return of_core - {op.index for op in leading_to(others, reached)}

    def is_of_examples_alone(self, op: Operator) -> bool:
        """Whether an operator is a product of one value of examples with another."""
        operands = tensors_of(op.operands)
        is_product = op.kind == "dot_general" and len(operands) == 2
        return is_product and all(t in self.examples for t in operands)

    def num_bytes(self, tensor: int) -> int:
        kind = self.graph.tensors[tensor].type
        return 0 if kind.is_extended else kind.bytes


def _is_repeatable(op: Operator) -> bool:
    """Whether doing it again makes the same values, and nothing else happens."""
    return not op.eqn.effects and op.kind not in (BARRIER, SHARD_MAP)
