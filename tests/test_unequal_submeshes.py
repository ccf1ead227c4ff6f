"""A number of stages that does not divide the devices: submeshes are searched for."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autopar.api import parallelize
from autopar.errors import InfeasiblePlanError
from autopar.methods.methods import PipelineParallel
from tests.marks import slow
from tests.rows.fixtures import dense_stack, random


def test_three_stages_share_out_eight_devices():
    case = dense_stack(768, 256, num_layers=3)
    method = PipelineParallel(3, 4, schedule="gpipe")
    stages = parallelize(case.step, method=method).plan(*case.args).stages
    sizes = [mesh.size for mesh in stages.meshes]
    assert len(sizes) == stages.num_stages == 3
    assert stages.num_microbatches == 4 and stages.schedule == "gpipe"
    assert len(set(sizes)) > 1 and sum(sizes) == 8
    assert sum(stages.stage_products) == 3


@pytest.mark.parametrize("schedule", [slow("1f1b"), "zb_h1"])
def test_a_schedule_is_kept(schedule: str):
    case = dense_stack(64, 32, num_layers=5)
    step = parallelize(case.step, method=PipelineParallel(5, schedule=schedule))
    stages = step.plan(*case.args).stages
    assert stages.num_stages == len(stages.meshes) == 5
    assert stages.num_microbatches == 1 and stages.schedule == schedule


def test_more_stages_than_layers_are_refused():
    case = dense_stack(64, 32, num_layers=4)
    step = parallelize(case.step, method=PipelineParallel(5))
    with pytest.raises(ValueError, match="5 stages here.*at most num_stages=4"):
        step.plan(*case.args)


def test_meshes_given_need_no_search_and_cut_at_any_product():
    """Only the first of two borders has few bytes, so there are two layers."""
    sizes = [4, 8, 64, 4]
    weights = [random(i, *sizes[i : i + 2], scale=0.2) for i in range(3)]

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    args = weights, random(9, 16, 4)
    with pytest.raises(ValueError, match="2 layers.*`stage_meshes`"):
        parallelize(step, method=PipelineParallel(3, 4)).plan(*args)
    method = PipelineParallel(3, 4, stage_meshes=["x:4", "x:2", "x:2"])
    assert parallelize(step, method=method).plan(*args).stages.num_stages == 3


def test_a_budget_that_no_submeshes_keep_to_says_so():
    case = dense_stack(64, 64, num_layers=3)
    method = PipelineParallel(3, 4)
    step = parallelize(case.step, method=method, memory_budget=1000)
    with pytest.raises(InfeasiblePlanError, match="no stages do"):
        step.plan(*case.args)
