"""Of equal stage programs one is traced; the others have its graph under own names."""

from typing import Any

import autopar
from autopar.clusters.cluster import Cluster
from autopar.graph.op_graph import OpGraph
from autopar.options import check_options
from autopar.pipelines.equal_programs import fingerprint
from autopar.pipelines.piece_graphs import PieceGraphs
from autopar.pipelines.pipeline_plan import plan_pipeline
from benchmarks.models import build


def names_of(graph: OpGraph) -> tuple[Any, ...]:
    """All that a plan says of a graph in words."""
    return (
        graph.name,
        graph.output_paths,
        tuple(each.path for each in graph.inputs),
        tuple(tensor.name for tensor in graph.tensors),
        tuple((op.name, op.source, op.index, op.block) for op in graph.operators()),
    )


def test_equal_programs_have_the_graphs_that_tracing_gives():
    """A layer a stage, with backward and weight tasks: those between are equal."""
    workload = build("gpt", num_layers=5, remat=True, optimizer="sgd")
    method = autopar.PipelineParallel(5, 2, "zb_h1", stage_meshes=["x:1"] * 5)
    rest: Any = dict.fromkeys(("mesh", "plan", "pins", "rules", "memory_budget"))
    options = check_options(
        **rest,
        method=method,
        cluster=Cluster.preset("1x8xV100"),
        num_microbatches=None,
        batch_argnums="auto",
        static_argnums=(),
        donate_argnums="auto",
    )
    found = plan_pipeline(workload.step, workload.abstract(), {}, method, options)
    shared, kinds = PieceGraphs(), list[str]()
    for each in found.pieces:
        piece, parts = each.piece, found.parts
        graph = parts.apply if piece.kind == "apply" else parts.microbatch
        ties = tuple(i.output for i in each.graph.inputs)
        before = len(shared.known)
        quick = shared.of(piece, graph, ties)
        fresh = PieceGraphs().of(piece, graph, ties)
        assert names_of(quick.graph) == names_of(fresh.graph)
        assert fingerprint(quick.graph) == fingerprint(fresh.graph)
        assert (quick.inputs, quick.structs) == (fresh.inputs, fresh.structs)
        kinds.extend([piece.kind] * (len(shared.known) == before))
    assert {"forward", "backward", "weight"} <= set(kinds)
    assert len(kinds) < len(found.pieces) - 4  # the first and the last stage differ
