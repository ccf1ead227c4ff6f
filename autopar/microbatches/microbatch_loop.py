"""Cut a traced step into microbatches: the same function, with a loop over them.

The loop is an ordinary scan of the new trace, so planning and lowering need to know
nothing of it: a gradient is a carry that stays pending until the loop ends and is
reduced once a step; what is sliced from the batch was split over devices before it was
cut, and stays where it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from ..errors import FallbackWarning
from ..graph.op_graph import Block, Operator
from ..graph.traced_function import TracedFunction
from ..graph.work import holds_heavy_work
from .extremes import JOINS, start_of
from .microbatch_runners import join_parts, part_of
from .microbatches import MicrobatchedStep
from .retracing import WholeRunner


def with_microbatch_loop(
    traced: TracedFunction, step: MicrobatchedStep
) -> TracedFunction:
    """`traced`, which takes and returns the whole batch, with a loop over `step`.

    Warns if no product is in the loop.
    """
    _warn_of_whole_products(step)
    return _LoopRunner(step).retraced(traced) if step.phases.loop else traced


def _warn_of_whole_products(step: MicrobatchedStep) -> None:
    """Say that microbatches spare nothing, where all products are made behind them."""

    def products(operators: Sequence[Operator]) -> Iterator[Operator]:
        return (op for op in operators if holds_heavy_work(step.graph, op))

    first = next(products(step.phases.behind), None)
    if first is None or next(products(step.phases.loop), None) is not None:
        return
    warnings.warn(
        f"Microbatches are to hold a part of the batch at a time, but every product "
        f"of this step needs the whole batch, such as {first.name!r} "
        f"({first.source or 'an unknown line'}), so it is run once for all of it and "
        f"{step.num_microbatches} microbatches spare no memory; leave num_microbatches "
        f'at 1, or give the method microbatch_semantics="independent".',
        FallbackWarning,
        stacklevel=2,
    )


class _LoopRunner(WholeRunner):
    """Runs a step on its whole batch, with a loop over microbatches."""

    def __init__(self, step: MicrobatchedStep) -> None:
        super().__init__(step.graph)
        self.step = step

    def run_block(self, block: Block, inputs: Sequence[Any]) -> list[Any]:
        if block.index:
            return super().run_block(block, inputs)
        self.values.update(zip(block.inputs, inputs, strict=True))
        self.run_operators(self.step.phases.before)
        self.run_loop()
        self.run_operators(self.step.phases.behind)
        return self.outputs(block)

    def run_loop(self) -> None:
        """Scan over the microbatches; sums are carried, parts of outputs stacked."""
        step, number = self.step, self.step.num_microbatches
        batch = {tensor: self.values[tensor] for tensor in step.batch}
        whole = {t: value for t, value in self.values.items() if t not in batch}

        def body(totals: list[Any], counter: Any) -> tuple[list[Any], list[Any]]:
            parts = {t: part_of(x, 0, counter, number, 1) for t, x in batch.items()}
            found, joined = step.run_part(whole, parts, counter)
            added = [
                JOINS[each.state](total, value)
                for each, total, value in zip(step.reduced, totals, found, strict=True)
            ]
            return added, joined

        starts = []
        for each in step.reduced:
            kind = self.graph.tensors[each.tensor].type
            starts.append(start_of(each.state, kind.shape, kind.dtype))
        counters = jnp.arange(number, dtype=jnp.uint32)
        totals, stacked = lax.scan(body, starts, counters)
        for each, total in zip(step.reduced, totals, strict=True):
            self.values[each.tensor] = total
        for each, parts in zip(step.joined, stacked, strict=True):
            self.values[each.tensor] = join_parts(parts, each.state, each.grain)
