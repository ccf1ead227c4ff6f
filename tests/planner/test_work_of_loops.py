"""Loops that read stacked values one by one are planned with little work."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.solver.clock import Clock

LAYERS, TURNS, WIDTH = 2, 5, 16


def stacked_states(params: Any, x: jax.Array, y: jax.Array) -> Any:
    """Each layer's loop reads the states of the layer before, and writes its own."""

    def loss(params: Any) -> jax.Array:
        states, last = jnp.zeros((TURNS, *x.shape)).at[0].set(x), x
        for layer in range(LAYERS):

            def turn(i: jax.Array, carry: Any, layer: int = layer) -> Any:
                states, last = carry
                read = jax.lax.dynamic_index_in_dim(states, i, keepdims=False)
                own, other = params["own"][layer], params["other"][layer]
                last = jnp.tanh(last @ own + read @ other)
                return jax.lax.dynamic_update_index_in_dim(states, last, i, 0), last

            states, last = jax.lax.fori_loop(0, TURNS, turn, (states, states[layer]))
        return jnp.mean((last - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def test_integer_programs_take_no_more_work_than_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work: list[float] = []
    spend = Clock.spend

    def counted(clock: Clock, seconds: float) -> None:
        work.append(seconds)
        spend(clock, seconds)

    monkeypatch.setattr(Clock, "spend", counted)
    kernels = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    rows = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    cluster = Cluster.preset("8xCPU")
    step = autopar.parallelize(stacked_states, cluster=cluster, num_microbatches=4)
    plan = step.plan({"own": kernels, "other": kernels}, rows, rows)
    assert plan.predicted.optimality_gap <= 1e-4
    assert sum(work) < 4.0  # seconds of work; see solver/clock.py
