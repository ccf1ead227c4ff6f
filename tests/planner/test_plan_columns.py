"""Plans of operators and tensors are made when looked at, and read as tuples."""

import pickle
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.whole_step import roles_of
from autopar.plans.plan import OperatorPlan, ShardingPlan, total_bytes
from autopar.plans.plan_columns import (
    Collectives,
    OperatorPlans,
    TensorPlans,
    bytes_in,
    factors_of,
    works_of,
)
from autopar.sharding.mesh import parse_mesh
from benchmarks.models import build


@lru_cache
def _plan() -> ShardingPlan:
    workload = build("gpt", num_layers=2, scan_layers=True)
    traced = trace(workload.step, workload.abstract(), {})
    cluster = Cluster.preset("1x8xH100")
    mesh = parse_mesh("x:2;y:4", cluster.num_devices)
    graph = build_graph(traced, roles_of(traced))
    return plan_intra_op(graph, mesh, cluster).plan


def _as_tuples(plan: ShardingPlan) -> ShardingPlan:
    return replace(
        plan,
        operators=tuple(plan.operators),
        tensors=tuple(plan.tensors),
        inputs=tuple(plan.inputs),
        collectives=tuple(plan.collectives),
    )


def test_bytes_are_those_of_all_arguments_and_collectives() -> None:
    plan = _plan()
    listed = _as_tuples(plan)
    assert isinstance(plan.collectives, Collectives)
    assert plan.collectives.total_bytes == total_bytes(listed.collectives) > 0
    assert bytes_in(plan.inputs, "device") == bytes_in(listed.inputs, "device") > 0
    assert bytes_in(plan.inputs, "host") == bytes_in(listed.inputs, "host") == 0


def test_planning_makes_no_plan_of_a_tensor_that_stays_as_it_is_made() -> None:
    made: list[int] = []

    class Counted(TensorPlans):
        def item(self, index: int) -> object:  # type: ignore[override]
            made.append(index)
            return super().item(index)

    tensors = _plan().tensors
    assert isinstance(tensors, TensorPlans)
    own = Counted(tensors.graph, tensors.specs, tensors.made, tensors.copies)
    assert own[3] == tensors[3] and made == [3]
    assert len(own) == len(tensors.graph.tensors) and made == [3]
    assert tuple(own) == tuple(tensors) and len(made) == 1 + len(own)
    assert tuple(own) and len(made) == 1 + len(own), "each once"


@pytest.mark.parametrize("name", ["operators", "tensors", "inputs", "collectives"])
def test_they_are_equal_to_tuples_of_the_same(name: str) -> None:
    plan = _plan()
    own = getattr(plan, name)
    assert not isinstance(own, tuple)
    each = tuple(own)
    assert own == each and each == own and hash(own) == hash(each)
    assert own != each[1:] and own[-1] == each[-1] and own[:2] == each[:2]
    changed = {"inputs": "path", "collectives": "dtype"}.get(name, "name")
    other = replace(each[0], **{changed: "another"})
    assert own != (other, *each[1:])
    assert plan == _as_tuples(plan)


def test_a_plan_is_pickled_without_the_graph_it_is_of() -> None:
    plan = _plan()
    loaded = pickle.loads(pickle.dumps(plan))
    assert loaded == plan
    assert type(loaded.operators) is type(loaded.tensors) is tuple


def test_operators_of_one_kind_share_their_work() -> None:
    plan = _plan()
    operators = plan.operators
    assert isinstance(operators, OperatorPlans)
    assert len(operators.works) < len(operators)
    assert operators.seconds == sum(each.seconds for each in tuple(operators))
    assert operators.seconds == plan.predicted.compute_seconds
    names, number = factors_of(operators)
    listed: list[OperatorPlan] = list(operators)
    assert [names[k] for k in number] == [each.factors for each in listed]
    names, number = factors_of(listed)
    assert [names[k] for k in number] == [each.factors for each in listed]
    rows = np.array([5, 0, len(listed) - 1])
    for some in (operators, listed):
        works = works_of(some, rows)
        assert [(w.flops, w.split) for w in works] == [
            (listed[k].flops, listed[k].split) for k in rows
        ]
