"""What ZeRO was to split and could not, so that every device holds all of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..errors import FallbackWarning
from ..graph.op_graph import OpGraph
from ..plans.plan import ShardingPlan
from .named_methods import Zero, restriction_of
from .restrictions import WHOLE

# Biases and counters are whole in many steps; what they cost is not worth a word.
_NOTABLE = 0.05
_NUM_SHOWN = 3


def warn_unsplit_state(
    method: object, graph: OpGraph, plan: ShardingPlan, batch: Sequence[int]
) -> None:
    """Says which state no mesh axis divides, if it is a notable part of a device's.

    Does nothing for other methods than ZeRO. `batch` are the tensors whose dim 0 is the
    batch.
    """
    if not isinstance(method, Zero):
        return
    homes = restriction_of(method, graph, plan.mesh, batch).homes
    state = [
        (each, homes[graph_input.tensor])
        for each, graph_input in zip(plan.inputs, graph.inputs, strict=True)
        if each.role == "state"
    ]
    whole = [
        each
        for each, demand in state
        if WHOLE not in demand and all(axis < 0 for axis in each.spec) and each.shape
    ]
    whole_bytes = sum(each.bytes for each in whole)
    held_bytes = sum(each.bytes for each, _ in state)
    if whole_bytes <= _NOTABLE * held_bytes:
        return
    parts = plan.mesh.size
    largest = sorted(whole, key=lambda each: -each.bytes)[:_NUM_SHOWN]
    names = ", ".join(f"{each.path} {list(each.shape)}" for each in largest)
    warnings.warn(
        f"ZeRO splits a tensor by a dim that the {parts} devices of {plan.mesh} "
        f"divide, but of {names} they divide none: every device holds all of "
        f"it, {whole_bytes:,} of {held_bytes:,} B of state, and not "
        f"{whole_bytes // parts:,} B. Make a dim a multiple of {parts}, or use a mesh "
        f"whose axes divide one.",
        FallbackWarning,
        stacklevel=2,
    )
