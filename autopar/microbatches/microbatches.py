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
from math import gcd
from textwrap import shorten
from typing import Any

import jax

from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..sharding.spec import REPLICATED, SUM, State
from .microbatch_flow import Flow, Grain, Phases, grain_of
from .microbatch_runners import MicrobatchRunner


class BatchCoupledError(ValueError):
    """The step needs the whole batch at once, so it cannot be cut into microbatches."""


# (whole values, parts of the batch, counter, operators to run first) to what leaves.
RunPart = Callable[
    [dict[int, Any], Mapping[int, Any], Any, Sequence[Operator]], list[Any]
]


@dataclass(frozen=True)
class Leaving:
    """A tensor that leaves the loop: its parts are joined along `dim`, or reduced.

    That dim holds `copies` of the batch one behind the other; `reduction` is SUM, MAX
    or MIN.
    """

    tensor: int
    dim: int | None = None
    copies: int = 1
    reduction: State = SUM


@dataclass(frozen=True, eq=False)
class MicrobatchedStep:
    """One step and how its microbatches follow each other.

    `graph` is what runs: of the whole batch, or of a microbatch as if it were one.
    `batch` are its inputs that are cut along dim 0 and `part_types` the types of one
    microbatch of each. `phases` say what runs before, in and behind the loop; what runs
    before reads no microbatch.

    `split` says how each tensor of `graph` is cut, where it is of the whole batch.
    `run_part(whole, parts, counter, before)` traces microbatch `counter` and returns
    what leaves it, in the order of `leaving`: `whole` are the values that are the same
    for all, by tensor, `parts` this microbatch of each batch tensor, and `before`
    operators to run first on whole values.
    """

    graph: OpGraph
    batch: tuple[int, ...]
    batch_size: int
    num_microbatches: int
    phases: Phases
    leaving: tuple[Leaving, ...]
    run_part: RunPart
    split: Flow | None = None

    def grain(self, size: int, copies: int = 1) -> Grain:
        """A cut dim of `size` that holds `copies` of the batch."""
        return grain_of(self.batch_size, self.num_microbatches, size, copies)

    @property
    def part_types(self) -> dict[int, jax.ShapeDtypeStruct]:
        """The type of one microbatch of every batch tensor."""
        number = 1 if self.split is None else self.num_microbatches
        types = {t: self.graph.tensors[t].type for t in self.batch}
        return {
            t: jax.ShapeDtypeStruct(
                (kind.shape[0] // number, *kind.shape[1:]), kind.dtype
            )
            for t, kind in types.items()
        }


def exact_step(graph: OpGraph, batch: Sequence[int], split: Flow) -> MicrobatchedStep:
    """The step whose values are those of the whole batch: `graph`, cut by `split`."""
    leaving = tuple(
        Leaving(
            t,
            split.state[t] if split.state[t] >= 0 else None,
            split.copies.get(t, 1),
            split.state[t] if split.state[t] < REPLICATED else SUM,
        )
        for t in leaving_tensors(graph, split.phases)
    )

    def run_part(
        whole: dict[int, Any],
        parts: Mapping[int, Any],
        counter: Any,
        before: Sequence[Operator],
    ) -> list[Any]:
        runner = MicrobatchRunner(graph, split, whole, counter)
        runner.values.update(parts)
        runner.run_operators([*before, *split.phases.loop])
        return [
            runner.values[each.tensor]
            if each.dim is not None
            else runner.read(each.tensor, each.reduction)
            for each in leaving
        ]

    return MicrobatchedStep(
        graph,
        tuple(batch),
        split.batch_size,
        split.num_microbatches,
        split.phases,
        leaving,
        run_part,
        split,
    )


def leaving_tensors(graph: OpGraph, phases: Phases) -> list[int]:
    """What the loop makes that is read behind it, or returned."""
    made = {t for op in phases.loop for t in op.results}
    read = [t for op in phases.behind for t in tensors_of(op.operands)]
    read.extend(tensors_of(graph.blocks[0].outputs))
    return [t for t in dict.fromkeys(read) if t in made]


def split_microbatches(
    graph: OpGraph,
    batch: Sequence[int],
    num_microbatches: int,
    *,
    sums_stay_apart: bool = False,
) -> Flow:
    """Cut the step into `num_microbatches` parts along dim 0 of the `batch` tensors.

    Reduced values that flow back into work on examples (a mask's token count) are
    computed before the loop on the whole batch when that takes no product. With
    `sums_stay_apart`, sums are not added to each other in the loop: the two gradients
    of a tied parameter may belong to different stages.

    Raises:
      ValueError: a size of the batch arguments is not divisible.
      BatchCoupledError: heavy work needs a value of the whole batch.
    """
    batch_size = batch_size_of(graph, batch, num_microbatches)
    hoisted: set[int] = set()
    while True:
        flow = Flow(graph, num_microbatches, batch_size, sums_stay_apart, hoisted)
        flow.run(batch)
        coupled = flow.first_coupling()
        if coupled is None:
            return flow
        reader, tensor = coupled
        chain = flow.cheap_ancestors(tensor)
        if chain is None or chain <= hoisted:
            raise BatchCoupledError(_coupling(flow, reader, tensor, batch))
        hoisted |= chain


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
    distinct = sorted({*sizes.values()})
    return (
        f"`num_microbatches` must divide the batch size{'s' * (len(distinct) > 1)} "
        f"{' and '.join(map(str, distinct))}, but got "
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
