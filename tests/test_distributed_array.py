"""Values in chunks: a pipelined step's stacked layers, and who takes them."""

import logging
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.audit.compiled_collectives import collectives_in_lowered
from autopar.methods.methods import PipelineParallel
from autopar.pipelines.state_init import PlacedInit, init_programs, made_state
from autopar.planner.traced_init import trace_init
from autopar.state.distributed_array import DistributedArray
from autopar.state.placements import LeafPart
from tests.marks import slow

Tree = Any
KEY = jax.random.key(0)


def make_batch(size: int = 32) -> tuple[jax.Array, jax.Array]:
    x = jnp.sin(jnp.arange(size * 16.0)).reshape(size, 16)
    return x, jnp.ones((size, 8))


def assert_close(actual: Tree, expected: Tree) -> None:
    for ours, theirs in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "autopar")
    return caplog


def with_text(log: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [message for message in log.messages if text in message]


def init_layers(key: jax.Array) -> Tree:
    """Three layers: stages of two submeshes get different numbers of them."""
    layers = jax.vmap(lambda k: jax.random.normal(k, (16, 16)) * 0.2)
    return {
        "layers": layers(jax.random.split(key, 3)),
        "head": jax.random.normal(key, (16, 8)),
    }


def layers_loss(params: Tree, batch: Tree) -> jax.Array:
    x, y = batch

    def body(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(body, x, params["layers"])
    return jnp.mean((x @ params["head"] - y) ** 2)


def layers_step(params: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
    loss, grads = jax.value_and_grad(layers_loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


@pytest.fixture(scope="module")
def staged() -> tuple[autopar.ParallelFunction, Tree]:
    """A pipelined step over two submeshes of four devices, and its state."""
    step = autopar.parallelize(layers_step, method=PipelineParallel(2, 2))
    return step, step.init(init_layers, KEY, batch=make_batch())


@pytest.fixture(scope="module")
def evaluate() -> autopar.ParallelFunction:
    return autopar.parallelize(layers_loss)


@cache
def expected_loss() -> jax.Array:
    return jax.jit(layers_loss)(jax.jit(init_layers)(KEY), make_batch())


class TestPieces:
    def test_each_stage_makes_what_it_holds(self, staged: Any) -> None:
        _, params = staged
        layers, head = params["layers"], params["head"]
        expected = jax.jit(init_layers)(KEY)
        assert isinstance(layers, DistributedArray)
        assert [chunk.shape[0] for chunk in layers.chunks] in ([1, 2], [2, 1])
        np.testing.assert_array_equal(layers, expected["layers"])
        np.testing.assert_array_equal(head, expected["head"])
        devices = [chunk.sharding.device_set for chunk in layers.chunks]
        assert devices == [set(jax.devices()[:4]), set(jax.devices()[4:])]
        assert head.devices() == devices[1]

    def test_a_step_takes_them_as_it_returns_them(self, staged: Any) -> None:
        step, _ = staged
        expected = jax.jit(init_layers)(KEY)
        params = step.init(init_layers, KEY, batch=make_batch())
        for _ in range(2):
            places = jax.tree.map(lambda x: x.sharding, params)
            params, loss = step(params, make_batch())
            assert jax.tree.map(lambda x: x.sharding, params) == places
            expected, expected_loss = jax.jit(layers_step)(expected, make_batch())
            np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        assert_close(autopar.fetch(params), expected)

    def test_a_step_on_one_mesh_gathers_them_and_says_so_once(
        self, staged: Any, log: pytest.LogCaptureFixture
    ) -> None:
        evaluate = autopar.parallelize(layers_loss)
        params, batch = staged[1], make_batch()
        for _ in range(2):
            found = evaluate(params, batch)
            np.testing.assert_allclose(found, expected_loss(), rtol=1e-5)
        (message,) = with_text(log, "moved")
        assert "layers_loss: moved 2 arrays of 3584 bytes" in message

    def test_a_pipelined_evaluation_leaves_them_where_they_are(
        self, staged: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params, batch = staged[1], make_batch()
        evaluate = autopar.parallelize(layers_loss, method=PipelineParallel(2, 2))
        held = {id(params["head"]), *map(id, params["layers"].chunks)}
        moved: list[int] = []

        def spy(x: Any, *args: Any, **kwargs: Any) -> Any:
            moved.extend(map(id, jax.tree.leaves(x)))
            return put(x, *args, **kwargs)

        put = jax.device_put
        monkeypatch.setattr(jax, "device_put", spy)
        found = evaluate(params, batch)
        assert moved and not held & set(moved)  # the batch is moved
        np.testing.assert_allclose(found, expected_loss(), rtol=1e-5)

    def test_a_train_step_on_one_mesh_takes_them_once(self, staged: Any) -> None:
        batch = make_batch()
        params = staged[0].init(init_layers, KEY, batch=batch)
        step = autopar.parallelize(layers_step)
        assert step.plan(params, batch).predicted.step_seconds > 0
        after, loss = step(params, batch)
        expected, expected_loss = jax.jit(layers_step)(jax.jit(init_layers)(KEY), batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        assert_close(after, expected)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(after))

    def test_a_compiled_step_takes_them(self, staged: Any, evaluate: Any) -> None:
        params, batch = staged[1], make_batch()
        found = evaluate.lower(params, batch).compile()(params, batch)
        np.testing.assert_allclose(found, expected_loss(), rtol=1e-5)

    def test_chunks_that_were_donated_are_refused(self, staged: Any) -> None:
        step, _ = staged
        params = step.init(init_layers, KEY, batch=make_batch())
        step(params, make_batch())
        assert params["layers"].is_deleted()
        with pytest.raises((ValueError, RuntimeError), match="may be donated once"):
            step(params, make_batch())

    def test_types_of_chunks_have_a_plan_and_no_values(
        self, staged: Any, evaluate: Any
    ) -> None:
        step, _ = staged
        spec = step.abstract_state(init_layers, KEY, batch=make_batch())
        layers = spec["layers"]
        assert isinstance(layers, autopar.AbstractDistributedArray)
        assert layers.shape == (3, 16, 16)
        evaluate.plan(spec, make_batch())
        with pytest.raises(TypeError, match="runs on arrays"):
            evaluate(spec, make_batch())

    def test_deleted_chunks_are_named(self, evaluate: Any) -> None:
        params = jax.jit(init_layers)(KEY)
        devices = jax.devices()
        chunks = [
            jax.device_put(params["layers"][:1], devices[0]),
            jax.device_put(params["layers"][1:], devices[1]),
        ]
        layers = DistributedArray(chunks)
        assert evaluate({**params, "layers": layers}, make_batch()) > 0
        chunks[1].delete()
        with pytest.raises(RuntimeError, match=r"but params\['layers'\] was given"):
            evaluate({**params, "layers": layers}, make_batch())
        with pytest.raises(RuntimeError, match="until it is donated or deleted"):
            autopar.fetch(layers)

    def test_other_shapes_are_planned_anew(self, staged: Any, evaluate: Any) -> None:
        evaluate(staged[1], make_batch())
        chunks = staged[1]["layers"].chunks
        shorter = {**staged[1], "layers": DistributedArray(chunks[:1])}
        rows = chunks[0].shape[0]
        params = jax.jit(init_layers)(KEY)
        expected = jax.jit(layers_loss)(
            {**params, "layers": params["layers"][:rows]}, make_batch()
        )
        np.testing.assert_allclose(evaluate(shorter, make_batch()), expected, rtol=1e-5)

    def test_functions_of_jax_refuse_them(self, staged: Any) -> None:
        layers = staged[1]["layers"]
        for fun in (jnp.sin, jax.jit(lambda x: x), jax.grad(lambda x: x.sum())):
            with pytest.raises(TypeError, match="DistributedArray"):
                fun(layers)
        fetched = autopar.fetch({"layers": layers, "key": KEY, "number": 3})
        assert isinstance(fetched["layers"], np.ndarray)
        assert fetched["key"] is KEY and fetched["number"] == 3


class TestStagesOfEvenLayers:
    def test_a_stacked_leaf_over_equal_stages_is_one_array(self) -> None:
        def init(key: jax.Array) -> Tree:
            return {**init_layers(key), "layers": jax.random.normal(key, (4, 16, 16))}

        step = autopar.parallelize(layers_step, method=PipelineParallel(2, 2))
        params = step.init(init, KEY, batch=make_batch())
        layers = params["layers"]
        assert isinstance(layers, jax.Array) and len(layers.devices()) == 8
        np.testing.assert_array_equal(layers, jax.jit(init)(KEY)["layers"])
        spec = step.abstract_state(init, KEY, batch=make_batch())["layers"]
        assert layers.sharding == spec.sharding
        assert step(params, make_batch())[0]["layers"].sharding == layers.sharding


def one_key(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (12, 16, 24))


def key_for_each(key: jax.Array) -> jax.Array:
    keys = jax.random.split(key, 12)
    return jax.vmap(lambda key: jax.random.normal(key, (16, 24)) * 0.1)(keys)


def loop_over_keys(key: jax.Array) -> jax.Array:
    def body(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        key, use = jax.random.split(key)
        return key, jax.random.normal(use, (16, 24))

    return jax.lax.scan(body, key, None, length=12)[1]


@pytest.mark.parametrize(
    "init_fn",
    [
        slow(one_key),
        slow(key_for_each),
        loop_over_keys,
    ],
)
def test_a_stage_makes_its_own_layers_only(init_fn: Any) -> None:
    """Not even in passing is the stack whole, although it is one value of init_fn."""
    rows, devices = [(0, 2), (2, 5), (5, 12)], np.array(jax.devices()[:6])
    home = tuple(
        LeafPart(NamedSharding(Mesh(submesh, ("x",)), P(None, "x")), part)
        for submesh, part in zip(devices.reshape(3, 2), rows, strict=True)
    )
    init = trace_init(init_fn, (KEY,), {})
    programs = init_programs(PlacedInit(init, (home,)), autopar.Cluster.local())
    made = {each: each.program.jitted((), *init.values) for each in programs}
    layers = made_state(init, made)
    assert [chunk.shape[0] for chunk in layers.chunks] == [2, 3, 7]
    np.testing.assert_array_equal(layers, jax.jit(init_fn)(KEY))
    for each in programs:
        text = each.program.lower().as_text()
        assert "12x16x" not in text and "12x8x" not in text
        assert not collectives_in_lowered(each.program.lower())
