"""Rows of spatial partitioning: images split in space, rows of neighbours exchanged."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import ParallelFunction
from autopar.steps.parallel_plan import Plan
from benchmarks.plan_price import plan_seconds
from tests.rows.fixtures import Case, Params, random, sgd
from tests.rows.named_plans import graph_of
from tests.rows.running import homes, run_as_planned, traffic

ROWS = P(None, "h")


def devices(**sizes: int) -> Mesh:
    number = int(np.prod(list(sizes.values())))
    chosen = np.array(jax.devices()[:number])
    return Mesh(chosen.reshape(tuple(sizes.values())), tuple(sizes))


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """ "SAME", channels last, in as many dims as `x` has space."""
    space = "DHW"[-(x.ndim - 2) :]
    names = (f"N{space}C", f"{space}IO", f"N{space}C")
    strides = (stride,) * (x.ndim - 2)
    return lax.conv_general_dilated(x, kernel, strides, "SAME", None, None, names)


def pool(x: jax.Array, window: int, stride: int) -> jax.Array:
    shape, strides = (1, window, window, 1), (1, stride, stride, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, shape, strides, "SAME")


def image(channels: int = 8, batch: int = 2) -> jax.Array:
    """F5: 64 rows of 64, of which one is 4,096 B with a batch of 2 and 8 channels."""
    return random(0, batch, 64, 64, channels)


def in_rows(function: Any, mesh: Mesh, spec: P = ROWS) -> ParallelFunction:
    """A function of weights and an image, split by configuration only."""

    def split(kernel: Any, x: jax.Array) -> jax.Array:
        return autopar.pin(function(x, kernel), spec)

    return autopar.parallelize(split, mesh=mesh, pins={"^x$": spec})


def test_spa_1_an_input_is_split_by_configuration_only() -> None:
    """A quarter of the image and all of the kernel on each device.

    Of whole numbers, whose sums are exact in any order: which one a CPU takes depends
    on its caches.
    """
    kernel, x = jnp.round(4 * random(1, 3, 3, 8, 16)), jnp.round(4 * image())
    step = in_rows(convolve, devices(h=4))
    compiled = run_as_planned(step, kernel, x)
    assert homes(compiled.plan) == {"kernel": (-1,), "x": (1,)}
    argument_bytes = compiled.memory_analysis().argument_size_in_bytes
    assert argument_bytes == x.nbytes // 4 + kernel.nbytes == 70_144
    whole = jax.jit(convolve)(x, kernel)
    np.testing.assert_array_equal(step(kernel, x), whole)
    assert jnp.abs(whole).max() > 100


@pytest.mark.parametrize(
    ("size", "stride", "sent"),
    [
        (3, 1, [4_096] * 2),
        (5, 1, [8_192] * 2),
        (7, 1, [12_288] * 2),
        (3, 2, [4_096]),
    ],
)
def test_spa_2_convolutions_send_half_a_kernel_each_way(
    size: int, stride: int, sent: list[int]
) -> None:
    step = in_rows(lambda x, kernel: convolve(x, kernel, stride), devices(h=4))
    plan = run_as_planned(step, random(1, size, size, 8, 16), image()).plan
    assert traffic(plan) == {("collective_permute", "h"): sent}


def test_spa_2_pools_send_what_their_windows_overlap() -> None:
    step = in_rows(lambda x, scale: scale * pool(x, 3, 2), devices(h=4))
    plan = run_as_planned(step, jnp.ones(8), image()).plan
    assert traffic(plan) == {("collective_permute", "h"): [4_096]}


def trained() -> Case:
    """One convolution and a squared error; returns the gradient for its input, too."""

    def step(kernel: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum((convolve(x, kernel) - y) ** 2)

        grad, x_grad = jax.grad(loss, (0, 1))(kernel, x)
        return sgd(kernel, grad, 1e-3), x_grad

    return Case(step, (random(1, 3, 3, 8, 16), image(), image(16)))


def test_spa_3_training_sends_rows_of_inputs_and_of_gradients() -> None:
    """Forward and the kernel's gradient read rows of the input, the input's gradient
    rows of the result's, which has twice the channels."""
    case = trained()
    step = autopar.parallelize(
        case.step, mesh=devices(h=4), pins={"^x$": ROWS, "^y$": ROWS}
    )
    plan = run_as_planned(step, *case.args).plan
    assert traffic(plan) == {
        ("collective_permute", "h"): [8_192] * 2 + [4_096] * 4,
        ("all_reduce", "h"): [4_608],
    }


def test_spa_4_tiles_exchange_corners_with_their_columns() -> None:
    tiles = P(None, "h", "w")
    step = in_rows(convolve, devices(h=2, w=4), tiles)
    plan = run_as_planned(step, random(1, 3, 3, 8, 16), image()).plan
    assert traffic(plan) == {
        ("collective_permute", "h"): [1_024] * 2,
        ("collective_permute", "w"): [2_176] * 2,
    }


def test_spa_4_rows_and_examples_are_split_together() -> None:
    """The kernel's gradient is added over all eight devices."""
    case, spec = trained(), P("data", "h")
    step = autopar.parallelize(
        case.step, mesh=devices(data=2, h=4), pins={"^x$": spec, "^y$": spec}
    )
    plan = run_as_planned(step, *case.args).plan
    assert traffic(plan) == {
        ("collective_permute", "h"): [4_096] * 2 + [2_048] * 4,
        ("all_reduce", "data,h"): [4_608],
    }


