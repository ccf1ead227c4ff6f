"""Zero bubble is searched beside the other schedules, and taken where it is quicker."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.methods.methods import PipelineParallel
from autopar.pipelines.stage_search import StageSearch
from autopar.steps.execution import staged_plan
from tests.rows.running import run_pipeline_as_planned
from tests.test_joint_search import searcher_of
from tests.test_pipeline_plan import step as tanh_step
from tests.test_stage_search import two_hosts

SLOW = replace(two_hosts(1000.0), devices_per_host=2)


def tower(examples: int = 8, width: int = 256, num_layers: int = 4) -> Any:
    """Equal layers with few examples: a pipeline that mostly fills and drains."""
    keys = jax.random.split(jax.random.key(0), num_layers + 1)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[1:]]
    return tanh_step, (params, jax.random.normal(keys[0], (examples, width)))


def searched(step: Any, args: Any, **given: Any) -> StageSearch:
    """What the search finds."""
    found = searcher_of(step, args, SLOW, **given).run(staged_plan)
    assert found is not None
    return found


def test_zero_bubble_is_taken_where_it_is_quicker():
    step, args = tower()
    found = searched(step, args, num_microbatches=8)
    other = searched(step, args, num_microbatches=8, schedule="eager_1f1b")
    assert found.planned.method.schedule in ("zb_h1", "zb_h2")
    ours, theirs = found.plan.predicted, other.plan.predicted
    assert ours.step_seconds < theirs.step_seconds
    weights = [each for each in found.plan.programs if each.kind == "weight"]
    assert len(weights) == found.plan.num_stages - 1


@pytest.mark.slow
def test_what_is_taken_has_the_values_of_one_device():
    step, args = tower(width=64)
    method = PipelineParallel(num_microbatches=8)
    run = autopar.parallelize(step, cluster=two_hosts(1000.0), method=method)
    plan = run_pipeline_as_planned(run, *args).plan
    assert plan.stages.schedule in ("zb_h1", "zb_h2")


def test_backward_that_stays_whole_is_never_split():
    """In a scan over layers, and where backward makes what it needs again."""
    step, args = tower()

    def scanned(params: jax.Array, x: jax.Array) -> Any:
        def loss(params: jax.Array) -> jax.Array:
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, params)
            return jnp.mean(jnp.square(y))

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    found = searched(scanned, (jnp.stack(args[0]), args[1]), num_microbatches=8)
    assert found.planned.method.schedule not in ("zb_h1", "zb_h2")
    assert found.plan.num_stages > 1 and sum(found.plan.stage_products) == 4
    method = PipelineParallel(num_microbatches=8)
    again = autopar.parallelize(step, cluster=SLOW, method=method, remat="full")
    assert again.plan(*args).stages.schedule not in ("zb_h1", "zb_h2")


def test_zero_bubble_that_is_slower_is_not_taken():

    def price(planned: Any) -> Any:
        plan = staged_plan(planned)
        factor = 3.0 if planned.method.schedule in ("zb_h1", "zb_h2") else 1.0
        seconds = factor * plan.predicted.step_seconds
        return replace(plan, predicted=replace(plan.predicted, step_seconds=seconds))

    step, args = tower()
    searcher = searcher_of(step, args, SLOW, num_microbatches=8)
    found = searcher.run(price)
    assert found is not None
    assert found.planned.method.schedule not in ("zb_h1", "zb_h2")
