"""Which work a microbatch loop does, and which is done once a step.

The microbatch is one more mesh axis, a sequential one: its index is the loop counter
and its sum or maximum is accumulation over the loop; any other collective over it is
impossible. Every tensor has a state along it, found by the factors that split operators
over devices:

    d >= 0       the loop sees one part of dim d at a time, of every example kind alike
    REPLICATED   the same in every iteration: made before the loop
    SUM          a sum over the iterations: a gradient, a loss
    MAX, MIN     the greatest or least over the iterations: a statistic

An operator that needs such a value whole runs behind the loop, once a step. The batch
is cut minor: microbatch m holds the examples i with i mod M = m, so the parts of a
batch that is split over devices stay on their devices. A dim that holds k values for
each example (after a reshape) is cut in grains of k; one that holds several batches one
behind the other is cut in each of them. Batches of unlike sizes are several of their
greatest common divisor each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from textwrap import shorten

from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..graph.ports import Site, ports_of
from ..rules.base import Factor
from ..sharding.spec import State
from .microbatch_flow import Flow, Phases, shifted

# A cut dim as [batches, examples of a microbatch, microbatches, values of an example].
Grain = tuple[int, int, int, int]


class BatchCoupledError(ValueError):
    """The step needs the whole batch at once, so it cannot be cut into microbatches."""


@dataclass(frozen=True)
class MicrobatchSplit:
    """States of all tensors and factors of all operators along the microbatch axis.

    `port_state` is that of the ports of loops and branches inside. `copies` are the
    batches that a cut tensor holds one behind the other, and `copies_read` those of an
    operator's operands; `joints` are operators that join batches (`joined_batches.py`).
    """

    num_microbatches: int
    batch_size: int
    state: dict[int, State]
    factor: dict[int, Factor]
    port_state: dict[tuple[int, int], State]  # by operator, port
    phases: Phases
    copies: dict[int, int]
    copies_read: dict[int, tuple[int, ...]]  # by operator
    port_copies: dict[tuple[int, int], int]
    joints: set[int]

    def grain(self, size: int, copies: int = 1) -> Grain:
        """A cut dim of `size` that holds `copies` of the batch."""
        return grain_of(self.batch_size, self.num_microbatches, size, copies)

    def read_states(self, graph: OpGraph, op: Operator) -> dict[Site, State]:
        """The state in which a structured operator's ports read their tensors."""
        return {
            site: shifted(self.port_state[op.index, number], extra)
            for number, port in enumerate(ports_of(graph, op))
            for _, extra, site in port.reads
        }

    def read_copies(self, graph: OpGraph, op: Operator) -> dict[Site, int]:
        """How many batches what they read holds."""
        return {
            site: self.port_copies[op.index, number]
            for number, port in enumerate(ports_of(graph, op))
            for _, _, site in port.reads
        }


def split_microbatches(
    graph: OpGraph,
    batch: Sequence[int],
    num_microbatches: int,
    *,
    sums_stay_apart: bool = False,
) -> MicrobatchSplit:
    """Cut the step into `num_microbatches` parts along dim 0 of the `batch` tensors.

    Reduced values that flow back into work on examples (a mask's token count) are
    computed before the loop on the whole batch when that takes no product. So are
    batches that are joined, where what follows needs all of them at once. With
    `sums_stay_apart`, sums are not added to each other in the loop: the two gradients
    of a tied parameter may belong to different stages.

    Raises:
      ValueError: a size of the batch arguments is not divisible.
      BatchCoupledError: heavy work needs a value of the whole batch.
    """
    batch_size = batch_size_of(graph, batch, num_microbatches)
    new_flow = partial(Flow, graph, num_microbatches, batch_size, sums_stay_apart)
    try:
        return _split(partial(new_flow, True), batch)
    except BatchCoupledError as error:
        if sums_stay_apart:  # a pipeline computes with no values of all examples
            raise
        try:
            return _split(partial(new_flow, False), batch)
        except BatchCoupledError:
            raise error from None


