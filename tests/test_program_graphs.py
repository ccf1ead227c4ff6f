"""Graphs of stage programs are parts of the step's, as tracing them again gives."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.graph.op_graph import OpGraph
from autopar.options import check_options
from autopar.pipelines.cut_programs import program_graph, traced
from autopar.pipelines.pipeline_plan import PlannedPipeline, plan_pipeline
from autopar.pipelines.program_plans import fingerprint
from benchmarks.models import build


def names_of(graph: OpGraph) -> tuple[Any, ...]:
    """All that a plan says of a graph in words, but for source lines."""
    return (
        graph.name,
        graph.output_paths,
        graph.inputs,
        tuple((tensor.name, tensor.type) for tensor in graph.tensors),
        tuple((op.name, op.index, op.block) for op in graph.operators()),
    )


def planned(step: Any, given: Any, method: autopar.PipelineParallel) -> PlannedPipeline:
    options = check_options(method=method, cluster=Cluster.preset("1x8xV100"))
    return plan_pipeline(step, given, {}, method, options)


@pytest.mark.parametrize(
    ("model", "config", "schedule"),
    [
        ("gpt", {"num_layers": 3, "remat": True, "optimizer": "sgd"}, "zb_h1"),
        ("t5", {"num_layers": 2}, "1f1b"),
        ("unet", {}, "gpipe"),
    ],
)
def test_parts_of_the_graph_are_what_tracing_gives(
    model: str, config: dict[str, Any], schedule: Any
):
    workload = build(model, **config)
    method = autopar.PipelineParallel(3, 2, schedule, stage_meshes=["x:1"] * 3)
    found = planned(workload.step, workload.abstract(), method)
    for each in found.programs:
        program, parts = each.cut, found.made.parts
        graph = parts.apply if program.kind == "apply" else parts.microbatch
        ties = tuple(i.output for i in each.graph.inputs)
        quick = program_graph(program, graph, ties)
        slow = traced(program, graph, ties)
        assert names_of(quick) == names_of(slow)
        assert fingerprint(quick) == fingerprint(slow)
        for own, other in zip(quick.operators(), slow.operators(), strict=True):
            assert other.source in ("", own.source) or "cut_programs" in other.source
            assert own.eqn.primitive is other.eqn.primitive


def test_barriers_of_calls_and_literals_are_traced():
    """What tracing changes is not taken as it is: nothing is lost on the way."""

    def step(w: jax.Array, count: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        def loss(w: jax.Array) -> jax.Array:
            hidden = jax.checkpoint(lambda w: jnp.tanh(x @ w[0]))(w)
            return jnp.mean((hidden @ w[1]) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, jnp.int32(7), value

    w, x = jnp.ones((2, 8, 8)), jnp.ones((16, 8))
    run = autopar.parallelize(step, method=autopar.PipelineParallel(2, 2))
    found = run(w, jnp.int32(0), x)
    for own, other in zip(found, jax.jit(step)(w, jnp.int32(0), x), strict=True):
        assert jnp.allclose(own, other, rtol=1e-5)
