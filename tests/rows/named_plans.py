"""Plans that other systems have a name for, as the same problem with less choice."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pulp

from autopar.clusters.cluster import Cluster
from autopar.costs.resharding import Resharder
from autopar.frontend.roles import infer_roles
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph, tensor_type
from autopar.graph.op_graph import OpGraph
from autopar.planner.intra_op import read_plan
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.planner.strategies import strategy_seconds
from autopar.planner.vertices import Vertex
from autopar.sharding.mesh import MeshLike, MeshShape, parse_mesh
from autopar.sharding.spec import REPLICATED
from autopar.solver import Assignment, solve
from autopar.solver.clock import Clock
from autopar.solver.ilp import _Program
from autopar.steps.parallel_plan import Plan
from tests.rows.fixtures import Case


def graph_of(case: Case) -> OpGraph:
    """The operator graph that `autopar.parallelize` plans."""
    traced = trace(case.step, case.args, {})
    jaxpr = traced.jaxpr.jaxpr
    inputs = [tensor_type(var.aval) for var in jaxpr.invars]
    outputs = [tensor_type(var.aval) for var in jaxpr.outvars]
    trees = traced.in_tree, traced.out_tree
    return build_graph(traced, infer_roles(*trees, inputs, outputs, traced.input_paths))


def problem_of(
    case: Case, mesh: MeshLike, cluster: Cluster | None = None
) -> ShardingProblem:
    """The problem that `autopar.parallelize` solves."""
    shape, cluster = parse_mesh(mesh), cluster or Cluster.local()
    return build_problem(graph_of(case), shape, cluster, Resharder(shape, cluster))


def plan_of_layout(
    case: Case,
    mesh: MeshLike,
    layout: Mapping[int, str],
    cluster: Cluster | None = None,
) -> Plan:
    """The cheapest plan under a layout of Mesh-TensorFlow.

    Args:
      case: a function whose dims have distinct sizes.
      mesh: the devices.
      layout: the mesh axis that splits the dims of a size, in every tensor that has
        one. Elsewhere an axis splits nothing: the tensor is whole or owes a sum. Work
        may be repeated on devices.
      cluster: the local one if left out.
    """
    cluster = cluster or Cluster.local()
    problem = problem_of(case, mesh, cluster)
    vertices = [_restricted(v, problem, layout, cluster) for v in problem.vertices]
    seconds = [vertex.seconds for vertex in vertices]
    return _solved(problem.with_seconds(seconds, np.arange(len(seconds))), cluster)


def plan_within(case: Case, mesh: MeshLike, state_bytes: int) -> Plan:
    """The cheapest plan whose state takes at most `state_bytes` on each device."""
    problem = problem_of(case, mesh)
    inputs = [i for i in problem.graph.inputs if i.role == "state"]
    homes = tuple(problem.writer(i.tensor)[0] for i in inputs)
    graph = problem.choice_graph
    program = _Program(graph, inf, Clock(), inf)
    program.problem += (
        pulp.lpSum(
            float(held / state_bytes) * chosen
            for node in homes
            for chosen, held in zip(
                program.x[node], graph.nodes[node].bytes, strict=True
            )
        )
        <= 1
    )
    found = program.run(0.0, 60.0)
    assert found.choices is not None, "no plan has state of so few bytes"
    return _read(problem, Assignment(found.choices, found.bound, found.bound))


def _solved(problem: ShardingProblem, cluster: Cluster | None = None) -> Plan:
    return _read(problem, solve(problem.choice_graph, gap=0.0), cluster)


def _read(
    problem: ShardingProblem, assignment: Assignment, cluster: Cluster | None = None
) -> Plan:
    cluster = cluster or Cluster.local()
    resharder = Resharder(problem.mesh, cluster)
    return Plan(read_plan(problem, assignment, cluster, resharder))


def _restricted(
    vertex: Vertex,
    problem: ShardingProblem,
    layout: Mapping[int, str],
    cluster: Cluster,
) -> Vertex:
    seconds = vertex.seconds
    if vertex.operator is not None and vertex.strategies is not None:
        by_index = {op.index: op for op in problem.graph.operators()}
        op = by_index[vertex.operator]
        weight = problem.graph.blocks[op.block].weight
        seconds = strategy_seconds(op, vertex.strategies, problem.mesh, cluster)
        seconds = seconds * weight
    allowed = np.ones(len(seconds), bool)
    for access in (*vertex.writes, *vertex.reads):
        sizes = problem.graph.tensors[access.tensor].type.shape
        wanted = _split_dims(sizes, problem.mesh, layout)
        for axis, dim in enumerate(wanted):
            states = access.choices.specs[:, axis]
            allowed &= states <= REPLICATED if dim is None else states == dim
    assert allowed.any(), f"no choice of {vertex.name} has the layout {layout}"
    return replace(vertex, seconds=np.where(allowed, seconds, np.inf))


def _split_dims(
    sizes: Sequence[int], mesh: MeshShape, layout: Mapping[int, str]
) -> list[int | None]:
    axes = [layout.get(size) for size in sizes]
    return [axes.index(name) if name in axes else None for name in mesh.axis_names]
