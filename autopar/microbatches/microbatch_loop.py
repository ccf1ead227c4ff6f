"""Cut a traced step into microbatches: the same function, with a loop over them.

The loop is an ordinary scan of the new trace, so planning and lowering need to know
nothing of it: a gradient is a carry that stays pending until the loop ends and is
reduced once a step; what is sliced from the batch was split over devices before it was
cut, and stays where it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..errors import FallbackWarning
from ..graph.blocks import as_array
from ..graph.op_graph import Operator
from ..graph.traced_function import TracedFunction
from ..graph.work import holds_heavy_work
from .extremes import JOINS, start_of
from .microbatch_runners import WholeRunner, join_parts, part_of
from .microbatches import MicrobatchedStep


def with_microbatch_loop(
    traced: TracedFunction, step: MicrobatchedStep
) -> TracedFunction:
    """`traced`, which takes and returns the whole batch, with a loop over `step`.

    Warns if no product is in the loop.
    """
    _warn_of_whole_products(step)
    if not step.phases.loop:
        return traced

    def run(*leaves: Any) -> list[Any]:
        runner, outermost = WholeRunner(step.graph), step.graph.blocks[0]
        runner.values.update(zip(outermost.inputs, leaves, strict=True))
        runner.run_operators(step.phases.before)
        _run_loop(step, runner.values)
        runner.run_operators(step.phases.behind)
        return runner.outputs(outermost)

    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in traced.jaxpr.jaxpr.invars
    ]
    constants = [as_array(value) for value in traced.jaxpr.consts]
    closed = jax.make_jaxpr(lambda *leaves: run(*leaves, *constants))(*types)
    return replace(traced, jaxpr=closed)


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


def _run_loop(step: MicrobatchedStep, values: dict[int, Any]) -> None:
    """Scan over the microbatches; sums are carried, parts of outputs stacked."""
    reduced = [each for each in step.leaving if each.dim is None]
    joined = [each for each in step.leaving if each.dim is not None]
    whole = {t: value for t, value in values.items() if t not in step.batch}
    grains = {
        tensor: (1, part.shape[0], step.num_microbatches, 1)
        for tensor, part in step.part_types.items()
    }

    def body(sums: list[Any], counter: Any) -> tuple[list[Any], list[Any]]:
        parts = {t: part_of(values[t], 0, counter, grains[t]) for t in step.batch}
        found = step.run_part(whole, parts, counter, ())
        by_tensor = {
            each.tensor: value for each, value in zip(step.leaving, found, strict=True)
        }
        added = [
            JOINS[each.reduction](total, by_tensor[each.tensor])
            for total, each in zip(sums, reduced, strict=True)
        ]
        return added, [by_tensor[each.tensor] for each in joined]

    starts = []
    for each in reduced:
        kind = step.graph.tensors[each.tensor].type
        starts.append(start_of(each.reduction, kind.shape, kind.dtype))
    counters = jnp.arange(step.num_microbatches, dtype=jnp.uint32)
    sums, stacked = lax.scan(body, starts, counters)
    values.update(zip((each.tensor for each in reduced), sums, strict=True))
    for each, parts in zip(joined, stacked, strict=True):
        assert each.dim is not None
        size = parts.shape[each.dim + 1] * step.num_microbatches
        grain = step.grain(size, each.copies)
        values[each.tensor] = join_parts(parts, each.dim, grain)
