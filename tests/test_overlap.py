"""What of communication a step waits for, by the cluster's visible fraction."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.overlap import visible_fractions
from autopar.plans.plan import ShardingPlan
from autopar.sharding.mesh import parse_mesh
from benchmarks.models import build
from benchmarks.plan_price import plan_seconds
from tests.rows.fixtures import Case, f1
from tests.rows.named_plans import graph_of
from tests.rows.test_fairscale import f2


def cluster_with(fraction: float) -> Cluster:
    return replace(Cluster.preset("8xCPU"), visible_fraction=fraction)


def planned(case: Case, method: Any, fraction: float) -> ShardingPlan:
    step = autopar.parallelize(
        case.step, mesh="x:8", method=method, cluster=cluster_with(fraction)
    )
    return step.plan(*case.args).sharding


@pytest.mark.parametrize("method", [autopar.DataParallel(), autopar.Zero(3)])
def test_gradients_and_parameters_are_waited_for_in_part(method: Any) -> None:
    case = f2(optax.adam(1e-2, eps=1e-3))
    whole, half = (planned(case, method, fraction) for fraction in (1.0, 0.5))
    assert half.collectives == whole.collectives
    assert half.predicted.compute_seconds == whole.predicted.compute_seconds
    loss_seconds = 1e-4  # its sum is waited for in full
    assert half.predicted.collective_seconds == pytest.approx(
        whole.predicted.collective_seconds / 2, abs=loss_seconds
    )


def test_activations_are_waited_for_in_full() -> None:
    """Megatron's sums of activations reach another product each."""
    case, method = f2(optax.adam(1e-2, eps=1e-3)), autopar.Megatron(tensor=8)
    whole, half = (planned(case, method, fraction) for fraction in (1.0, 0.5))
    assert whole.collectives
    assert half.predicted.collective_seconds == whole.predicted.collective_seconds


def test_the_cotangent_of_a_loop_is_waited_for_in_full() -> None:
    """It is carried from layer to layer, and read by the products of the next."""
    workload = build("gpt", num_layers=2, scan_layers=True)
    graph = graph_of(Case(workload.step, workload.abstract()))
    fractions = visible_fractions(graph, cluster_with(0.5))
    loops = [op for op in graph.operators() if op.kind == "scan"]
    backward = loops[-1]
    body = graph.blocks[backward.bodies[0]]
    count = backward.params["num_carry"]
    carried = [
        body.outputs[position]
        for position in range(count)
        if len(backward.result_types[position].shape) >= 3
    ]
    stacked = [o for o in body.outputs[count:] if isinstance(o, int)]
    assert carried and stacked
    assert {fractions[o] for o in carried if isinstance(o, int)} == {1.0}
    assert {fractions[o] for o in stacked} == {0.5}


def test_the_solver_chooses_by_what_is_waited_for() -> None:
    """Data parallelism becomes the better plan once its gradients are hidden."""

    def kinds(fraction: float) -> set[str]:
        case = f1(batch=768)
        cluster = cluster_with(fraction)
        plan = plan_intra_op(graph_of(case), parse_mesh("x:8"), cluster).plan
        return {str(each.spec) for each in plan.inputs if each.role == "batch"}

    assert kinds(1.0) != kinds(0.05)


def test_a_plan_is_priced_as_it_was_predicted() -> None:
    case = f2(optax.adam(1e-2, eps=1e-3))
    cluster = cluster_with(0.3)
    graph = graph_of(case)
    plan = plan_intra_op(graph, parse_mesh("x:8"), cluster).plan
    seconds = plan_seconds(graph, plan, cluster)
    assert seconds == pytest.approx(plan.predicted.step_seconds)


def test_nothing_is_hidden_unless_the_cluster_says_so() -> None:
    graph = graph_of(f1())
    assert Cluster.local().visible_fraction == 1.0
    assert set(visible_fractions(graph, Cluster.local())) == {1.0}


def test_a_step_without_state_waits_for_everything() -> None:
    case = Case(lambda x: jnp.tanh(x @ x.T), (jnp.ones((8, 8)),))
    assert set(visible_fractions(graph_of(case), cluster_with(0.5))) == {1.0}
    assert np.isfinite(jax.tree.leaves(case.step(*case.args))[0]).all()
