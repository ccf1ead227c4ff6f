"""Rows of FairScale: any optimizer on fully sharded state gives what it gives whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.errors import FallbackWarning
from tests.rows.fixtures import Case, random
from tests.rows.named_plans import plan_of_layout
from tests.rows.running import homes, run_as_planned, traffic

NUM_STEPS, BATCH, WIDTH = 8, 64, 256
POINTWISE = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2, eps=1e-3),
    "adamw": optax.adamw(1e-2, eps=1e-3, weight_decay=0.1),
}
# Their updates depend on statistics of whole tensors.
WITH_STATISTICS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=32),
    "lamb": optax.lamb(1e-2, eps=1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-3)),
}
OPTIMIZERS = POINTWISE | WITH_STATISTICS


def f2(optimizer: optax.GradientTransformation) -> Case:
    """F2: 4 tanh layers of 256 x 256, batch 64."""

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss(params: dict[str, jax.Array]) -> jax.Array:
            hidden = x
            for kernel in params.values():
                hidden = jnp.tanh(hidden @ kernel)
            return jnp.mean((hidden - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = {f"kernel{i}": random(i, WIDTH, WIDTH, scale=0.06) for i in range(4)}
    state = params, optimizer.init(params)
    return Case(step, (state, random(8, BATCH, WIDTH), random(9, BATCH, WIDTH)))


def curve(step: Any, case: Case) -> tuple[Any, list[float]]:
    """The state after eight steps and the losses on the way."""
    state, x, y = jax.tree.map(jnp.copy, case.args)
    losses = []
    for _ in range(NUM_STEPS):
        state, loss = step(state, x, y)
        losses.append(float(loss))
    return state, losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fsc_4_curves_on_sharded_state_are_those_of_one_device(name: str) -> None:
    """Parameters and all slots of their shape lie in eighths, the batch too."""
    case = f2(OPTIMIZERS[name])
    pins = {r"^state\[0\]|(mu|nu|trace)\['kernel|^[xy]$": P("x")}
    step = autopar.parallelize(case.step, mesh="x:8", pins=pins)
    plan = run_as_planned(step, *case.args).plan
    split = [path for path, spec in homes(plan).items() if spec == (0,)]
    assert len(split) >= 6
    state, losses = curve(step, case)
    expected_state, expected = curve(jax.jit(case.step), case)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for ours, theirs in zip(
        jax.tree.leaves(state), jax.tree.leaves(expected_state), strict=True
    ):
        largest = float(abs(theirs).max())
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * largest)


@pytest.mark.parametrize("reduced_in", [jnp.bfloat16, jnp.float32])
def test_fsc_4_gradients_are_reduced_in_the_dtype_that_the_step_sums_in(
    reduced_in: Any,
) -> None:
    """Kernels are f32 and dots bf16; what a dot is to sum in is its own to say."""

    def step(kernel: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        def loss(low: jax.Array) -> jax.Array:
            hidden = jnp.dot(
                x.astype(low.dtype), low, preferred_element_type=reduced_in
            )
            return jnp.mean((hidden.astype(jnp.float32) - y) ** 2)

        gradient = jax.grad(loss)(kernel.astype(jnp.bfloat16))
        return kernel - 0.1 * gradient.astype(jnp.float32)

    args = random(0, WIDTH, 128), random(8, BATCH, WIDTH), random(9, BATCH, 128)
    plan = plan_of_layout(Case(step, args), "x:8", {BATCH: "x"})
    size = WIDTH * 128 * jnp.dtype(reduced_in).itemsize
    assert traffic(plan) == {("all_reduce", "x"): [size]}


def optimizer_bytes(state: Any) -> dict[Any, int]:
    """What each device holds of the optimizer's state."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(state[1]):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return held


def uneven(giant: int) -> Case:
    """Kernels of many sizes, one of them with `giant` columns; Adam."""
    optimizer = POINTWISE["adam"]
    widths = (64, 24, 200, 8, giant, 16)

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss(params: dict[str, jax.Array]) -> jax.Array:
            hidden = x
            for kernel in params.values():
                hidden = jnp.tanh(hidden @ kernel)
            return jnp.mean((hidden - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = {
        f"kernel{i}": random(i, *shape, scale=0.1)
        for i, shape in enumerate(zip(widths[:-1], widths[1:], strict=True))
    }
    state = params, optimizer.init(params)
    return Case(step, (state, random(8, BATCH, 64), random(9, BATCH, 16)))


def test_fsc_1_every_device_holds_as_much_of_the_optimizer_as_the_others() -> None:
    """OSS deals out whole parameters, and is off by the largest at most; parts of each
    are off by nothing. All of it together is one copy."""
    case = uneven(giant=320)
    step = autopar.parallelize(case.step, mesh="x:8", method=autopar.Zero(1))
    run_as_planned(step, *case.args)
    state, _ = step(*jax.tree.map(jnp.copy, case.args))
    held = optimizer_bytes(state)
    assert len(held) == 8
    largest = max(leaf.nbytes for leaf in jax.tree.leaves(case.args[0][0]))
    assert max(held.values()) - min(held.values()) == 0 <= largest
    moments = sum(leaf.nbytes for leaf in jax.tree.leaves(case.args[0][1]))
    count = 4  # Adam's, which is on every device
    assert max(held.values()) == (moments - count) // 8 + count


def test_fsc_1_a_giant_parameter_that_cannot_be_split_is_reported() -> None:
    """No dim of 3 x 1001 is a multiple of 8: it is named, with what it costs."""
    optimizer = POINTWISE["adam"]

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state

        def loss(params: Any) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ params["small"]) @ params["giant"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = {"small": random(0, 16, 3), "giant": random(1, 3, 1001)}
    case = Case(step, ((params, optimizer.init(params)), random(2, 16, 16)))
    parallel = autopar.parallelize(step, mesh="x:8", method=autopar.Zero(1))
    text = r"mu\['giant'\] \[3, 1001\].* they divide none.*24,024 of"
    with pytest.warns(FallbackWarning, match=text):
        run_as_planned(parallel, *case.args)


@pytest.mark.parametrize("name", POINTWISE)
def test_fsc_2_each_gradient_is_reduced_to_its_owners(name: str) -> None:
    """ZeRO-2's bytes, whatever the pointwise optimizer."""
    case = f2(POINTWISE[name])
    step = autopar.parallelize(case.step, mesh="x:8", method=autopar.Zero(2))
    assert traffic(run_as_planned(step, *case.args).plan) == {
        ("reduce_scatter", "x"): [32_768] * 4,
        ("all_gather", "x"): [262_144] * 4,
        ("all_reduce", "x"): [4],
    }
