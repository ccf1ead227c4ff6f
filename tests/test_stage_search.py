"""Stages that the planner finds: their values are those of one device, they fit."""

from dataclasses import replace
from math import inf
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from autopar.api import parallelize
from autopar.clusters.cluster import Cluster
from autopar.errors import InfeasiblePlanError
from autopar.methods.methods import PipelineParallel, ShardParallel
from autopar.pipelines.layers import ForwardOrder, find_layers, smallest_window
from autopar.pipelines.pipeline_plan import plan_pipeline
from tests.integration.trainings import assert_trains_as_one_device, encoder_decoder
from tests.rows.fixtures import dense_stack, random
from tests.rows.running import run_pipeline_as_planned
from tests.test_pipeline_plan import arguments as tanh_args
from tests.test_pipeline_plan import step as tanh_step


def two_hosts(ratio: float = 100.0) -> Cluster:
    """Two hosts of four devices; links inside are `ratio` times those between."""
    cluster = Cluster.preset("2x4xV100")
    inner = replace(
        cluster.host_link, bandwidth=1e11, efficiency=1.0, alpha_seconds=1e-6
    )
    outer = replace(inner, bandwidth=1e11 / ratio)
    return replace(cluster, host_link=inner, network_link=outer)


def test_stages_that_were_searched_are_planned_again_as_they_are():
    method = PipelineParallel(num_microbatches=2)
    step = parallelize(tanh_step, cluster=two_hosts(), method=method)
    plan = step.plan(*tanh_args(256))
    assert len(plan.stages.meshes) >= 2
    assert sum(plan.stages.stage_products) == 4
    again = parallelize(tanh_step, cluster=two_hosts(), plan=plan)
    assert again.plan(*tanh_args(256)).stages.programs == plan.stages.programs


@pytest.mark.slow
def test_a_gap_is_known_where_stages_were_searched():
    """A pipeline is at most as far above its bound as all in one stage would be."""
    case = dense_stack(512, 256)
    step = parallelize(case.step, cluster=two_hosts())  # takes a pipeline
    auto = step.plan(*case.args)
    one = parallelize(case.step, cluster=two_hosts(), method=ShardParallel())
    seconds, gap = auto.predicted.step_seconds, auto.predicted.optimality_gap
    most = one.plan(*case.args).predicted.step_seconds / seconds - 1
    assert 0 <= gap < min(most, 0.2)
    assert f"at most {gap:.3%} from the optimum" in str(auto)


def test_given_stages_have_the_bound_of_their_problems():
    """But for sends and the update, nothing is to gain where stages are equal."""
    gaps = {}
    for schedule in ("1f1b", "zb_h1"):
        method = PipelineParallel(2, 4, schedule=schedule)
        plan = parallelize(tanh_step, method=method).plan(*tanh_args())
        gaps[schedule] = plan.predicted.optimality_gap
        again = parallelize(tanh_step, plan=plan).plan(*tanh_args())
        gap = again.predicted.optimality_gap
        assert gap == pytest.approx(plan.predicted.optimality_gap, abs=1e-9)
    assert 0 <= gaps["1f1b"] < 1 and 0 <= gaps["zb_h1"] < 2
    rows = ["0F0 0F1 0B0 0B1 0A", "1F0 1B0 1F1 1B1 1A"]
    own = PipelineParallel(2, 2, schedule=lambda stages, number: rows)
    plan = parallelize(tanh_step, method=own).plan(*tanh_args())
    assert plan.predicted.optimality_gap == inf


@pytest.mark.slow  # two steps of AdamW in each of several stages are compiled
def test_an_encoder_and_a_decoder_are_searched_together():
    """Both towers are cut where the search says; the decoder reads the encoder's end
    on every stage that holds a part of it."""
    training = encoder_decoder(num_layers=4)
    step, state, batch = training
    method = PipelineParallel(num_microbatches=4)
    plan = parallelize(step, cluster=two_hosts(), method=method).plan(state, batch)
    homes = {
        name: {
            program.stage
            for program in plan.stages.programs
            if program.kind == "apply"
            for each in program.sharding.inputs
            if f"['{name}']" in each.path and each.path.startswith("state[0]")
        }
        for name in ("encoder", "decoder")
    }
    assert homes["encoder"] and homes["decoder"]
    assert max(homes["encoder"]) <= min(homes["decoder"])
    assert max(homes["decoder"]) >= plan.stages.num_stages - 2  # the head comes behind
    assert_trains_as_one_device(training, 2, cluster=two_hosts(), method=method)


