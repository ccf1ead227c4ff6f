"""What operators read and what leads to a tensor, against a search of the graph."""

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import pytest

from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.dependencies import leading_to, read_by, tensors_of
from autopar.graph.op_graph import Constant, Operator, OpGraph
from autopar.planner.whole_step import roles_of


def function(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    a = jnp.sin(x) * 2.0
    b = jnp.cos(y)
    return a @ b + a, jnp.exp(b)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    traced = trace(function, (np.ones((4, 4), np.float32),) * 2, {})
    return build_graph(traced, roles_of(traced))


@pytest.mark.parametrize("first", [0, 2])
def test_what_leads_to_an_output_is_what_a_search_finds(
    graph: OpGraph, first: int
) -> None:
    """From some operator on: what is made before ends the way."""
    operators = graph.operators()[first:]
    edges = networkx.DiGraph()
    for op in operators:
        edges.add_edges_from((t, op) for t in tensors_of(op.operands))
        edges.add_edges_from((op, t) for t in op.results)
    for output in graph.outputs:
        assert isinstance(output, int)
        above = networkx.ancestors(edges, output)
        wanted = [op for op in operators if op in above]
        assert [*leading_to([output], operators)] == wanted
        assert len(wanted) < len(operators)


def test_literals_are_not_read(graph: OpGraph) -> None:
    (scaled,) = (op for op in graph.operators() if op.kind == "mul")
    assert any(isinstance(operand, Constant) for operand in scaled.operands)
    assert len(read_by([scaled])) == 1
    assert [graph.type_of(o) for o in scaled.operands] == [*scaled.operand_types]


def test_each_reading_counts(graph: OpGraph) -> None:
    operators: tuple[Operator, ...] = graph.operators()
    expected = sum(len(tensors_of(op.operands)) for op in operators)
    assert len(read_by(operators)) == expected > len({*read_by(operators)})
