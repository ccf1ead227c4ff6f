"""A step cut into microbatches: what each of them does, and what leaves the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..sharding.spec import REPLICATED, SUM, State
from .microbatch_flow import Phases
from .microbatch_runners import MicrobatchRunner
from .microbatches import Grain, MicrobatchSplit, grain_of

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
    split: MicrobatchSplit | None = None

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


def exact_step(
    graph: OpGraph, batch: Sequence[int], split: MicrobatchSplit
) -> MicrobatchedStep:
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
