"""A perceptron, and a scanned and recomputed GPT; the cheapest plans on 8 devices."""

from functools import cache
from typing import Any

from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.planner.intra_op import IntraOpSolution, plan_intra_op
from autopar.planner.whole_step import roles_of
from autopar.sharding.mesh import parse_mesh
from benchmarks.models import Workload, build

SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"num_layers": 2},
    "gpt": {
        "num_layers": 2,
        "batch_size": 8,
        "seq_len": 16,
        "hidden": 32,
        "num_heads": 4,
        "vocab_size": 64,
        "scan_layers": True,
        "remat": True,
    },
}
MESH = parse_mesh("x:8")


def workload(model: str) -> Workload:
    return build(model, **SIZES[model])


@cache
def graph(model: str) -> OpGraph:
    traced = trace(workload(model).step, workload(model).abstract(), {})
    return build_graph(traced, roles_of(traced))


@cache
def free(model: str) -> IntraOpSolution:
    return plan_intra_op(graph(model), MESH, Cluster.local())
