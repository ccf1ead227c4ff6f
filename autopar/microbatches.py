"""Which work a microbatch loop does, and which is done once a step.

The microbatch is one more mesh axis, a sequential one: its index is the loop counter
and its sum is accumulation over the loop; any other collective over it is impossible.
Every tensor has a state along it, found by the factors that split operators over
devices:

    d >= 0       the loop sees one part of dim d at a time, of every example kind alike
    REPLICATED   the same in every iteration: made before the loop
    SUM          a sum over the iterations: a gradient, a loss

An operator that needs such a value whole runs behind the loop, once a step. The batch
is cut minor: microbatch m holds the examples i with i mod M = m, so the parts of a
batch that is split over devices stay on their devices. A dim that holds k values for
each example (after a reshape) is cut in grains of k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from .build_graph import STRUCTURED
from .graph import Constant, Operand, Operator, OpGraph
from .ports import Port, Site, ports_of
from .rules.base import Factor, factors_of, replicate
from .spec import REPLICATED, SUM, State
from .strategies import is_heavy_operator


class BatchCoupledError(ValueError):
    """The step needs the whole batch at once, so it cannot be cut into microbatches."""


@dataclass(frozen=True)
class MicrobatchSplit:
    """States of all tensors and factors of all operators along the microbatch axis.

    `loop`, `before` and `behind` are the operators of the outermost block by phase.
    """

    num_microbatches: int
    batch_size: int
    state: dict[int, State]
    factor: dict[int, Factor]
    port_state: dict[tuple[int, int], State]  # by operator, port
    before: tuple[Operator, ...]
    loop: tuple[Operator, ...]
    behind: tuple[Operator, ...]

    def read_states(self, graph: OpGraph, op: Operator) -> dict[Site, State]:
        """The state in which a structured operator's ports read their tensors."""
        return {
            site: _shifted(self.port_state[op.index, number], extra)
            for number, port in enumerate(ports_of(graph, op))
            for _, extra, site in port.reads
        }

    def grain(self, size: int) -> tuple[int, int, int]:
        """A cut dim of `size` as [examples of a microbatch, microbatches, values]."""
        examples = self.batch_size // self.num_microbatches
        return examples, self.num_microbatches, size // self.batch_size

    def part(self, whole: jax.Array, dim: int, counter: jax.Array) -> jax.Array:
        """Microbatch `counter` of an array along `dim`."""
        examples, parts, values = self.grain(whole.shape[dim])
        before, after = whole.shape[:dim], whole.shape[dim + 1 :]
        spread = whole.reshape(*before, examples, parts, values, *after)
        part = lax.dynamic_index_in_dim(spread, counter, dim + 1, keepdims=False)
        return part.reshape(*before, examples * values, *after)

    def join(self, parts: jax.Array, dim: int) -> jax.Array:
        """The whole of stacked microbatches [M, ...] along `dim` of one of them."""
        size = parts.shape[dim + 1] * self.num_microbatches
        examples, num_parts, values = self.grain(size)
        before, after = parts.shape[1 : dim + 1], parts.shape[dim + 2 :]
        spread = parts.reshape(num_parts, *before, examples, values, *after)
        moved = jnp.moveaxis(spread, 0, dim + 1)
        return moved.reshape(*before, size, *after)


def split_microbatches(
    graph: OpGraph, batch: Sequence[int], num_microbatches: int
) -> MicrobatchSplit:
    """Cut the step into `num_microbatches` parts along dim 0 of the `batch` tensors.

    Reduced values that flow back into work on examples (a mask's token count) are
    computed before the loop on the whole batch when that takes no product.

    Raises:
      ValueError: the batch arguments differ in size, or it is not divisible.
      BatchCoupledError: heavy work needs a value of the whole batch.
    """
    batch_size = _batch_size(graph, batch, num_microbatches)
    hoisted: set[int] = set()
    while True:
        flow = _Flow(graph, num_microbatches, batch_size, hoisted)
        flow.run(batch)
        coupled = flow.first_coupling()
        if coupled is None:
            return flow.split()
        reader, tensor = coupled
        chain = flow.cheap_ancestors(tensor)
        if chain is None or chain <= hoisted:
            raise BatchCoupledError(_coupling(flow, reader, tensor))
        hoisted |= chain


