"""A problem is arrays of few patterns; vertices and edges are made when looked at."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.costs.resharding import Resharder
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import STRUCTURED, build_graph
from autopar.graph.op_graph import OpGraph
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.planner.whole_step import roles_of
from autopar.sharding.mesh import parse_mesh
from autopar.solver.choice_graph import ChoiceGraph, TypedEdges, TypedNodes
from benchmarks.models import build
from tests.marks import slow
from tests.solver.valid_graph import assert_valid

STEPS = ("gpt", "gpt, scan", slow("gpt, remat"))


@lru_cache
def _graph(step: str, num_layers: int = 2) -> OpGraph:
    options: dict[str, Any] = {
        "scan_layers": step == "gpt, scan",
        "remat": step == "gpt, remat",
    }
    workload = build("gpt", num_layers=num_layers, **options)
    traced = trace(workload.step, workload.abstract(), {})
    return build_graph(traced, roles_of(traced))


@lru_cache
def _problem(step: str, num_layers: int = 2) -> ShardingProblem:
    cluster = Cluster.preset("1x8xH100")
    mesh = parse_mesh("x:2;y:4", cluster.num_devices)
    resharder = Resharder(mesh, cluster)
    graph = _graph(step, num_layers)
    return build_problem(graph, mesh, cluster, resharder)


@pytest.mark.parametrize("step", STEPS)
def test_vertices_read_and_write_what_their_operators_do(step: str) -> None:
    problem = _problem(step)
    by_index = {op.index: op for op in problem.graph.operators()}
    met = []
    for vertex in problem.vertices:
        if vertex.operator is None:
            continue
        op = by_index[vertex.operator]
        met.append(op.index)
        assert vertex.name == op.name and vertex.strategies is not None
        assert len(vertex.strategies) == len(vertex.seconds) == len(vertex.bytes)
        assert [access.tensor for access in vertex.writes] == list(op.results)
        assert [(access.tensor, access.site) for access in vertex.reads] == [
            (operand, ("operand", op.index, position))
            for position, operand in enumerate(op.operands)
            if isinstance(operand, int)
        ]
        for k, access in enumerate(vertex.writes):
            specs = vertex.strategies.result_specs[:, k]
            np.testing.assert_array_equal(access.choices.specs, specs)
    plain = [op.index for op in problem.graph.operators() if op.kind not in STRUCTURED]
    assert met == plain


@pytest.mark.parametrize("step", STEPS)
def test_edges_lead_from_writers_by_relays_to_readers(step: str) -> None:
    """Every resharding that can cost anything has an edge, in a fixed order."""
    problem = _problem(step)
    expected = list(_pairs(problem))
    found = [(edge.first, edge.second) for edge in problem.choice_graph.edges]
    left = iter(expected)  # those of tensors that nobody reshards cost nothing
    assert all(pair in left for pair in found)
    assert len(found) > 0.5 * len(expected)


def _pairs(problem: ShardingProblem) -> Iterator[tuple[int, int]]:
    readers: dict[int, list[int]] = {}
    for index, vertex in enumerate(problem.vertices):
        for access in vertex.reads:
            if vertex.kind != "relay":
                readers.setdefault(access.tensor, []).append(index)
    for tensor, each in readers.items():
        writer, access = problem.writer(tensor)
        assert access.tensor == tensor
        assert len(each) == 1 or tensor in problem.relays
        source = problem.relays.get(tensor, writer)
        if source != writer:
            yield writer, source
        for reader in each:
            if reader != source:
                yield source, reader


@pytest.mark.parametrize("step", STEPS)
def test_an_edge_names_the_write_and_the_read_that_it_joins(step: str) -> None:
    problem = _problem(step)
    writes, reads = problem.columns.writes, problem.columns.reads
    edges = problem.choice_graph.edges
    assert len(edges) == len(problem.edge_writes) == len(problem.edge_reads)
    places = zip(problem.edge_writes, problem.edge_reads, strict=True)
    for edge, (write, read) in zip(edges, places, strict=True):
        assert (edge.first, edge.second) == (writes.vertex[write], reads.vertex[read])
        assert writes.tensor[write] == reads.tensor[read]
        sources = problem.columns.choices[writes.choices[write]]
        targets = problem.columns.choices[reads.choices[read]]
        assert edge.costs.shape == (len(sources.distinct), len(targets.distinct))
        np.testing.assert_array_equal(edge.first_class, sources.classes)
        np.testing.assert_array_equal(edge.second_class, targets.classes)


@pytest.mark.parametrize("step", STEPS)
def test_types_are_those_of_the_same_graph_of_objects(step: str) -> None:
    graph = _problem(step).choice_graph
    assert isinstance(graph.nodes, TypedNodes) and isinstance(graph.edges, TypedEdges)
    plain = ChoiceGraph(tuple(graph.nodes), tuple(graph.edges))
    for name in ("node", "node_of", "edge", "edge_of", "first", "second"):
        np.testing.assert_array_equal(
            getattr(graph.types, name), getattr(plain.types, name)
        )
    assert graph.num_choices == plain.num_choices
    assert_valid(plain)


def test_what_is_built_does_not_grow_with_depth() -> None:
    few, many = (_problem("gpt", num_layers=n) for n in (2, 4))
    assert len(many.vertices) > 1.5 * len(few.vertices)
    assert len(many.columns.patterns) == len(few.columns.patterns)
    edges = [problem.choice_graph.edges for problem in (few, many)]
    assert isinstance(edges[0], TypedEdges) and isinstance(edges[1], TypedEdges)
    assert len(edges[1].types) == len(edges[0].types)


def test_columns_tell_operators_apart_by_all_but_names() -> None:
    columns = _graph("gpt").columns
    for op, number in zip(columns.operators, columns.alike.tolist(), strict=True):
        example = columns.operators[columns.examples[number]]
        assert (op.kind, op.params) == (example.kind, example.params)
        assert op.operand_types == example.operand_types
        assert op.result_types == example.result_types
    assert len(columns.examples) < len(columns.operators) / 2


def _problem_of(step: Any) -> ShardingProblem:
    args = [jax.ShapeDtypeStruct((8,), np.float32)] * step.__code__.co_argcount
    traced = trace(step, args, {})
    graph = build_graph(traced, roles_of(traced))
    cluster = Cluster.preset("1x8xH100")
    mesh = parse_mesh("x:8", cluster.num_devices)
    return build_problem(graph, mesh, cluster, Resharder(mesh, cluster))


@pytest.mark.parametrize("step", [lambda x: 2.0, lambda: 2.0, lambda x: x])
def test_a_step_may_read_nothing(step: Any) -> None:
    assert len(_problem_of(step).vertices) <= 2


def test_what_makes_a_tensor_is_known_also_where_nobody_reads_it() -> None:
    problem = _problem_of(lambda x, y: jax.lax.top_k(x, 2)[0])
    (op,) = problem.graph.operators()
    given = [each.tensor for each in problem.graph.inputs]
    assert len(op.results) == len(given) == 2, "of which one is read"
    for tensor in (*op.results, *given):
        vertex, access = problem.writer(tensor)
        assert access.tensor == tensor
        assert tensor in [each.tensor for each in problem.vertices[vertex].writes]
