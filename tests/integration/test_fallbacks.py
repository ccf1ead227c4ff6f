"""On common models, next to nothing is gathered because no rule can split it."""

from typing import Any

import jax
import pytest

from autopar.frontend.tracing import trace
from autopar.graph.build_graph import STRUCTURED, build_graph
from autopar.graph.op_graph import Operator, OpGraph
from autopar.planner.whole_step import roles_of
from autopar.rules.base import factors_of
from benchmarks.models import build

# At their real sizes, with few of the layers that repeat.
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("gpt-125m", "bert-base", "vit-base", "moe-380m"), {"num_layers": 2}
    ),
    **dict.fromkeys(("resnet-50", "wide-resnet-250m"), {"stage_sizes": (1, 1)}),
    **dict.fromkeys(("unet-2d", "unet-3d"), {"num_levels": 2}),
    "lstm": {},
}
QUICK = ("bert-base", "moe-380m", "resnet-50", "lstm")
MOST = 0.01  # of the bytes that a step's operators read


def graph_of_step(name: str, optimizer: str) -> OpGraph:
    workload = build(name, optimizer=optimizer, **MODELS[name])
    traced = trace(workload.step, workload.abstract(), {})
    return build_graph(traced, roles_of(traced))


def bytes_read(graph: OpGraph, op: Operator) -> float:
    kinds = [kind for kind in op.operand_types if not kind.is_extended]
    return sum(kind.bytes for kind in kinds) * graph.blocks[op.block].weight


def cannot_be_split(op: Operator) -> bool:
    """Whether there is no rule, or it offers nothing but whole operands."""
    return not any(factor.splits for factor in factors_of(op) if factor.size != 1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in MODELS
    ],
)
def test_what_falls_back_is_small(name: str) -> None:
    graph = graph_of_step(name, "adamw_clip")
    operators = [op for op in graph.operators() if op.kind not in STRUCTURED]
    unsplit = [op for op in operators if cannot_be_split(op)]
    gathered = sum(bytes_read(graph, op) for op in unsplit)
    whole = sum(bytes_read(graph, op) for op in operators)
    kinds = {op.kind for op in unsplit}
    assert gathered <= MOST * whole, f"{gathered:.3g} of {whole:.3g} B by {kinds}"


def test_what_is_not_split_is_seen() -> None:
    """So that the test above can fail."""

    def step(x: jax.Array) -> jax.Array:
        return jax.numpy.linalg.slogdet(x)[1] + x.sum()

    traced = trace(step, (jax.ShapeDtypeStruct((64, 64), "float32"),), {})
    graph = build_graph(traced, roles_of(traced))
    assert "lu" in {op.kind for op in graph.operators() if cannot_be_split(op)}
