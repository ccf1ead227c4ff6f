"""What cutting a batch into microbatches means, and the step cut so."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..graph.op_graph import OpGraph
from ..graph.traced_function import Roles, TracedFunction
from ..option_values import MicrobatchSemantics
from .microbatch_independent import independent_step
from .microbatch_step import MicrobatchedStep, exact_step
from .microbatches import split_microbatches


def microbatched(
    trace_part: Callable[[], TracedFunction],
    graph: OpGraph,
    roles: Roles,
    batch: Sequence[int],
    num_microbatches: int,
    semantics: MicrobatchSemantics,
    *,
    sums_stay_apart: bool = False,
) -> MicrobatchedStep:
    """The step of `graph` in microbatches of its `batch` inputs.

    `trace_part` traces it for one microbatch, where that is a batch of its own. With
    `sums_stay_apart`, sums are not added to each other in the loop: the two gradients
    of a tied parameter may belong to different stages.

    Raises:
      ValueError: the batch size is not divisible.
      BatchCoupledError: the step cannot be cut so.
    """
    if semantics == "exact":
        split = split_microbatches(
            graph, batch, num_microbatches, sums_stay_apart=sums_stay_apart
        )
        return exact_step(graph, batch, split)
    return independent_step(
        trace_part,
        graph,
        roles,
        batch,
        num_microbatches,
        sums_stay_apart=sums_stay_apart,
    )
