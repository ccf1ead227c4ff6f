"""Pins of a pipeline: a leaf lives on one stage, and is pinned on that stage's mesh."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel
from autopar.state.array_chunks import chunk_shardings, split_leaf
from tests import random_arrays

from .rows.fixtures import tanh_chain
from .test_pipeline import tied_language_model

normal = partial(random_arrays.normal, scale=0.3)

TWO = PipelineParallel(2, 2, stage_meshes=["a:4", "b:4"])
EQUAL = PipelineParallel(2, 2)


def stacked(params: Any, x: jax.Array) -> Any:
    """Four layers in a scan, two on each of two stages."""

    def loss(params: Any) -> jax.Array:
        y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, params["w"])
        return jnp.square(y).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def kernels() -> list[jax.Array]:
    return [normal(i, 32, 32) for i in range(4)]


def mesh(first: int, end: int, name: str = "x") -> Mesh:
    return Mesh(np.array(jax.devices()[first:end]), (name,))


def placed(leaf: jax.Array, on: Mesh, *spec: str | None) -> jax.Array:
    return jax.device_put(leaf, NamedSharding(on, P(*spec)))


def assert_close(got: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    for a, b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            P("a", "b"),
            r"pin .* of params\[3\] is P\('a', 'b'\), and params\[3\] is "
            r"on stage 1, whose mesh is b:4; name axes of that mesh, .*_products",
        ),
        (P(("a", "b")), "is on stage 1, whose mesh is b:4"),
        (P(None, "a"), "is on stage 1, whose mesh is b:4"),
        (P("c"), "is on stage 1, whose mesh is b:4"),
    ],
)
def test_a_pin_that_puts_a_leaf_on_other_stages_is_refused(
    spec: P, message: str
) -> None:
    step = parallelize(tanh_chain, method=TWO, pins={"params[3]": spec})
    with pytest.raises(ValueError, match="A leaf lives on one stage.*" + message):
        step(kernels(), normal(9, 16, 32))


def test_each_stage_keeps_the_pins_of_its_own_axes() -> None:
    pins = {r"params.[01]": P("a"), r"params.[23]": P(None, "b"), "x": P("a")}
    step = parallelize(tanh_chain, method=TWO, pins=pins)
    lowered: Any = step.lower(kernels(), normal(9, 64, 32))
    found = lowered.step.pipeline.planned.specs
    homes = [found[f"params[{i}]", i // 2] for i in range(4)]
    assert homes == [(0,), (0,), (1,), (1,)]


def test_a_leaf_that_two_stages_read_is_pinned_where_it_lives() -> None:
    tied, params, tokens = tied_language_model()
    step = parallelize(tied, method=TWO, pins={"embed": P(None, "a")})
    lowered: Any = step.lower(params, tokens)
    planned = lowered.step.pipeline.planned
    assert planned.flow.slots["params['embed']"].stage == 0
    assert planned.specs["params['embed']", 0] == (1,)
    assert ("params['embed']", 1) in planned.specs


def test_a_leaf_stays_where_it_was_placed_on_its_stage() -> None:
    params = kernels()
    for i, spec in ((1, ("x",)), (2, (None, "x"))):
        params[i] = placed(params[i], mesh(*((0, 4) if i < 2 else (4, 8))), *spec)
    step = parallelize(tanh_chain, method=EQUAL, pins={"params": "placed"})
    x = normal(9, 16, 32)
    expected = jax.jit(tanh_chain)(kernels(), x)
    compiled: Any = step.lower(params, x).compile()
    compiled.audit().raise_if_wrong()
    planned = compiled.lowered.step.pipeline.planned
    assert planned.specs["params[1]", 0] == (0,)
    assert planned.specs["params[2]", 1] == (1,)
    assert_close(compiled(params, x), expected)


def test_a_stacked_leaf_stays_in_the_pieces_that_a_step_returns() -> None:
    stages = Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "x"))
    params = {"w": placed(jnp.stack(kernels()), stages, "stage", None, "x")}
    x = normal(9, 16, 32)
    again = parallelize(stacked, method=EQUAL, pins={"params/w": "placed"})
    lowered: Any = again.lower(params, x)
    planned = lowered.step.pipeline.planned
    homes = {k: v for k, v in planned.specs.items() if k[0].startswith("params['w']")}
    assert homes == {("params['w'][0:2]", 0): (2,), ("params['w'][2:4]", 1): (2,)}
    expected = jax.jit(stacked)({"w": jnp.asarray(params["w"])}, x)
    assert_close(again(params, x), expected)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            (0, 8),
            r"params\[3\] is on stage 1, .* lies on x:8 of devices \[0, 1, ",
        ),
        (
            (0, 4),
            r"is on stage 1, whose mesh is x:4, and .* x:4 of devices \[0, 1, 2, 3\]",
        ),
        ((2, 6), r"x:4 of devices \[2, 3, 4, 5\]; leave the pin out"),
        ((4, 6), r"lies on x:2 of devices \[4, 5\]"),
    ],
)
def test_what_lies_on_other_devices_cannot_stay(
    devices: tuple[int, int], message: str
) -> None:
    params = kernels()
    params[3] = placed(params[3], mesh(*devices), "x")
    step = parallelize(tanh_chain, method=EQUAL, pins={"params[3]": "placed"})
    with pytest.raises(ValueError, match="A leaf lives on one stage.*" + message):
        step.plan(params, normal(9, 16, 32))


def test_a_pin_placed_needs_an_array_on_a_mesh() -> None:
    step = parallelize(tanh_chain, method=EQUAL, pins={"params": "placed"})
    with pytest.raises(ValueError, match="'params' is found in none; place it"):
        step.plan(kernels(), normal(9, 16, 32))


def test_pieces_of_a_leaf_lie_where_the_leaf_does() -> None:
    on = Mesh(np.array(jax.devices()).reshape(2, 4), ("stage", "x"))
    leaf = jax.device_put(normal(0, 4, 8), NamedSharding(on, P("stage", "x")))
    found = chunk_shardings(leaf, 2)
    devices = jax.devices()
    assert [each.device_set for each in found] == [{*devices[:4]}, {*devices[4:]}]
    assert all(each.spec == P(None, "x") for each in found)
    assert [each.mesh.axis_names for each in found] == [("x",), ("x",)]
    otherwise = split_leaf(leaf, [1, 3], found)  # no shard has just these rows
    assert [each.shape for each in otherwise] == [(1, 8), (3, 8)]
    np.testing.assert_array_equal(np.concatenate(otherwise), leaf)
    assert chunk_shardings(leaf, 3) == [leaf.sharding] * 3
    assert chunk_shardings(np.ones(4), 2) == [None, None]
