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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from textwrap import shorten
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..graph.dependencies import leading_to, tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..graph.work import holds_heavy_work
from ..sharding.spec import MAX, REPLICATED, SUM, State
from .microbatch_flow import Flow, Phases
from .microbatch_runners import MicrobatchRunner
from .retracing import WholeRunner


class BatchCoupledError(ValueError):
    """The step needs the whole batch at once, so it cannot be cut into microbatches."""


@dataclass(frozen=True)
class Leaving:
    """A tensor that leaves the loop, in a state along the microbatches.

    Its parts are joined along a dim, which has `grain` values for each example, or
    reduced.
    """

    tensor: int
    state: State = SUM
    grain: int = 1


@dataclass(frozen=True, eq=False)
class MicrobatchedStep:
    """One step and how its microbatches follow each other.

    `graph` is what runs: of the whole batch, and then `split` says how each tensor is
    cut, or of a microbatch as if it were one. `batch` are its inputs that are cut along
    dim 0. `phases` say what runs before, in and behind the loop; what runs before reads
    no microbatch. What leaves the loop is `reduced` or `joined`.
    """

    graph: OpGraph
    batch: tuple[int, ...]
    num_microbatches: int
    phases: Phases
    reduced: tuple[Leaving, ...]
    joined: tuple[Leaving, ...]
    split: Flow | None = None

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

    def run_part(
        self,
        whole: dict[int, Any],
        parts: Mapping[int, Any],
        counter: Any,
        before: Sequence[Operator] = (),
    ) -> tuple[list[Any], list[Any]]:
        """Traces microbatch `counter`: what it adds to `reduced`, and has of `joined`.

        `whole` are the values that are the same for all, by tensor, `parts` this
        microbatch of each batch tensor, and `before` operators to run first.
        """
        operators, number = [*before, *self.phases.loop], self.num_microbatches
        if self.split is None:
            runner = WholeRunner(self.graph)
            runner.values.update({**whole, **parts})
            runner.run_operators(operators)
            reduced = [self._share(runner.values[e.tensor], e) for e in self.reduced]
        else:
            runner = MicrobatchRunner(self.split, number, whole, counter)
            runner.values.update(parts)
            runner.run_operators(operators)
            reduced = [runner.read(e.tensor, (e.state, 1)) for e in self.reduced]
        return reduced, [runner.values[each.tensor] for each in self.joined]

    def _share(self, value: jax.Array, leaving: Leaving) -> jax.Array:
        """What a microbatch that is a batch of its own adds: floats become a mean."""
        if leaving.state != SUM or not jnp.issubdtype(value.dtype, jnp.inexact):
            return value
        return value / jnp.asarray(self.num_microbatches, value.dtype)


def exact_step(
    graph: OpGraph,
    batch: Sequence[int],
    num_microbatches: int,
    *,
    sums_stay_apart: bool = False,
) -> MicrobatchedStep:
    """The step in microbatches of dim 0 of its `batch` tensors, with the same values.

    Reduced values that flow back into work on examples (a mask's token count) are
    computed before the loop on the whole batch when that takes no product.

    Raises:
      ValueError: a size of the batch arguments is not divisible.
      BatchCoupledError: heavy work needs a value of the whole batch.
    """
    batch_size = batch_size_of(graph, batch, num_microbatches)
    hoisted: set[int] = set()
    while True:
        split = Flow(graph, batch_size, hoisted)
        split.run(batch)
        coupled = split.first_coupling()
        if coupled is None:
            break
        reader, tensor = coupled
        chain = leading_to([tensor], graph.blocks[0].operators)
        is_heavy = any(holds_heavy_work(graph, op) for op in chain)
        if is_heavy or hoisted.issuperset(op.index for op in chain):
            raise BatchCoupledError(_coupling(graph, reader, tensor, batch))
        hoisted.update(op.index for op in chain)
    phases = split.phases(sums_stay_apart)
    reduced, joined = list[Leaving](), list[Leaving]()
    for tensor in leaving_tensors(graph, phases):
        (state, number), kind = split.part[tensor], graph.tensors[tensor].type
        if state >= 0:
            joined.append(Leaving(tensor, state, kind.shape[state] // number))
            continue
        if state == REPLICATED:  # each microbatch has the same: flags have no sum
            state = MAX if kind.dtype == np.bool_ else SUM
        reduced.append(Leaving(tensor, state))
    kinds = tuple(reduced), tuple(joined)
    return MicrobatchedStep(
        graph, tuple(batch), num_microbatches, phases, *kinds, split
    )


def leaving_tensors(graph: OpGraph, phases: Phases) -> list[int]:
    """What the loop makes that is read behind it, or returned."""
    made = {t for op in phases.loop for t in op.results}
    read = [t for op in phases.behind for t in tensors_of(op.operands)]
    read.extend(tensors_of(graph.blocks[0].outputs))
    return [t for t in dict.fromkeys(read) if t in made]


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


def _coupling(
    graph: OpGraph, reader: Operator, tensor: int, batch: Sequence[int]
) -> str:
    made_by = {t: op for op in graph.blocks[0].operators for t in op.results}
    maker = made_by.get(tensor, reader)
    while not maker.source:  # JAX's own equations have no line: name who feeds them
        known = [t for t in tensors_of(maker.operands) if t in made_by]
        if not known:
            break
        maker = made_by[known[0]]
    names = ", ".join(graph.tensors[tensor].name for tensor in batch)
    found = f"{maker.name!r} at {maker.source or 'an unknown line'}"
    if made_by.get(tensor) is reader:
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
