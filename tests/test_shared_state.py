"""State that several stages read, or that one reads and another updates."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel
from tests.marks import slow
from tests.rows.fixtures import random
from tests.rows.running import run_pipeline_as_planned


def loss(params: Any, x: jax.Array) -> jax.Array:
    y = jnp.tanh(x @ params["first"])
    return jnp.square(y @ params["second"]).mean()


def arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    names = "first", "second"
    return {n: random(i, 16, 16, scale=0.3) for i, n in enumerate(names)}, random(
        7, 16, 16
    )


@pytest.mark.parametrize("make", [slow(optax.contrib.muon), optax.novograd])
def test_state_that_is_no_parameter_lies_where_it_is_read_or_made(make: Any) -> None:
    """Muon's coefficients are read by every stage, Novograd's second moments are one
    scalar a parameter."""
    optimizer = make(1e-2)
    params, x = arguments()

    def step(state: Any, x: jax.Array) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    parallel = parallelize(step, method=PipelineParallel(2, 2))
    run_pipeline_as_planned(parallel, (params, optimizer.init(params)), x)


def test_what_one_stage_reads_lies_there() -> None:
    """Read through work on it alone, and handed on as it came; both stages read the
    rate, and the second alone the decay."""

    def step(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        rate, decay = jnp.exp(state["rate"]), jnp.exp(state["decay"])
        params = {name: p - rate * grads[name] for name, p in state["params"].items()}
        return {**state, "params": params | {"second": decay * params["second"]}}, value

    params, x = arguments()
    rate = jnp.linspace(-3.0, -2.0, 16)
    state = {"params": params, "rate": rate, "decay": rate / 100}
    parallel = parallelize(step, method=PipelineParallel(2, 2))
    plan = run_pipeline_as_planned(parallel, state, x).plan.stages
    sent = {(t.source, t.target) for t in plan.transfers if "rate" in t.slot}
    assert sent == {(0, 1)}
    assert not any("decay" in t.slot for t in plan.transfers)
    home = {each.stage for each in plan.programs if each.kind == "apply"}
    assert home == {0, 1}


@pytest.mark.parametrize("is_first", [True, slow(False)])
def test_an_average_of_parameters_lies_where_they_are_updated(is_first: bool) -> None:
    """It makes their targets on a stage of its own, and meets them in the update."""

    def error(params: Any, average: Any, x: jax.Array) -> jax.Array:
        def own() -> jax.Array:
            return jnp.tanh(x @ params["first"]) @ params["second"]

        def target() -> jax.Array:
            y = jnp.tanh(jnp.flip(x, 1) @ average["first"]) @ average["second"]
            return jax.lax.stop_gradient(y)

        if is_first:
            return jnp.square(target() - own()).mean()
        return jnp.square(own() - target()).mean()

    def step(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(error)(state["own"], state["average"], x)
        own = jax.tree.map(lambda p, g: p - 0.1 * g, state["own"], grads)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], own)
        return {"own": own, "average": average}, value

    params, x = arguments()
    state = {"own": params, "average": jax.tree.map(jnp.sin, params)}
    parallel = parallelize(step, method=PipelineParallel(2, 2))
    plan = run_pipeline_as_planned(parallel, state, x).plan.stages
    sent = {t.slot: t.count for t in plan.transfers if "average" in t.slot}
    assert len(sent) == 2 and {*sent.values()} == {1}  # copies, once a step
    assert not any("own" in t.slot for t in plan.transfers)


@pytest.mark.parametrize(
    ("size", "is_closed_over"),
    [(1, False), (16, True), slow(1, True), slow(16, False)],
)
def test_what_the_last_stage_alone_reads_lies_there(
    size: int, is_closed_over: bool
) -> None:
    """In its update, and nowhere in the loop."""
    rates = random(3, size)

    def step(state: Any, x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], x)
        rate = rates if is_closed_over else state["rates"]
        second = state["params"]["second"] - jnp.tanh(rate) * grads["second"]
        params = {"first": state["params"]["first"], "second": second}
        return {**state, "params": params}, value

    params, x = arguments()
    state = {"params": params, "rates": rates * 2}
    parallel = parallelize(step, method=PipelineParallel(2, 2))
    run_pipeline_as_planned(parallel, state, x)