def scanned(num_layers: int) -> Any:
    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, params["w"])
            return jnp.square(y @ params["head"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {"w": random(0, num_layers, 64, 64, scale=0.1), "head": random(1, 64, 32)}
    return step, params, random(2, 32, 64)


@pytest.mark.slow
def test_scans_over_layers_are_cut_where_the_search_says():
    step, params, x = scanned(3)
    method = PipelineParallel(num_microbatches=2)
    function: Any = parallelize(step, method=method, cluster=two_hosts())
    plan = function.plan(params, x)
    assert plan.stages.num_microbatches == 2
    assert sum(plan.stages.stage_products) == 4


def test_stages_have_the_products_that_are_asked_for():
    step, params, x = scanned(5)
    method = PipelineParallel(2, 2, stage_products=(2, 4))
    function: Any = parallelize(step, method=method)
    plan = function.plan(params, x)
    assert plan.stages.stage_products == (2, 4)
    lengths = {
        i.shape[0]
        for each in plan.stages.programs
        if each.kind == "forward"
        for i in each.sharding.inputs
        if "'w'" in i.path
    }
    assert lengths == {2, 3}
    wrong = PipelineParallel(2, 2, stage_products=(2, 3))
    with pytest.raises(ValueError, match="6 in all"):
        cast("Any", parallelize(step, method=wrong)).plan(params, x)


def test_rematerialised_layers_are_not_cut():
    """Unrolled, each layer's backward begins with a barrier over all its parameters."""

    @jax.checkpoint
    def block(y: jax.Array, w: Any) -> jax.Array:
        return y + jnp.tanh(jnp.tanh(y @ w[0]) @ w[1]) @ w[2]

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y = x
            for w in params:
                y = block(y, w)
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = [[random(3 * i + j, 32, 32, scale=0.1) for j in range(3)] for i in (0, 1)]
    x = random(9, 16, 32)
    found, even = (
        parallelize(step, method=PipelineParallel(2, 2, stage_products=products))
        .plan(params, x)
        .stages.programs
        for products in (None, (3, 3))
    )
    assert found == even
    wrong = PipelineParallel(2, 2, stage_products=(2, 4))
    with pytest.raises(ValueError, match="rematerialised layer"):
        parallelize(step, method=wrong).plan(params, x)


def test_equal_stages_are_planned_once(monkeypatch: pytest.MonkeyPatch):
    from autopar.pipelines import program_plans

    calls = []
    solve = program_plans.plan_intra_op
    monkeypatch.setattr(
        program_plans,
        "plan_intra_op",
        lambda *a, **k: calls.append(a[0].name) or solve(*a, **k),
    )
    method = PipelineParallel(4, 2)
    stages = parallelize(tanh_step, method=method).plan(*tanh_args()).stages
    assert len(stages.programs) == 12
    assert not [name for name in calls if name.endswith("_2")]  # as stage 1
    one, two = (stages.of_stage(stage)[0].sharding for stage in (1, 2))
    assert [i.path for i in one.inputs] != [i.path for i in two.inputs]
    assert [i.spec for i in one.inputs] == [i.spec for i in two.inputs]


def test_the_state_of_a_stage_lies_in_as_many_parts_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
):
    """What a budget asks of stages that do not fit."""
    from autopar.pipelines import pipeline_choice

    def split_all(call: Any, method: Any, options: Any, _: Any) -> Any:
        fun, args, kwargs = call
        return plan_pipeline(fun, args, kwargs, method, options, split={0, 1})

    args = tanh_args(1024)
    method = PipelineParallel(2, 2)
    monkeypatch.setattr(pipeline_choice, "fitting_pipeline", split_all)
    step = parallelize(tanh_step, method=method)
    plan = run_pipeline_as_planned(step, *args).plan
    for each in plan.stages.programs:
        for i in each.sharding.inputs:
            if i.path.startswith("params"):
                assert i.bytes == 64 * 64 * 4 // 4


def test_a_budget_that_is_too_small_names_the_stage_and_what_it_holds():
    for method in (PipelineParallel(2, 4), PipelineParallel()):
        step = parallelize(tanh_step, method=method, memory_budget=1000)
        with pytest.raises(InfeasiblePlanError, match=r"stage|layer") as error:
            step.plan(*tanh_args())
        assert "state" in str(error.value) and "gradients" in str(error.value)
        assert (error.value.least_budget_bytes or 0) > 1000


def test_auto_leaves_a_step_that_cannot_be_cut_alone():
    """The largest value of the batch flows back into products with every example."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y = jnp.tanh(x @ params[0])
            y = jnp.tanh((y - (y @ params[1]).max()) @ params[1])
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params = [random(i, 64, 64, scale=0.05) for i in range(2)]
    x = random(9, 128, 64)
    assert parallelize(step, cluster=two_hosts()).plan(params, x).sharding
    with pytest.raises(ValueError):
        parallelize(step, cluster=two_hosts(), method=PipelineParallel()).plan(
            params, x
        )


def test_layers_lie_between_few_bytes_and_repeat():
    class Op:
        bodies = ()
        kind, params, operand_types, result_types = "dot_general", {}, (), ()

    op: Any = Op()
    costs, crossing = [1.0] * 8, [0, 9, 1, 9, 1, 9, float("inf"), 9]
    layers = find_layers(ForwardOrder(((op, 0),) * 8, tuple(costs), tuple(crossing)))
    assert layers.products == (2, 2, 3, 1)
    assert layers.kinds == (0, 1, 2, 3)
    assert layers.crossing_bytes == (0.0, 1, 1, 9, 0.0)
    many = ForwardOrder(((op, 0),) * 64, (1.0,) * 64, (1.0,) * 64)
    joined = find_layers(many, most=16)
    assert len(joined) <= 16 and set(joined.products[1:-1]) == {4}
    assert len(set(joined.kinds)) == 3


def test_the_smallest_window_touches_every_value():
    assert smallest_window([[1, 9], [3, 10], [2, 11]]) == (9, 11)
    assert smallest_window([[5], [5, 8]]) == (5, 5)
    assert smallest_window([[0], [7]]) == (0, 7)