def test_spa_5_volumes_exchange_faces_edges_and_corners() -> None:
    """Faces of 8 x 8, then 10 x 8, then 10 x 10, of two channels."""
    rules = autopar.LayoutRules(
        "depth:d;height:h;width:w", {"x": "batch depth height width channels"}
    )
    step = autopar.parallelize(
        lambda kernel, x: convolve(x, kernel), mesh=devices(d=2, h=2, w=2), rules=rules
    )
    volume = random(0, 1, 16, 16, 16, 2)
    plan = run_as_planned(step, random(1, 3, 3, 3, 2, 2), volume).plan
    assert homes(plan)["x"] == (1, 2, 3)
    assert traffic(plan) == {
        ("collective_permute", "d"): [512] * 2,
        ("collective_permute", "h"): [640] * 2,
        ("collective_permute", "w"): [800] * 2,
    }


def test_spa_5_a_halo_wider_than_a_shard_is_a_gather_of_the_input() -> None:
    """One row a device, of which a 9 x 9 kernel reads four on each side."""
    step = in_rows(convolve, devices(h=8))
    x = random(0, 1, 8, 8, 8)
    plan = run_as_planned(step, random(1, 9, 9, 8, 8), x).plan
    found = traffic(plan)
    assert found["all_gather", "h"] == [x.nbytes] == [2_048]
    assert ("collective_permute", "h") not in found


def unet_step(depth: int = 2) -> Any:
    """Pools on the way down, repeats and concatenations on the way up; SGD."""

    def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
        def loss(params: Params) -> jax.Array:
            hidden, skips = jax.nn.relu(convolve(x, params["in"])), []
            for level in range(depth):
                skips.append(jax.nn.relu(convolve(hidden, params[f"down{level}"])))
                hidden = pool(skips[-1], 2, 2)
            hidden = jax.nn.relu(convolve(hidden, params["middle"]))
            for level in reversed(range(depth)):
                hidden = hidden.repeat(2, axis=1).repeat(2, axis=2)
                hidden = jnp.concatenate([hidden, skips[level]], axis=-1)
                hidden = jax.nn.relu(convolve(hidden, params[f"up{level}"]))
            return jnp.mean((convolve(hidden, params["out"]) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return sgd(params, grads), value

    return step


def unet_types(size: int, channels: int, depth: int = 2, batch: int = 1) -> Any:
    """Types of the parameters, of images, and of what is made of them."""

    def kind(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"in": kind(3, 3, 3, channels), "out": kind(3, 3, channels, 1)}
    params["middle"] = kind(3, 3, channels, channels)
    for level in range(depth):
        params[f"down{level}"] = kind(3, 3, channels, channels)
        params[f"up{level}"] = kind(3, 3, 2 * channels, channels)
    return params, kind(batch, size, size, 3), kind(batch, size, size, 1)


def unet(size: int, channels: int) -> Case:
    """Small ones, with arrays."""
    types, x, y = unet_types(size, channels)
    params = {
        name: random(seed, *kind.shape, scale=0.3 / kind.shape[2] ** 0.5)
        for seed, (name, kind) in enumerate(types.items())
    }
    return Case(unet_step(), (params, random(20, *x.shape), random(21, *y.shape)))


def spatial_flops(plan: Plan) -> float:
    """The part of all flops that is split in space."""
    by_space = [
        op.flops
        for op in plan.sharding.operators
        if any(name.startswith(("window", "taps")) for name in op.factors)
    ]
    return sum(by_space) / sum(op.flops for op in plan.sharding.operators)


def test_spa_5_a_unet_in_rows_has_the_losses_of_one_device() -> None:
    """Eight convolutions of 3 x 3 read a row from each side, as do their gradients but
    the first one's by the image; pools of 2 x 2 read none."""
    case = unet(16, 4)
    rules = autopar.LayoutRules(
        "height:h", {name: "batch height width channels" for name in "xy"}
    )
    step = autopar.parallelize(case.step, mesh=devices(h=4), rules=rules)
    plan = run_as_planned(step, *case.args).plan
    found = traffic(plan)
    assert len(found["collective_permute", "h"]) == 2 * (7 + 6 + 7)
    assert set(found) == {("collective_permute", "h"), ("all_reduce", "h")}
    params = jax.tree.leaves(case.args[0])
    assert sum(found["all_reduce", "h"]) == sum(p.nbytes for p in params) + 4
    assert spatial_flops(plan) > 0.9
    state, x, y = case.args
    expected = state
    for _ in range(3):
        state, loss = step(jax.tree.map(jnp.copy, state), x, y)
        expected, want = jax.jit(case.step)(expected, x, y)
        np.testing.assert_allclose(loss, want, rtol=1e-5)


def test_a_spatial_plan_is_priced_as_predicted_and_comes_back_from_its_file(
    tmp_path: Path,
) -> None:
    case, cluster = unet(64, 4), autopar.Cluster.preset("4xH100")
    rules = autopar.LayoutRules(
        "height:h", {name: "batch height width channels" for name in "xy"}
    )
    step = autopar.parallelize(case.step, mesh="h:4", cluster=cluster, rules=rules)
    plan = step.plan(*case.args)
    plan.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json").sharding == plan.sharding
    seconds = plan_seconds(graph_of(case), plan.sharding, cluster)
    assert seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
