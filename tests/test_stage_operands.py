"""Stage programs have all they read: constants, states of several scans, gradients."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from autopar.api import parallelize
from autopar.lowering.programs import Slot
from autopar.methods.methods import PipelineParallel
from autopar.pipelines.cut_programs import CutProgram, check_operands
from autopar.pipelines.step_parts import graph_of
from tests import random_arrays
from tests.marks import slow

normal = partial(random_arrays.normal, scale=0.3)

WIDTH, TIMES = 8, 4
ON_TWO = PipelineParallel(2, 2, stage_meshes=["x:1", "x:1"])


def assert_like_jit(
    step: Callable[..., Any], *args: Any, method: PipelineParallel = ON_TWO
) -> None:
    expected = jax.jit(step)(*args)
    got = parallelize(step, method=method)(*jax.tree.map(jnp.array, args))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def descent(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def layers(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def test_constants_of_inner_calls_are_not_those_of_the_step():
    closed_over = normal(1, WIDTH)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        halved = jax.jit(lambda h: h * jnp.array(np.linspace(0, 1, WIDTH, dtype="f")))
        return jnp.mean((halved(layers(params, x)) + closed_over) ** 2)

    params = [normal(2, WIDTH, WIDTH), normal(3, WIDTH, WIDTH)]
    assert_like_jit(descent(loss), params, normal(4, 4, WIDTH))


@pytest.mark.parametrize("reverse", [slow(False), True])
def test_states_of_two_scans_over_time_meet(reverse: bool):
    """Both are cut by length, as they read position embeddings, and not alike."""

    def tower(w: jax.Array, at: jax.Array, x: jax.Array, back: bool) -> jax.Array:
        def cell(h: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ w + now[0] + now[1])
            return h, h

        start = jnp.zeros_like(x[:, 0])
        return lax.scan(cell, start, (x.swapaxes(0, 1), at), reverse=back)[1]

    def loss(params: Any, batch: Any) -> jax.Array:
        memory = tower(params["in"], params["at"], batch["x"], False)
        states = tower(params["out"], params["at"], batch["y"], reverse)
        scores = jax.nn.softmax(jnp.einsum("tbd,sbd->bts", states, memory))
        return jnp.mean((jnp.einsum("bts,sbd->tbd", scores, memory) * states) ** 2)

    params = {
        "in": normal(1, WIDTH, WIDTH),
        "out": normal(2, WIDTH, WIDTH),
        "at": normal(3, TIMES, WIDTH),
    }
    batch = {"x": normal(4, 4, TIMES, WIDTH), "y": normal(5, 4, TIMES, WIDTH)}
    products = (TIMES + 1, TIMES + 1)  # the second scan is cut behind its first time
    method = replace(ON_TWO, stage_products=products)
    assert_like_jit(descent(loss), params, batch, method=method)


def test_a_program_that_lacks_an_operand_is_refused_with_its_line():
    struct = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
    graph = graph_of(lambda x, y: [x * y], (struct, struct), ("x", "y"), ("z",))
    (op,), (x, y) = graph.operators(), graph.blocks[0].inputs
    program = CutProgram(1, "forward", (op,), {"x": x, "y": y}, {"z": op.results[0]})
    slots = {name: Slot(name, "batch", 0) for name in "xy"}
    check_operands([program], slots, ("x", "y"))
    with pytest.raises(NotImplementedError, match=r"mul\.0' at .*stage_operands\.py"):
        check_operands([program], slots, ("x",))


def orthogonalised(updates: Any, state: Any, params: Any = None) -> Any:
    def body(_: Any, each: Any) -> Any:
        return [1.5 * m - 0.5 * m @ m.T @ m for m in each]

    return lax.fori_loop(0, 2, body, [m / jnp.linalg.norm(m) for m in updates]), state


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.GradientTransformation(lambda params: (), orthogonalised),
        optax.apply_if_finite(optax.adam(1e-2, eps=1e-4), 2),
    ],
    ids=["loop", "conditional"],
)
def test_an_update_that_loops_over_all_gradients(optimizer: Any):
    def step(params: Any, state: Any, x: jax.Array) -> Any:
        loss = lambda params: jnp.mean(layers(params, x) ** 2)  # noqa: E731
        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = [normal(1, WIDTH, WIDTH), normal(2, WIDTH, WIDTH)]
    assert_like_jit(step, params, optimizer.init(params), normal(3, 4, WIDTH))


@pytest.mark.parametrize("number", [1, 2])
def test_a_call_under_a_mesh_of_the_caller(number: int):
    params = [normal(1, WIDTH, WIDTH), normal(2, WIDTH, WIDTH)]
    step = descent(lambda params, x: jnp.mean(layers(params, x) ** 2))
    with jax.set_mesh(jax.make_mesh((number,), ("data",))):
        assert_like_jit(step, params, normal(3, 4, WIDTH))
