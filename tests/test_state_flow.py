"""Parameters are the state that work on examples reads; the rest is for the update."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from autopar.methods.dim_names import DimTies
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.state_flow import (
    StateFlow,
    state_flow,
)
from tests.rows.fixtures import Case, random
from tests.rows.named_plans import graph_of

ADAM = optax.adam(1e-2)
X = random(0, 16, 8)


def parameters(step: Callable[..., Any], state: Any) -> set[str]:
    """The paths of those leaves of state that are found to be parameters."""
    graph, flow = flow_of(step, state)
    return {each.path for each in graph.inputs if each.tensor in flow.parameters}


def flow_of(step: Callable[..., Any], state: Any) -> tuple[Any, StateFlow]:
    graph = graph_of(Case(step, (state, X)))
    batch = [(each.tensor, 0) for each in graph.inputs if each.role == "batch"]
    reached = DimTies.of(graph, parse_mesh("x:8")).reach(batch, 8)
    return graph, state_flow(graph, {tensor for tensor, _ in reached})


def adam_step(state: Any, x: jax.Array) -> Any:
    """Kernels are kept in f32, and used in bf16; the loss is scaled."""

    def loss(params: Any) -> jax.Array:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        hidden = x.astype(jnp.bfloat16) @ low["w"] + low["b"]
        return state["scale"] * jnp.mean(hidden.astype(jnp.float32) ** 2)

    grads = jax.grad(loss)(state["params"])
    clipped = jax.tree.map(lambda g: g / (1 + optax.global_norm(grads)), grads)
    updates, moments = ADAM.update(clipped, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
    return {
        "params": params,
        "moments": moments,
        "average": average,
        "scale": state["scale"] * 1.0,
    }


def adam_state() -> Any:
    params = {"w": random(1, 8, 8), "b": random(2, 8)}
    return {
        "params": params,
        "moments": ADAM.init(params),
        "average": params,
        "scale": jnp.float32(2.0),
    }


def test_moments_and_averages_are_not_parameters() -> None:
    found = parameters(adam_step, adam_state())
    kernels = {"state['params']['w']", "state['params']['b']"}
    assert kernels <= found <= kernels | {"state['scale']"}


def test_several_steps_in_a_loop_tell_them_apart_as_one_does() -> None:
    def many(state: Any, x: jax.Array) -> Any:
        return jax.lax.fori_loop(0, 4, lambda _, s: adam_step(s, x), state)

    found = parameters(many, adam_state())
    assert not any("moments" in path or "average" in path for path in found)
    assert "state['params']['w']" in found


def test_running_statistics_are_not_parameters() -> None:
    def step(state: Any, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            hidden = x @ w
            mean = hidden.mean(0)
            return jnp.mean((hidden - mean) ** 2), mean

        grad, mean = jax.grad(loss, has_aux=True)(state["w"])
        running = 0.9 * state["running"] + 0.1 * mean
        return {"w": state["w"] - grad, "running": running}

    state = {"w": random(1, 8, 8), "running": jnp.zeros(8)}
    assert parameters(step, state) == {"state['w']"}


def test_gradients_are_what_no_example_reads() -> None:
    """The batch's mean is read by examples again; the gradient's norm is not."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            hidden = x @ w
            return jnp.mean((hidden - hidden.mean(0)) ** 2)

        grad = jax.grad(loss)(w)
        return w - grad / jnp.sqrt(jnp.sum(grad**2)), grad.mean()

    graph, flow = flow_of(step, random(1, 8, 8))
    made = {t: op for op in graph.operators() for t in op.results}
    kinds = {made[t].kind for t in flow.of_gradients}
    assert {"sqrt", "sub"} <= kinds
    means = [t for t, op in made.items() if op.kind == "reduce_sum"]
    assert any(t not in flow.of_gradients for t in means)