def _split(
    new_flow: Callable[[set[int]], Flow], batch: Sequence[int]
) -> MicrobatchSplit:
    """Walk again until what is needed whole and early is made before the loop."""
    hoisted: set[int] = set()
    while True:
        flow = new_flow(hoisted)
        flow.run(batch)
        coupled = flow.first_coupling()
        if coupled is None:
            return MicrobatchSplit(
                flow.num_microbatches,
                flow.batch_size,
                flow.state,
                flow.factor,
                flow.port_state,
                flow.phases(),
                flow.copies,
                flow.copies_read,
                flow.port_copies,
                flow.joints,
            )
        reader, tensor = coupled
        chain = flow.cheap_ancestors(tensor)
        if chain is None or chain <= hoisted:
            raise BatchCoupledError(_coupling(flow, reader, tensor, batch))
        hoisted |= chain


def grain_of(
    batch_size: int, num_microbatches: int, size: int, copies: int = 1
) -> Grain:
    """A cut dim of `size`, which holds `copies` of the batch one behind the other."""
    values = size // (copies * batch_size)
    return copies, batch_size // num_microbatches, num_microbatches, values


def batch_size_of(graph: OpGraph, batch: Sequence[int], num_microbatches: int) -> int:
    """The size of the `batch` tensors along dim 0, which the microbatches divide.

    Of unlike sizes it is the greatest common divisor.

    Raises:
      ValueError: there are none, or a size is not divisible.
    """
    scalars = [graph.tensors[t].name for t in batch if not graph.tensors[t].type.rank]
    if scalars:
        raise ValueError(
            f"A batch argument must have examples along dim 0, but {scalars[0]} is a "
            f"scalar; leave it out of batch_argnums."
        )
    if not batch:
        raise ValueError(
            "A step is cut into microbatches along dim 0 of its batch arguments, but "
            "none was found (weights and state are none); name them with batch_argnums."
        )
    sizes = {graph.tensors[t].name: graph.tensors[t].type.shape[0] for t in batch}
    if any(size % num_microbatches for size in sizes.values()):
        raise ValueError(_indivisible(num_microbatches, sizes))
    return gcd(*sizes.values())


def _indivisible(num_microbatches: int, sizes: Mapping[str, int]) -> str:
    size = gcd(*sizes.values())
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    nearest = sorted(divisors, key=lambda n: (abs(n - num_microbatches), n))[:2]
    names = ", ".join(f"{name} ({own} examples)" for name, own in sizes.items())
    return (
        f"`num_microbatches` must divide the batch size "
        f"{' and '.join(map(str, sorted({*sizes.values()})))}, but got "
        f"{num_microbatches}; use {' or '.join(map(str, sorted(nearest)))}. The "
        f"batch is {shorten(names, 100)}; if it is another, say so with batch_argnums."
    )


def _coupling(flow: Flow, reader: Operator, tensor: int, batch: Sequence[int]) -> str:
    maker = flow.made_by.get(tensor, reader)
    while not maker.source:  # JAX's own equations have no line: name who feeds them
        known = [t for t in tensors_of(maker.operands) if t in flow.made_by]
        if not known:
            break
        maker = flow.made_by[known[0]]
    names = ", ".join(flow.graph.tensors[tensor].name for tensor in batch)
    found = f"{maker.name!r} at {maker.source or 'an unknown line'}"
    if flow.made_by.get(tensor) is reader:
        seen = f"{found} needs all examples at once"
    else:
        seen = (
            f"the result of {found} takes the whole batch and flows back into work on "
            f"examples ({reader.name!r})"
        )
    return (
        f"A step is cut into microbatches only if that changes no value, but {seen}. "
        f"To keep these values, use autopar.ShardParallel() with num_microbatches=1; "
        f'with microbatch_semantics="independent" each microbatch is a batch of its '
        f"own, with its own statistics and negatives. What was cut is "
        f"{shorten(names, 100)}; if the batch is another, say so with batch_argnums."
    )
