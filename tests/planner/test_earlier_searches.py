"""A search within another budget goes on from what earlier ones met."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.methods.axes_together import AxesTogether
from autopar.methods.restrictions import Limit, restrict
from autopar.planner import budget_search
from autopar.planner.earlier_searches import EarlierSearches, problem_key
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.plan_within import plan_within_binding
from autopar.planner.planning import roles_of
from autopar.planner.search_work import SearchWork
from autopar.planner.sharding_problem import build_problem
from autopar.sharding.mesh import MeshShape, parse_mesh
from autopar.sharding.resharding import Resharder
from autopar.solver.assignment import Assignment
from benchmarks.models import build
from tests.planner.tiny_gpt import MESH, TINY, gpt

CLUSTER = Cluster.local()


def made(**options: Any) -> OpGraph:
    workload = build("gpt", **{**TINY, **options})
    traced = trace(workload.step, workload.abstract(), {})
    return build_graph(traced, roles_of(traced))


def key(graph: OpGraph, mesh: MeshShape = MESH, *limits: Limit) -> bytes:
    problem = build_problem(graph, mesh, CLUSTER, Resharder(mesh, CLUSTER))
    return problem_key(restrict(problem, limits, CLUSTER))


def test_equal_problems_have_one_key_and_others_have_others() -> None:
    assert key(gpt()) == key(made())
    both = parse_mesh("x:2;y:4")
    keys = {key(gpt()), key(made(num_heads=2)), key(gpt(), both)}
    assert len(keys | {key(gpt(), both, AxesTogether())}) == 4


@pytest.mark.slow
def test_less_is_searched_for_from_what_more_met_with_less_work() -> None:
    """And what was proved of plans met before is a bound on those found alone."""
    workload = build("mlp")
    traced = trace(workload.step, workload.abstract(), {})
    place = build_graph(traced, roles_of(traced)), MESH, CLUSTER
    most, earlier = plan_intra_op(*place).plan.predicted.peak_bytes, EarlierSearches()

    def within(
        part: float, earlier: EarlierSearches | None
    ) -> tuple[Assignment, float]:
        budget, work = int(part * most), SearchWork()
        found = plan_within_binding(*place, budget, work=work, earlier=earlier)
        assert found.plan.predicted.peak_bytes <= budget
        assert found.assignment.gap <= budget_search.BUDGET_GAP
        return found.assignment, work.clock.spent

    within(0.8, earlier)
    (chained, spent), (alone, own_spent) = within(0.77, earlier), within(0.77, None)
    assert 0 < spent < 0.9 * own_spent
    assert chained.bound <= alone.cost * (1 + 1e-9)


def test_the_least_memory_is_known_of_a_search_that_went_on_to_its_end() -> None:
    def least(peak_bytes: int) -> Any:
        return SimpleNamespace(found=SimpleNamespace(peak_bytes=peak_bytes))

    earlier, found = EarlierSearches(), least(100)
    assert earlier.least(b"step", 50) is None
    earlier.keep_least(b"step", 50, found)  # more than is enough: all was tried
    assert earlier.least(b"step", 40) is earlier.least(b"step", 50) is found
    assert earlier.least(b"step", 60) is None  # that ends otherwise
    assert earlier.least(b"step", 100) is found
    assert earlier.least(b"other", 100) is None
    earlier.keep_least(b"step", 110, found)  # it was enough, and less may be there
    assert earlier.least(b"step", 105) is found
    assert earlier.least(b"step", 99) is None
