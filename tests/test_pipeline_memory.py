"""Pipelines whose state the host keeps, or that choose what to make again."""

import inspect
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.errors import InfeasiblePlanError
from autopar.methods.methods import PipelineParallel
from tests import random_arrays
from tests.marks import slow

from .rows.running import run_pipeline_as_planned

normal = partial(random_arrays.normal, scale=0.3)

TWO = PipelineParallel(2, 2)
SIZE, NUM_LAYERS = 32, 4
LAYER_BYTES = SIZE * SIZE * 4
ADAM = optax.adam(1e-2, eps=1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)


def kernels(number: int) -> list[jax.Array]:
    return [normal(i, SIZE, SIZE) for i in range(number)]


def trained(
    optimizer: optax.GradientTransformation,
    is_scanned: bool = False,
    num_layers: int = NUM_LAYERS,
) -> Any:
    """A step of tanh layers under an optimizer, its state and its batch."""

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state

        def loss(params: Any) -> jax.Array:
            if is_scanned:
                y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, params)
            else:
                y = x
                for w in params:
                    y = jnp.tanh(y @ w)
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    params = kernels(num_layers)
    params = jnp.stack(params) if is_scanned else params
    return step, ((params, optimizer.init(params)), normal(9, 16, SIZE))


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def assert_close(got: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@cache
def offloaded(optimizer: optax.GradientTransformation, is_scanned: bool) -> Any:
    """The step, of one plan and one program, and its arguments."""
    fun, args = trained(optimizer, is_scanned)
    return autopar.parallelize(fun, method=TWO, offload="optimizer_state"), args


@pytest.mark.parametrize(
    ("optimizer", "is_scanned"),
    [
        (ADAM, False),
        slow(CLIPPED, False),
        slow(ADAM, True),
    ],
    ids=["adam", "clipped", "scanned"],
)
def test_the_state_of_an_optimizer_stays_with_the_host(
    optimizer: Any, is_scanned: bool
) -> None:
    step, args = offloaded(optimizer, is_scanned)
    compiled = run_pipeline_as_planned(step, *args)
    predicted = compiled.plan.predicted
    of_stage = 2 * LAYER_BYTES * NUM_LAYERS // 2  # two moments of half of the layers
    parts = [
        int(np.prod([*p.planned.plan.mesh.axis_sizes]))
        for p in compiled.lowered.step.pipeline.lowered
    ]
    assert of_stage // max(parts) <= predicted.host_bytes <= of_stage
    assert predicted.host_seconds > 0
    expected = jax.tree.map(jnp.copy, args[0])
    state, x = jax.tree.map(jnp.copy, args)
    reference = jax.jit(inspect.unwrap(step))
    for _ in range(2):
        state, _ = step(state, x)
        expected, _ = reference(expected, x)
        assert kinds(state[0]) == {"device"}
        assert kinds(state[1]) == {"pinned_host"}
    assert_close(state, expected)


def test_stages_that_share_a_submesh_may_keep_all_state_with_the_host() -> None:
    fun, args = trained(ADAM)
    method = PipelineParallel(4, 2, "interleaved", stages_per_submesh=2)
    step = autopar.parallelize(fun, method=method, offload="state")
    compiled = run_pipeline_as_planned(step, *args)
    state, _ = compiled(*jax.tree.map(jnp.copy, args))
    assert kinds(state) == {"pinned_host"}


def test_init_makes_state_where_it_lies() -> None:
    step, (state, x) = offloaded(ADAM, False)

    def init() -> Any:
        return jax.tree.map(jnp.zeros_like, state)

    made = step.init(init, batch=(x,))
    assert kinds(made[0]) == {"device"}
    assert kinds(made[1]) == {"pinned_host"}
    devices = [leaf.sharding.device_set for leaf in made[1][0].mu]
    assert devices[0].isdisjoint(devices[-1])


def test_a_plan_file_says_what_the_host_keeps(tmp_path: Path) -> None:
    step, args = offloaded(ADAM, False)
    plan = step.plan(*args)
    plan.save(tmp_path / "plan.json")
    fun = inspect.unwrap(step)
    again = autopar.parallelize(fun, plan=autopar.Plan.load(tmp_path / "plan.json"))
    state, _ = again(*jax.tree.map(jnp.copy, args))
    assert kinds(state[1]) == {"pinned_host"}
    assert again.plan(*args).explain() == plan.explain()


@pytest.mark.parametrize(
    "schedule",
    ["1f1b", *(slow(s) for s in ("gpipe", "zb_h2"))],
)
def test_a_stage_that_holds_too_much_is_named(schedule: Any) -> None:
    fun, args = deep(4096, num_layers=4)
    method = PipelineParallel(2, 8, schedule)
    plan = autopar.parallelize(fun, method=method).plan(*args)
    budget = plan.predicted.peak_bytes // 2
    step = autopar.parallelize(fun, method=method, memory_budget=budget)
    with pytest.raises(autopar.InfeasiblePlanError, match="must fit") as error:
        step.plan(*args)
    assert re.search(r"but stages? \d", str(error.value))


def test_the_host_keeps_what_does_not_fit() -> None:
    """With all state replicated by pins, only the host has room for the moments."""
    fun, args = trained(ADAM, num_layers=2)
    pins = {"state": jax.sharding.PartitionSpec()}
    asked: dict[str, Any] = {"method": TWO, "pins": pins}
    free = autopar.parallelize(fun, offload="auto", **asked).plan(*args)
    assert free.predicted.host_bytes == 0
    budget = free.predicted.peak_bytes - LAYER_BYTES
    with pytest.raises(autopar.InfeasiblePlanError, match="must fit"):
        autopar.parallelize(fun, memory_budget=budget, **asked).plan(*args)
    step = autopar.parallelize(fun, memory_budget=budget, offload="auto", **asked)
    predicted = step.plan(*args).predicted
    assert predicted.host_bytes > 0
    assert predicted.peak_bytes <= budget


def test_without_such_state_offload_is_refused() -> None:
    fun, args = trained(optax.sgd(0.1))
    step = autopar.parallelize(fun, method=TWO, offload="optimizer_state")
    with pytest.raises(ValueError, match="only the update reads"):
        step.plan(*args)


def deep(batch: int, num_layers: int = 6) -> Any:
    """Layers whose residuals are far more than their parameters."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            y = x
            for w in params:
                y = jnp.sin(jnp.tanh(jnp.cos(y @ w)))
            return jnp.square(y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step, (kernels(num_layers), normal(9, batch, SIZE))


def test_a_budget_chooses_what_stages_make_again() -> None:
    fun, args = deep(1024, num_layers=4)
    asked: dict[str, Any] = {"method": PipelineParallel(2, 4, "gpipe", 1, ["x:2"] * 2)}
    plain = autopar.parallelize(fun, **asked).plan(*args)
    free = autopar.parallelize(fun, remat="auto", **asked).plan(*args)
    assert free.explain() == plain.explain()
    full = autopar.parallelize(fun, remat="full", **asked).plan(*args)
    peaks = plain.predicted.peak_bytes, full.predicted.peak_bytes
    assert peaks[1] < 0.8 * peaks[0]
    budget = sum(peaks) // 2
    step = autopar.parallelize(fun, remat="auto", memory_budget=budget, **asked)
    compiled = run_pipeline_as_planned(step, *args)
    again = {p.sharding.remat for p in compiled.plan.stages.programs}
    assert again > {""} and len(again) == 2  # one level, in backward programs
    assert compiled.plan.predicted.peak_bytes <= budget
    seconds = compiled.plan.predicted.step_seconds
    assert seconds <= full.predicted.step_seconds


@pytest.mark.slow
def test_stages_that_are_searched_make_again_what_is_asked() -> None:
    fun, args = deep(64)
    method = PipelineParallel(num_microbatches=4)
    step = autopar.parallelize(fun, method=method, remat="full")
    stages = run_pipeline_as_planned(step, *args).plan.stages
    again = [p.sharding.remat for p in stages.programs if p.kind == "backward"]
    assert set(again) == {"full"} and stages.num_stages > 1


def test_a_named_budget_is_kept_to_by_compiled_programs():
    """What is predicted to fit and does not as compiled is planned again."""
    step, args = trained(ADAM)
    method = PipelineParallel(2, 2, stage_meshes=("x:4", "x:4"))
    free: Any = autopar.parallelize(step, method=method).lower(*args).compile()
    audit = free.audit()
    assert audit.predicted_bytes == free.plan.stages.peak_bytes
    assert max(audit.peak_bytes) >= audit.memory.device_bytes
    predicted, seen = max(audit.predicted_bytes), max(audit.peak_bytes)
    assert predicted < seen  # the model is below the compiler on this step

    def within(budget: int) -> Any:
        fun = autopar.parallelize(step, method=method, memory_budget=budget)
        return fun.lower(*args).compile()

    assert within(seen).plan.stages.programs == free.plan.stages.programs
    other = within(predicted)
    assert max(other.audit().peak_bytes) <= predicted
    assert other.plan.predicted.memory_correction == pytest.approx(seen / predicted)
    with pytest.raises(InfeasiblePlanError, match="compiled program must fit|Every st"):
        within(predicted // 4)