@dataclass
class _Flow:
    graph: OpGraph
    num_microbatches: int
    batch_size: int
    hoisted: set[int]
    state: dict[int, State] = field(default_factory=dict)
    factor: dict[int, Factor] = field(default_factory=dict)
    behind: set[int] = field(default_factory=set)  # tensors known after the loop
    made_by: dict[int, Operator] = field(default_factory=dict)
    couplings: list[tuple[Operator, int]] = field(default_factory=list)
    is_behind: dict[int, bool] = field(default_factory=dict)  # by operator
    port_state: dict[tuple[int, int], State] = field(default_factory=dict)

    def run(self, batch: Sequence[int]) -> None:
        outermost = self.graph.blocks[0]
        for tensor in outermost.inputs:
            self.state[tensor] = REPLICATED
        for tensor in batch:
            self.state[tensor] = 0
        for op in outermost.operators:
            for result in op.results:
                self.made_by[result] = op
            if op.index in self.hoisted:
                self.run_once(op, behind=False)
                continue
            late = [t for t in _tensors(op.operands) if t in self.behind]
            if late:
                if any(self.state[t] >= 0 for t in _tensors(op.operands)):
                    self.couplings.append((op, late[0]))
                self.run_once(op, behind=True)
            elif not self.run_split(op):
                self.run_once(op, behind=True)

    def run_once(self, op: Operator, *, behind: bool) -> None:
        """The operator sees everything whole, before or behind the loop."""
        self.is_behind[op.index] = behind
        self.set_whole(op)
        if behind:
            self.behind.update(op.results)

    def set_whole(self, op: Operator) -> None:
        self.factor[op.index] = replicate(op)
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
        factor = self.match(op, states)
        if factor is None:
            return False
        self.factor[op.index] = factor
        for result, state in zip(op.results, factor.results, strict=True):
            self.state[result] = state
            self.made_by[result] = op
        for operand, wanted in zip(op.operands, factor.operands, strict=True):
            if isinstance(operand, int):
                self.make_cut(operand, wanted)
        return True

    def make_cut(self, tensor: int, wanted: State) -> None:
        """Make a broadcast literal cut from the start: its one reader wants it so."""
        maker = self.made_by.get(tensor)
        if maker is None or maker.kind != "broadcast_in_dim" or wanted < 0:
            return
        if _tensors(maker.operands):
            return
        for factor in factors_of(maker):
            if factor.results == (wanted,) and self.is_cut_alike(maker, factor):
                self.factor[maker.index] = factor
                self.state[tensor] = wanted

    def match(self, op: Operator, states: Sequence[State]) -> Factor | None:
        """The factor that takes operands in `states`; whole ones can be cut for it."""
        if all(state == REPLICATED for state in states):
            return replicate(op)
        found = [
            factor
            for factor in factors_of(op)
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

    def is_cut_alike(self, op: Operator, factor: Factor) -> bool:
        """Whether the dims that a factor cuts hold whole examples, or it only sums."""
        states = (*factor.operands, *factor.results)
        types = (*op.operand_types, *op.result_types)
        return all(
            kind.shape[state] > 0 and kind.shape[state] % self.batch_size == 0
            if state >= 0
            else state >= SUM
            for state, kind in zip(states, types, strict=True)
        )

    def run_structured(self, op: Operator) -> bool:
        """Iterate the ports of a loop or branch until their states are stable."""
        ports = ports_of(self.graph, op)
        state: dict[int, State] = dict.fromkeys(range(len(ports)), REPLICATED)
        while True:
            for number, port in enumerate(ports):
                for tensor, extra in port.writes:
                    self.state[tensor] = _shifted(state[number], extra)
            for body in op.bodies:
                for inner in self.graph.blocks[body].operators:
                    if not self.run_split(inner):
                        return False
            changed = False
            for number, port in enumerate(ports):
                joined = self.join(port, state[number])
                if joined is None or (port.is_whole and joined != REPLICATED):
                    return False
                changed |= joined != state[number]
                state[number] = joined
            if not changed:
                for number, found in state.items():
                    self.port_state[op.index, number] = found
                return True

    def join(self, port: Port, state: State) -> State | None:
        """The one state of all that a port reads; None if two of them differ."""
        for operand, extra, _ in port.reads:
            found = self.state.get(operand, REPLICATED)
            if found == REPLICATED:
                continue
            if 0 <= found < extra:
                return None
            found = found - extra if found >= 0 else found
            if state not in (REPLICATED, found):
                return None
            state = found
        return state

    def state_of(self, operand: Operand) -> State:
        return REPLICATED if isinstance(operand, Constant) else self.state[operand]

    def is_loop(self, op: Operator) -> bool:
        """Whether an operator of the outermost block does another thing each time."""
        if op.index in self.is_behind:
            return False
        tensors = [*_tensors(op.operands), *op.results]
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
            reads = [t for t in _tensors(op.operands) if t in stuck]
            if reads:
                source = culprit[reads[0]]
            elif op.index in starts:
                source = starts[op.index]
            else:
                continue
            if self.holds_heavy_work(op):
                return source
            stuck.update(op.results)
            culprit.update(dict.fromkeys(op.results, source))
        return None

    def holds_heavy_work(self, op: Operator) -> bool:
        if op.kind not in STRUCTURED:
            return is_heavy_operator(op)
        return any(
            self.holds_heavy_work(inner)
            for body in op.bodies
            for inner in self.graph.blocks[body].operators
        )

    def cheap_ancestors(self, tensor: int) -> set[int] | None:
        """Operators that make a tensor from the inputs, if none of them is heavy."""
        found: set[int] = set()
        waiting = [tensor]
        while waiting:
            op = self.made_by.get(waiting.pop())
            if op is None or op.index in found:
                continue
            if self.holds_heavy_work(op):
                return None
            found.add(op.index)
            waiting.extend(_tensors(op.operands))
        return found

    def split(self) -> MicrobatchSplit:
        """The phases: what the loop does not need comes behind it."""
        before: list[Operator] = []
        loop: list[Operator] = []
        behind: list[Operator] = []
        needed: set[int] = set()
        for op in reversed(self.graph.blocks[0].operators):
            if self.is_loop(op):
                loop.append(op)
                needed.update(_tensors(op.operands))
            elif not needed.isdisjoint(op.results):
                before.append(op)
                needed.update(_tensors(op.operands))
            else:
                behind.append(op)
        return MicrobatchSplit(
            self.num_microbatches,
            self.batch_size,
            self.state,
            self.factor,
            self.port_state,
            tuple(reversed(before)),
            tuple(reversed(loop)),
            tuple(reversed(behind)),
        )


def _tensors(operands: Iterable[Operand]) -> list[int]:
    return [operand for operand in operands if isinstance(operand, int)]


def _shifted(state: State, extra: int) -> State:
    return state + extra if state >= 0 else state


def _num_cut(states: Sequence[State], wanted: Sequence[State]) -> int:
    return sum(
        has == REPLICATED and state != REPLICATED
        for has, state in zip(states, wanted, strict=True)
    )


def _batch_size(graph: OpGraph, batch: Sequence[int], num_microbatches: int) -> int:
    sizes = {graph.tensors[t].type.shape[0]: graph.tensors[t].name for t in batch}
    if not sizes:
        raise ValueError(
            "A step is cut into microbatches along dim 0 of its batch arguments, but "
            "none was found; name them with batch_argnums."
        )
    if len(sizes) > 1:
        found = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ValueError(
            f"All batch arguments must have one size along dim 0, but {found}; name "
            f"those that are cut with batch_argnums."
        )
    (size,) = sizes
    if size % num_microbatches:
        raise ValueError(_indivisible(num_microbatches, size))
    return size


def _indivisible(num_microbatches: int, size: int) -> str:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    nearest = sorted(divisors, key=lambda n: (abs(n - num_microbatches), n))[:2]
    return (
        f"`num_microbatches` must divide the batch size {size}, but got "
        f"{num_microbatches}; use {' or '.join(map(str, sorted(nearest)))}."
    )


def _coupling(flow: _Flow, reader: Operator, tensor: int) -> str:
    maker = flow.made_by[tensor]
    while not maker.source and any(t in flow.made_by for t in _tensors(maker.operands)):
        known = (t for t in _tensors(maker.operands) if t in flow.made_by)
        maker = flow.made_by[next(known)]
    return (
        f"A step is cut into microbatches only if that changes no value, but the "
        f"result of {maker.name!r} at {maker.source or 'an unknown line'} takes the "
        f"whole batch and flows back into work on examples ({reader.name!r}); leave "
        f"num_microbatches at 1."
    )
