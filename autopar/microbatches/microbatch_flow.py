"""How a batch flows through a graph that is cut into microbatches.

Every tensor gets a state along the sequential axis, every operator a factor that keeps
it, by the same rules that split operators over devices; what needs the whole is done
behind the loop, and what it holds up there is remembered as a coupling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..frontend.batched_conditions import factor_of_microbatch
from ..graph.build_graph import SHARD_MAP, STRUCTURED
from ..graph.dependencies import leading_to, tensors_of, updates_of
from ..graph.op_graph import Constant, Operand, Operator, OpGraph
from ..graph.work import holds_heavy_work
from ..rules.base import Factor, factors_of, replicate
from ..sharding.ports import Port, Site, ports_of
from ..sharding.spec import MAX, MIN, REPLICATED, State
from .extremes import microbatch_factors
from .joined_batches import joint_of

# A cut dim as [batches, examples of a microbatch, microbatches, values of an example].
Grain = tuple[int, int, int, int]


def grain_of(
    batch_size: int, num_microbatches: int, size: int, copies: int = 1
) -> Grain:
    """A cut dim of `size`, which holds `copies` of the batch one behind the other."""
    values = size // (copies * batch_size)
    return copies, batch_size // num_microbatches, num_microbatches, values


@dataclass(frozen=True)
class Phases:
    """Operators of the outermost block: before, in and behind the loop."""

    before: tuple[Operator, ...]
    loop: tuple[Operator, ...]
    behind: tuple[Operator, ...]


@dataclass
class Flow:
    """States along the microbatch axis, found in one walk from the batch on.

    `state` is by tensor, `factor` by operator. `copies` are how many batches a tensor
    that is cut holds one behind the other, where it is more than one; `copies_read`
    those that an operator takes of each operand. `ports` are state and copies of those
    of loops and branches inside, by operator and port.
    """

    graph: OpGraph
    num_microbatches: int
    batch_size: int
    sums_stay_apart: bool
    hoisted: set[int]
    state: dict[int, State] = field(default_factory=dict)
    factor: dict[int, Factor] = field(default_factory=dict)
    behind: set[int] = field(default_factory=set)  # tensors known after the loop
    made_by: dict[int, Operator] = field(default_factory=dict)
    couplings: list[tuple[Operator, int]] = field(default_factory=list)
    is_behind: dict[int, bool] = field(default_factory=dict)  # by operator
    ports: dict[tuple[int, int], tuple[State, int]] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)  # by tensor
    copies_read: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by operator
    asked: dict[int, dict[tuple[int, int], tuple[State, int]]] = field(
        default_factory=dict[int, dict[tuple[int, int], tuple[State, int]]]
    )  # by tensor and reader: the state and copies that it wants
    joints: set[int] = field(default_factory=set)  # operators that join batches
    matches: dict[tuple[int, ...], Factor | None] = field(default_factory=dict)
    alike: dict[int, int] = field(default_factory=dict)  # equal for equal operators

    def __post_init__(self) -> None:
        columns = self.graph.columns
        numbers = columns.alike.tolist()
        self.alike = {
            op.index: number
            for op, number in zip(columns.operators, numbers, strict=True)
        }
        self.updates = updates_of(self.graph.blocks[0].operators)
        self.num_readers = Counter(
            tensor
            for block in self.graph.blocks
            for read in (block.outputs, *(op.operands for op in block.operators))
            for tensor in tensors_of(read)
        )

    def run(self, batch: Sequence[int]) -> None:
        outermost = self.graph.blocks[0]
        for tensor in outermost.inputs:
            self.state[tensor] = REPLICATED
        for tensor in batch:
            size = self.graph.tensors[tensor].type.shape[0]
            self.write(tensor, 0, size // self.batch_size if size else 1)
        for op in outermost.operators:
            for result in op.results:
                self.made_by[result] = op
            if op.index in self.hoisted:
                self.run_once(op, behind=False)
                continue
            late = [t for t in tensors_of(op.operands) if t in self.behind]
            if late or not self.run_split(op):
                reads = tensors_of(op.operands)
                sums = [t for t in reads if self.state[t] < REPLICATED]
                if any(self.state[t] >= 0 for t in reads):  # it, or a source, needs all
                    self.couplings.append((op, [*late, *sums, *op.results][0]))
                self.run_once(op, behind=True)

    def run_once(self, op: Operator, *, behind: bool) -> None:
        """The operator sees everything whole, before or behind the loop."""
        self.is_behind[op.index] = behind
        self.set_whole(op)
        if behind:
            self.behind.update(op.results)

    def set_whole(self, op: Operator) -> None:
        self.factor[op.index] = replicate(op)
        self.joints.discard(op.index)
        for result in op.results:
            self.state[result] = REPLICATED
        for body in op.bodies:
            block = self.graph.blocks[body]
            for tensor in block.inputs:
                self.state[tensor] = REPLICATED
            for inner in block.operators:
                self.set_whole(inner)

    def run_split(self, op: Operator) -> bool:
        """Find what an operator does to one microbatch; False if it needs all."""
        if op.kind in STRUCTURED:
            return self.run_structured(op)
        states = [self.state_of(operand) for operand in op.operands]
        factor, taken = factor_of_microbatch(op, states) or self.match(op, states), 1
        made = (1,) * len(op.results)
        if factor is not None:
            taken = self.common_copies(op, states, factor)
        if factor is None or taken is None:
            copies = [self.copies_of(operand) for operand in op.operands]
            joint = joint_of(op, states, copies, self.batch_size)
            if joint is None:
                return False
            factor, made = joint.factor, joint.results
            self.copies_read[op.index] = joint.operands
            self.joints.add(op.index)
        else:
            made = (taken,) * len(op.results)
            self.copies_read[op.index] = (taken,) * len(op.operands)
            self.joints.discard(op.index)
        self.factor[op.index] = factor
        for result, state, number in zip(op.results, factor.results, made, strict=True):
            self.write(result, state, number)
            self.made_by[result] = op
        wanted = zip(factor.operands, self.copies_read[op.index], strict=True)
        for position, (operand, each) in enumerate(
            zip(op.operands, wanted, strict=True)
        ):
            if isinstance(operand, int):
                self.asked.setdefault(operand, {})[op.index, position] = each
                self.make_cut(operand, *each)
        return True

    def write(self, tensor: int, state: State, copies: int) -> None:
        self.state[tensor] = state
        self.copies[tensor] = copies if state >= 0 else 1

    def common_copies(
        self, op: Operator, states: Sequence[State], factor: Factor
    ) -> int | None:
        """How many batches all that is cut holds; None if numbers or sizes differ."""
        pairs = zip(op.operands, states, strict=True)
        found = {self.copies_of(operand) for operand, state in pairs if state >= 0}
        if len(found) > 1:
            return None
        copies = min(found, default=1)
        is_alike = copies == 1 or self.is_cut_alike(op, factor, copies)
        return copies if is_alike else None

    def copies_of(self, operand: Operand) -> int:
        return self.copies.get(operand, 1) if isinstance(operand, int) else 1

    def make_cut(self, tensor: int, wanted: State, copies: int) -> None:
        """Make a broadcast value cut from the start: all its readers want it so."""
        maker = self.made_by.get(tensor)
        if maker is None or maker.kind != "broadcast_in_dim" or wanted < 0:
            return
        asked = self.asked[tensor].values()
        if len(asked) < self.num_readers[tensor] or len(set(asked)) > 1:
            return
        if self.state[tensor] != REPLICATED:
            return
        for factor in factors_of(maker):
            is_made_cut = factor.results == (wanted,) and all(
                state == REPLICATED for state in factor.operands
            )
            if is_made_cut and self.is_cut_alike(maker, factor):
                self.factor[maker.index] = factor
                self.write(tensor, wanted, copies)

    def match(self, op: Operator, states: Sequence[State]) -> Factor | None:
        """The factor that takes operands in `states`; whole ones can be cut for it."""
        key = self.alike[op.index], *states
        if key not in self.matches:
            self.matches[key] = self._match(op, states)
        return self.matches[key]

    def _match(self, op: Operator, states: Sequence[State]) -> Factor | None:
        if all(state == REPLICATED for state in states):
            return replicate(op)
        found = [
            factor
            for factor in microbatch_factors(op)
            if not factor.is_positional
            and self.is_cut_alike(op, factor)
            and all(
                has in (REPLICATED, wanted)
                for has, wanted in zip(states, factor.operands, strict=True)
            )
        ]
        if not found:
            return None
        return min(found, key=lambda f: _num_cut(states, f.operands))

    def is_cut_alike(self, op: Operator, factor: Factor, copies: int = 1) -> bool:
        """Whether the dims that a factor cuts hold whole examples, or it only sums."""
        whole = copies * self.batch_size
        states = (*factor.operands, *factor.results)
        types = (*op.operand_types, *op.result_types)
        return all(
            kind.shape[state] > 0 and kind.shape[state] % whole == 0
            if state >= 0
            else state >= MIN
            for state, kind in zip(states, types, strict=True)
        )

    def run_structured(self, op: Operator) -> bool:
        """Iterate the ports of a loop or branch until their states are stable."""
        reads = tensors_of(op.operands)
        if op.kind == SHARD_MAP and any(self.state[t] != REPLICATED for t in reads):
            return False  # its body is written for the shapes of the whole
        ports = ports_of(self.graph, op)
        found: list[tuple[State, int]] = [(REPLICATED, 1)] * len(ports)
        while True:
            for port, (state, copies) in zip(ports, found, strict=True):
                for tensor, extra in port.writes:
                    self.write(tensor, shifted(state, extra), copies)
            for body in op.bodies:
                for inner in self.graph.blocks[body].operators:
                    if not self.run_split(inner):
                        return False
            before = tuple(found)
            for number, port in enumerate(ports):
                joined = self.join(port, found[number][0])
                if joined is None:
                    return False
                # A literal is its own maximum, but a predicate is nothing of parts.
                is_extreme = joined[0] in (MAX, MIN) and bool(port.writes)
                if port.is_whole and joined[0] != REPLICATED and not is_extreme:
                    return False
                found[number] = joined
            if tuple(found) == before:
                self.ports.update(((op.index, n), each) for n, each in enumerate(found))
                return True

    def join(self, port: Port, state: State) -> tuple[State, int] | None:
        """The one state, and number of batches, of all that a port reads; None if two
        of them differ."""
        copies: set[int] = set()
        for operand, extra, _ in port.reads:
            found = self.state.get(operand, REPLICATED)
            if found == REPLICATED:
                continue
            if 0 <= found < extra:
                return None
            if found >= 0:
                copies.add(self.copies.get(operand, 1))
                found -= extra
            if state not in (REPLICATED, found):
                return None
            state = found
        return (state, min(copies, default=1)) if len(copies) <= 1 else None

    def state_of(self, operand: Operand) -> State:
        return REPLICATED if isinstance(operand, Constant) else self.state[operand]

    def is_loop(self, op: Operator) -> bool:
        """Whether an operator of the outermost block does another thing each time."""
        if op.index in self.is_behind:
            return False
        tensors = [*tensors_of(op.operands), *op.results]
        return any(self.state[tensor] != REPLICATED for tensor in tensors)

    def first_coupling(self) -> tuple[Operator, int] | None:
        """The first example-wise operator stuck behind the loop with heavy work after.

        What leads to no heavy work (metrics) may be computed behind the loop.
        """
        if not self.couplings:
            return None
        stuck: set[int] = set()
        culprit: dict[int, tuple[Operator, int]] = {}
        starts = {op.index: (op, tensor) for op, tensor in self.couplings}
        for op in self.graph.blocks[0].operators:
            reads = [t for t in tensors_of(op.operands) if t in stuck]
            if reads:
                source = culprit[reads[0]]
            elif op.index in starts:
                source = starts[op.index]
            else:
                continue
            if holds_heavy_work(self.graph, op):
                return source
            stuck.update(op.results)
            culprit.update(dict.fromkeys(op.results, source))
        return None

    def cheap_ancestors(self, tensor: int) -> set[int] | None:
        """Operators that make a tensor from the inputs, if none of them is heavy."""
        found = leading_to([tensor], self.graph.blocks[0].operators)
        if any(holds_heavy_work(self.graph, op) for op in found):
            return None
        return {op.index for op in found}

    def is_better_behind(self, op: Operator, needed: set[int]) -> bool:
        """Whether a linear operator on sums can run once: it makes no more to carry."""
        states = [self.state[tensor] for tensor in tensors_of(op.operands)]
        is_of_sums = all(state <= REPLICATED for state in states)
        if not is_of_sums or not needed.isdisjoint(op.results):
            return False
        if self.sums_stay_apart and op.index in self.updates:
            return True
        if op.bodies or op.kind == "convert_element_type":
            return False  # a sum is kept in the wider dtype
        types = [self.graph.tensors[tensor].type for tensor in tensors_of(op.operands)]
        carried = sum(
            kind.bytes
            for kind, state in zip(types, states, strict=True)
            if state < REPLICATED
        )
        if self.sums_stay_apart and op.kind in ("add", "add_any"):
            return True
        return carried <= sum(kind.bytes for kind in op.result_types)

    def grain(self, size: int, copies: int = 1) -> Grain:
        """A cut dim of `size` that holds `copies` of the batch."""
        return grain_of(self.batch_size, self.num_microbatches, size, copies)

    def read_ports(self, op: Operator) -> dict[Site, tuple[State, int]]:
        """The state in which a structured operator's ports read their tensors, and how
        many batches these hold."""
        found: dict[Site, tuple[State, int]] = {}
        for number, port in enumerate(ports_of(self.graph, op)):
            state, copies = self.ports[op.index, number]
            for _, extra, site in port.reads:
                found[site] = shifted(state, extra), copies
        return found

    @cached_property
    def phases(self) -> Phases:
        """The phases: what the loop does not need comes behind it."""
        before: list[Operator] = []
        loop: list[Operator] = []
        behind: list[Operator] = []
        needed: set[int] = set()
        in_loop = self.loop_operators()
        for op in reversed(self.graph.blocks[0].operators):
            if op.index in in_loop and not self.is_better_behind(op, needed):
                loop.append(op)
                needed.update(tensors_of(op.operands))
            elif not needed.isdisjoint(op.results):
                before.append(op)
                needed.update(tensors_of(op.operands))
            else:
                behind.append(op)
        return Phases(
            tuple(reversed(before)), tuple(reversed(loop)), tuple(reversed(behind))
        )

    def loop_operators(self) -> set[int]:
        """Those that do another thing each time, and what reads their results.

        A barrier (remat) hands parameters on, the same each time, beside examples.
        """
        found: set[int] = set()
        made: set[int] = set()
        for op in self.graph.blocks[0].operators:
            reads = tensors_of(op.operands)
            late = op.index not in self.is_behind and not made.isdisjoint(reads)
            if late or self.is_loop(op):
                found.add(op.index)
                made.update(op.results)
        return found


def shifted(state: State, extra: int) -> State:
    """The state of a tensor with `extra` more leading dims."""
    return state + extra if state >= 0 else state


def _num_cut(states: Sequence[State], wanted: Sequence[State]) -> int:
    return sum(
        has == REPLICATED and state != REPLICATED
        for has, state in zip(states, wanted, strict=True)
    )
