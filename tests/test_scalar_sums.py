"""Sums of scalars of several stages: one number a stage crosses."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.graph.dependencies import tensors_of
from autopar.graph.op_graph import Operator, OpGraph
from autopar.microbatches.retracing import WholeRunner
from autopar.pipelines.step_parts import graph_of
from autopar.pipelines.update_cut import sum_by_stage

VALUES = [np.full((2,), 0.5 + i, np.float32) for i in range(6)]
STAGES = [0, 1, 2, 0, 1, 2]


def sums(*arrays: jax.Array) -> list[jax.Array]:
    """A loss of its own in the middle, and the norm of all."""
    a, b, c, d, e, f = (jnp.sum(x * x) for x in arrays)
    inner = b + c
    return [jnp.sqrt(((a + inner) + (d + e)) + f + 1.0), inner]


def sums_read_once(*arrays: jax.Array) -> list[jax.Array]:
    total = jnp.float32(0.0)
    for x in arrays:
        total = total + jnp.sum(x * x)
    return [jnp.sqrt(total)]


def built(fun: Any) -> tuple[OpGraph, Any]:
    names = [f"x{i}" for i in range(len(VALUES))]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in VALUES]
    outputs = [f"out{i}" for i in range(len(fun(*VALUES)))]
    graph = graph_of(fun, types, names, outputs)
    stage = {i.tensor: s for i, s in zip(graph.inputs, STAGES, strict=True)}

    def stage_of_operator(op: Operator) -> int | None:
        arrays = [t for t in tensors_of(op.operands) if graph.tensors[t].type.shape]
        for t in arrays:
            stage.update(dict.fromkeys(op.results, stage[t]))
        return stage[arrays[0]] if arrays else None

    for op in graph.blocks[0].operators:
        stage_of_operator(op)
    return graph, stage_of_operator


def run(graph: OpGraph) -> list[jax.Array]:
    runner = WholeRunner(graph)
    return runner.run_block(graph.blocks[0], VALUES)


@pytest.mark.parametrize("fun", [sums, sums_read_once])
def test_values_stay_and_operators_are_in_order(fun: Any):
    graph, stage_of_operator = built(fun)
    grouped, stage = sum_by_stage(graph, stage_of_operator)
    grouped.verify()
    assert stage
    np.testing.assert_allclose(run(grouped), run(graph), rtol=1e-6)


def test_every_stage_sends_one_number():
    graph, stage_of_operator = built(sums_read_once)
    grouped, stage = sum_by_stage(graph, stage_of_operator)
    adds = [op for op in grouped.blocks[0].operators if op.kind == "add"]
    assert sorted(stage.values()) == [0, 1, 2]
    made_on = {
        t: stage[op.index] for op in adds if op.index in stage for t in op.results
    }
    last = [op for op in adds if op.index not in stage]
    read = [t for op in last for t in tensors_of(op.operands)]
    assert sorted(made_on[t] for t in read if t in made_on) == [0, 1, 2]


def test_a_sum_that_is_read_elsewhere_is_kept():
    graph, stage_of_operator = built(sums)
    grouped, _ = sum_by_stage(graph, stage_of_operator)
    assert grouped.outputs == graph.outputs


def test_sums_of_one_stage_stay_as_they_are():
    graph, _ = built(sums)
    grouped, stage = sum_by_stage(graph, lambda op: 0)
    assert grouped is graph and not stage
