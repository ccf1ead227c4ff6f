"""Who holds what at points of a program under one of its plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..costs.execution_order import Liveness
from ..costs.fusion import Traits
from ..costs.kernels import Value
from ..costs.memory import MemoryProfile
from ..graph.build_graph import BARRIER
from ..graph.ports import barriers_of
from ..sharding.spec import Spec
from .held_values import HeldValues, bytes_of_relays, reading_less, tensors_of
from .passed_values import Passed, passed_values
from .reading_spans import ReadingSpans, reading_spans
from .relay_choices import lasting_tensors
from .sharding_problem import ShardingProblem

INNER_STRETCHES = 4  # of a loop's body
WORTH_TELLING = 1e-3  # of the peak
WORTH_KEEPING = 1e-2  # of the peak, of all together that are not told


@dataclass(frozen=True, eq=False)
class Point:
    """What vertices hold at one point, and `bytes`: what the plan holds there.

    Bool [vertices]: `whole` are those with all their bytes, `duplicated` those with as
    much once more, `wide` those with copies in a wider dtype, `copied` the relays that
    only hold a copy, if there is one.

    `turns` are (tensor, spec copied, spec of the copy, bytes) of what collectives turn,
    `copies` (tensor, spec, bytes) of copies beside the relay's. `lent` are (home,
    bytes) of what lies in the memory of arguments, `kept` (home, port, bytes, bytes of
    the copy) of what is gathered and passes a barrier to be read behind it.
    """

    bytes: int
    whole: np.ndarray
    duplicated: np.ndarray
    wide: np.ndarray
    copied: np.ndarray
    turns: tuple[tuple[int, Spec, Spec, int], ...] = ()
    copies: tuple[tuple[int, Spec, int], ...] = ()
    lent: tuple[tuple[int, int], ...] = ()
    kept: tuple[tuple[int, int, int, int], ...] = ()

    @classmethod
    def empty(cls, num_vertices: int) -> Point:
        """Nothing is held."""
        nothing = np.zeros(num_vertices, bool)
        return cls(0, nothing, nothing, nothing, nothing)

    @property
    def lent_bytes(self) -> int:
        """What lies in the memory of arguments."""
        return sum(amount for _, amount in self.lent)

    def __or__(self, other: Point) -> Point:
        return Point(
            self.bytes + other.bytes,
            self.whole | other.whole,
            self.duplicated | other.duplicated,
            self.wide | other.wide,
            self.copied | other.copied,
            self.turns + other.turns,
            self.copies + other.copies,
            self.lent + other.lent,
            self.kept + other.kept,
        )


class PlanPoints:
    """The points of one plan, block by block.

    Args:
      problem: the problem, with relays that count memory.
      profile: the memory of a plan.
      choices: the same plan as an assignment of the problem.
    """

    def __init__(
        self,
        problem: ShardingProblem,
        profile: MemoryProfile,
        choices: tuple[int, ...],
    ) -> None:
        self.problem, self.profile, self.choices = problem, profile, choices
        self._bodies = {op.index: op.bodies for op in problem.graph.operators()}
        count = len(problem.graph.tensors)
        lasting = lasting_tensors(problem.graph) & problem.relays.keys()
        self.is_lasting = np.zeros(count + 1, bool)  # the last is no tensor
        self.is_lasting[list(lasting)] = True
        self._relay = np.full(count + 1, -1)
        self._relay[list(problem.relays)] = list(problem.relays.values())
        self._relay_bytes = bytes_of_relays(problem, lasting, choices)
        self._reads_less = reading_less(problem, choices, self._relay_bytes)
        made = [(tensor, writer) for tensor, (writer, _) in problem.writers.items()]
        self._writer = np.full(count + 1, -1)
        self._writer[[tensor for tensor, _ in made]] = [writer for _, writer in made]
        tensors = profile.plan.tensors
        is_copied = [bool(each.conversions) for each in tensors]
        self._is_copied = np.array([*is_copied, False])
        self._lasts = self._lasting_names()
        self._reader = self._readers()
        self._blocks: dict[tuple[int, bool], HeldValues] = {}
        self._read: dict[int, ReadingSpans] = {}
        self._hops: dict[int, tuple[Passed, ...]] = {}
        self._outside: dict[int, set[int]] = {}
        sizes = np.array([each.type.bytes for each in problem.graph.tensors])
        self._is_worth_telling = sizes >= WORTH_TELLING * profile.live_bytes
        self._may_be_kept = self._largest_passed(sizes)

    def _largest_passed(self, sizes: np.ndarray) -> np.ndarray:
        """Bool [tensors]: what passes a barrier, all but the smallest.

        One of many equal layers may be small, and all of them together most there is.
        """
        blocks = self.problem.graph.blocks
        passed = {t for block in blocks for _, (t, _) in barriers_of(block)}
        tensors = np.array(sorted(passed), np.intp)
        tensors = tensors[np.argsort(sizes[tensors], kind="stable")]
        together = np.cumsum(sizes[tensors])
        found = np.zeros(len(sizes), bool)
        found[tensors[together > WORTH_KEEPING * self.profile.live_bytes]] = True
        return found

    def _readers(self) -> np.ndarray:
        """[tensors] the relay through which each is read as it was made, or -1.

        What an operator gives but another name is read by that.
        """
        reader = np.where(self._is_copied | self.is_lasting, -1, self._relay)
        columns, reads = self.problem.graph.columns, self.problem.columns.reads
        is_relay = np.isin(reads.vertex, self._relay[self._relay >= 0])
        number = np.bincount(reads.tensor[~is_relay], minlength=len(reader))
        for row in np.flatnonzero(Traits.of(columns).renames)[::-1].tolist():
            op = columns.operators[row]
            if op.kind == BARRIER:
                continue
            tensors = [each for each in op.operands if isinstance(each, int)]
            for read, result in zip(tensors, op.results, strict=True):
                is_passed = number[read] == 1 and not self._is_copied[read]
                if is_passed and reader[read] < 0:
                    reader[read] = reader[result]
        return reader

    def _lasting_names(self) -> np.ndarray:
        """[tensors + 1] the tensor that lasts which each is a name of, or -1."""
        columns = self.problem.graph.columns
        lasts = np.where(self.is_lasting, np.arange(len(self.is_lasting)), -1)
        for row in np.flatnonzero(Traits.of(columns).renames).tolist():
            op = columns.operators[row]
            tensors = [each for each in op.operands if isinstance(each, int)]
            for read, result in zip(tensors, op.results, strict=True):
                lasts[result] = lasts[read]
        return lasts

    def of_program(
        self, stretches: int, *, tells_lent: bool, packed: bool
    ) -> Iterator[Point]:
        """The fullest points of the outermost block, each with what a body holds there.

        `tells_lent`: also what lies in the memory of arguments. `packed`: with what the
        compiler leaves free there below what is in use.
        """
        holes = self.profile.holes if packed else None
        return self._of_block(0, stretches, tells_lent, holes)

    def _of_block(
        self, block: int, stretches: int, tells_lent: bool, holes: np.ndarray | None
    ) -> Iterator[Point]:
        liveness = self.profile.liveness[block]
        nothing = Point.empty(len(self.problem.vertices))
        if not liveness.order:
            yield nothing
        used = liveness.bytes if holes is None else liveness.bytes + holes
        for position in fullest(used, stretches):
            kernel = liveness.block.kernels[liveness.order[position]]
            held = self.at(block, position, tells_lent=tells_lent)
            if holes is not None:
                held = replace(held, bytes=held.bytes + int(holes[position]))
            bodies = ()
            if kernel.inner_bytes and kernel.operator is not None:
                bodies = self._bodies[kernel.operator]
            inner = [
                point
                for body in bodies
                for point in self._of_block(body, INNER_STRETCHES, tells_lent, None)
            ]
            for point in inner or [nothing]:
                yield held | point

    def at(self, block: int, position: int, *, tells_lent: bool = False) -> Point:
        """What is held while a kernel runs, without what its bodies hold."""
        liveness = self.profile.liveness[block]
        held = self._held(block, tells_lent)
        kernel = liveness.block.kernels[liveness.order[position]]
        values = liveness.block.values
        total = int(liveness.bytes[position])
        if kernel.operator is not None and self._bodies[kernel.operator]:
            total -= kernel.inner_bytes
        is_live = (held.starts <= position) & (held.ends >= position)
        turned: list[tuple[int, Spec, Spec, int]] = []
        copies: list[tuple[int, Spec, int]] = []
        for source, target, amount in _turned_by(liveness, position, is_live):
            if source.tensor in self.problem.relays:
                turned.append((source.tensor, source.spec, target.spec, amount))
            elif source.tensor in self.problem.writers:
                copies.append((source.tensor, target.spec, amount))
        for index in np.flatnonzero(is_live & held.is_beside).tolist():
            value = values[index]
            copies.append((value.tensor, value.spec, value.bytes))
        is_read = (held.first_read <= position) & (held.last_read >= position)
        copied_inputs = [v for v in sorted(liveness.duplicated) if is_live[v]]
        return Point(
            total,
            self._among(held.vertex[is_live & ~held.is_wide], held.read[is_read]),
            self._among(held.vertex[copied_inputs]),
            self._among(held.vertex[is_live & held.is_wide]),
            self._among(self._fused_relays(block, position)),
            tuple(turned),
            tuple(copies),
            tuple(self._lent(liveness, position) if tells_lent else ()),
            tuple(self._kept(block, position)),
        )

    def _among(self, *vertices: np.ndarray) -> np.ndarray:
        """Bool [vertices of the problem], of some; -1 is none."""
        found = np.zeros(len(self.problem.vertices), bool)
        for each in vertices:
            found[each[each >= 0]] = True
        return found

    def _lent(self, liveness: Liveness, position: int) -> Iterator[tuple[int, int]]:
        """The homes of arguments in whose memory something lies, and its bytes."""
        values = liveness.block.values
        for value, lender in liveness.borrowed.items():
            writer = self.problem.writers.get(values[lender].tensor)
            is_live = liveness.starts[value] <= position <= liveness.ends[value]
            if is_live and writer is not None:
                yield writer[0], values[value].bytes

    def _fused_relays(self, block: int, position: int) -> np.ndarray:
        """Relays of what is in no memory, while it is needed: a copy of it would be."""
        spans = self._spans(block)
        is_needed = (spans.first <= position) & (position <= spans.last)
        may_be_copied = ~(self.is_lasting | self._is_copied)[:-1] & ~spans.in_memory
        is_told = is_needed & may_be_copied & self._is_worth_telling
        return self._relay[:-1][is_told]

    def _kept(self, block: int, position: int) -> Iterator[tuple[int, int, int, int]]:
        """(home, port, bytes, bytes of the plan's copy before the barrier) of what
        would be kept to be read behind it.
        """
        problem = self.problem
        held = problem.choice_graph.bytes_by_node
        for each in self._passed(block):
            tensor, is_between = each.tensor, each.since < position <= each.until
            if not is_between or not self._may_be_kept[tensor]:
                continue
            if not self._is_of_argument(block, tensor):
                continue
            home, port = problem.writers[tensor][0], problem.writers[each.behind][0]
            amount = problem.graph.tensors[tensor].type.bytes
            is_whole = held[port][self.choices[port]] >= amount
            if is_whole or held[home][self.choices[home]] < amount:
                relay = int(self._relay[tensor])
                copied = 0 if relay < 0 else int(held[relay][self.choices[relay]])
                yield home, port, amount, copied

    def _spans(self, block: int) -> ReadingSpans:
        if block not in self._read:
            self._read[block] = reading_spans(
                self.problem.graph.blocks[block],
                self.profile.liveness[block],
                len(self._relay) - 1,
                self._reads_less.tolist(),
            )
        return self._read[block]

    def _passed(self, block: int) -> tuple[Passed, ...]:
        if block not in self._hops:
            own = self.problem.graph.blocks[block]
            place = own, self.profile.liveness[block], self._spans(block)
            self._hops[block] = passed_values(*place)
        return self._hops[block]

    def _is_of_argument(self, number: int, tensor: int) -> bool:
        """Whether a tensor is one that lasts, in other memory than the block's."""
        if number not in self._outside:
            values = self.profile.liveness[number].block.values
            found = {v.tensor for v in values if v.is_outside and not v.is_copy}
            self._outside[number] = found - {-1}
        return int(self._lasts[tensor]) in self._outside[number]

    def _held(self, number: int, tells_lent: bool) -> HeldValues:
        """Who holds each value of a block, and when relays of what lies outside would.

        Those hold from the first reading to the last that needs them.
        """
        key = number, tells_lent
        if key not in self._blocks:
            liveness = self.profile.liveness[number]
            self._blocks[key] = self._found(number, liveness, tells_lent)
        return self._blocks[key]

    def _found(self, number: int, liveness: Liveness, tells_lent: bool) -> HeldValues:
        block, count = liveness.block, len(self._relay) - 1
        tensor, is_copy = tensors_of(block.values)
        tensor = np.where((tensor >= 0) & (tensor < count), tensor, count)
        relay, writer = self._relay[tensor], self._writer[tensor]
        is_made, is_wide = writer >= 0, np.zeros(len(tensor), bool)
        is_wide[list(block.wide)], is_as_made = True, np.zeros(len(tensor), bool)
        is_as_made[list(block.wide)] = ~is_copy[list(block.wide.values())]
        vertex = np.where((relay >= 0) & is_copy & ~is_as_made, relay, writer)
        is_beside = is_made & is_copy & ~is_as_made
        for index in np.flatnonzero(is_beside & (relay >= 0)).tolist():
            at = int(relay[index])
            held = self.problem.vertices[at].writes[0].choices.of(self.choices[at])
            is_beside[index] = block.values[index].spec != held
        starts = np.where(liveness.starts >= 0, liveness.starts, len(liveness.order))
        if not tells_lent:
            starts[list(liveness.borrowed)] = len(liveness.order)
        until = self._until_passed(number, starts)
        reader = self._reader[tensor]  # holds it from when it was made
        shared = np.flatnonzero((reader >= 0) & is_made & ~is_copy)
        ends = until.copy()
        ends[shared] = np.minimum(starts[shared], ends[shared])
        spans = self._spans(number)
        read = np.flatnonzero(
            self.is_lasting[:-1] & (self._relay[:-1] >= 0) & (spans.last >= 0)
        )
        among = spans.first[read], spans.last[read]
        return HeldValues(
            np.append(np.where(is_made & ~is_beside, vertex, -1), reader[shared]),
            np.append(is_beside, np.zeros(len(shared), bool)),
            np.append(is_wide, np.zeros(len(shared), bool)),
            np.append(starts, starts[shared] + 1),
            np.append(ends, until[shared]),
            *(self._relay[read], *among),
        )

    def _until_passed(self, number: int, starts: np.ndarray) -> np.ndarray:
        """[values] to when they are in memory but for copies that pass barriers.

        Those of arguments are `kept` from then on. `starts` [values] are where they are
        told of.
        """
        liveness = self.profile.liveness[number]
        until, count = liveness.ends.copy(), len(liveness.order)
        for each in self._passed(number):
            is_told = starts[each.value] < count
            is_told &= not liveness.block.is_outside[each.value]
            if is_told and self._is_of_argument(number, each.tensor):
                until[each.value] = min(until[each.value], each.since)
        return until


def _turned_by(
    liveness: Liveness, position: int, is_live: np.ndarray
) -> Iterator[tuple[Value, Value, int]]:
    """(source, target, bytes) of conversions that take memory besides at a position.

    That is of what they turn, and of what they gathered in an order of dims of its own,
    of which there is a copy that is read. `is_live` [values].
    """
    block, values = liveness.block, liveness.block.values
    kernel = block.kernels[liveness.order[position]]
    if kernel.inner_bytes and kernel.operator is None:
        yield values[kernel.reads[0]], values[kernel.writes[0]], kernel.inner_bytes
    for copy, gathered in block.relaid.items():
        if is_live[copy] and is_live[gathered]:
            source = block.kernels[block.maker[gathered]].reads[0]
            yield values[source], values[gathered], values[copy].bytes


def fullest(used: np.ndarray, stretches: int) -> list[int]:
    """The position of the most bytes in each of some stretches of equal length.

    `used` [positions] are the bytes.
    """
    count = len(used)
    borders = np.linspace(0, count, min(stretches, count) + 1).astype(int)
    return [
        int(low + used[low:high].argmax())
        for low, high in zip(borders[:-1], borders[1:], strict=True)
        if high > low
    ]
