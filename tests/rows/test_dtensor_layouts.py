"""Rows of TensorFlow DTensor: meshes, layouts, relayout, one step in many layouts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.sharding.layouts import (
    batch_sharded,
    inner_sharded,
    layout_text,
    parse_layout,
    replicated,
    without_dims,
)
from autopar.steps.lowered_step import Compiled
from tests.rows.fixtures import Case, f1, random
from tests.rows.running import homes, run_as_planned, traffic

MESHES = {
    "string": "batch:4;model:2",
    "list": [("batch", 4), ("model", 2)],
    "dict": {"batch": 4, "model": 2},
    "filled string": "batch:-1;model:2",
    "filled list": [("batch", 4), ("model", -1)],
    "filled dict": {"batch": -1, "model": 2},
}


@pytest.mark.parametrize("form", MESHES)
def test_dt_1_a_mesh_in_any_form(form: str) -> None:
    case = f1()
    plan = autopar.parallelize(case.step, mesh=MESHES[form]).plan(*case.args)
    assert str(plan.sharding.mesh) == "batch:4;model:2"


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ([("batch", 3)], "must use every device, but batch:3 holds 3 of 8"),
        ({"batch": 16}, "needs 16 and there are 8"),
        ([("batch", -1), ("model", 3)], "must divide the 8 devices"),
        ([("batch", 2), ("batch", 4)], "must be distinct"),
    ],
)
def test_dt_1_sizes_that_do_not_match_the_devices(mesh: Any, message: str) -> None:
    case = f1()
    with pytest.raises(ValueError, match=message):
        autopar.parallelize(case.step, mesh=mesh).plan(*case.args)


def test_dt_1_one_script_on_one_to_eight_devices() -> None:
    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((x @ w - y) ** 2)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    def losses(step: Any) -> list[float]:
        w, x, y = random(0, 16, 8), random(1, 32, 16), random(2, 32, 8)
        found = []
        for _ in range(3):
            w, loss = step(w, x, y)
            found.append(float(loss))
        return found

    expected = losses(jax.jit(step))
    for number in (1, 2, 4, 8):
        mesh = Mesh(jax.devices()[:number], ("batch",))
        parallel = autopar.parallelize(step, mesh=mesh, method=autopar.DataParallel())
        np.testing.assert_allclose(losses(parallel), expected, rtol=1e-5)


def guide_mesh() -> Mesh:
    """DTensor's guide has 3 x 2 devices."""
    return Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("x", "y"))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [("[x, y]", (1, 1)), ("[x, -]", (1, 2)), ("[-, -]", (3, 2)), ("[-, y]", (3, 1))],
)
def test_dt_2_shards_have_the_shapes_of_the_guide(
    layout: str, shape: tuple[int, ...]
) -> None:
    step = autopar.parallelize(lambda a: 2.0 * a, mesh=guide_mesh(), pins={"a": layout})
    argument = random(0, 3, 2)
    compiled = step.lower(argument).compile()
    (sharding,) = jax.tree.leaves(compiled.compiled.input_shardings)
    assert sharding.shard_shape((3, 2)) == shape
    np.testing.assert_allclose(compiled(argument), 2.0 * argument)


def test_dt_2_layouts_by_name() -> None:
    assert replicated(2) == P(None, None)
    assert batch_sharded("x", rank=3) == P("x", None, None)
    assert inner_sharded("x", rank=3) == P(None, None, "x")
    assert without_dims(P("x", None, "y"), [0]) == P(None, "y")
    assert without_dims(P("x", None, "y"), [-1, 1]) == P("x")
    with pytest.raises(ValueError, match="one of the 2"):
        without_dims(P("x", None), [2])


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("[]", P()),
        ("[x, -]", P("x", None)),
        ("[-, x+y, ?]", P(None, ("x", "y"), autopar.FREE)),
    ],
)
def test_dt_2_a_layout_comes_back_from_its_text(text: str, layout: P) -> None:
    assert parse_layout(text) == layout
    assert layout_text(layout) == text
    assert parse_layout(layout_text(layout, rank=3)) == P(
        *layout, *[None] * (3 - len(layout))
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x, x]", "'x' is twice"),
        ("[x+x]", "'x' is twice"),
        ("x, -", "an entry for each dim"),
        ("[x, , -]", "axes joined by"),
    ],
)
def test_dt_2_a_text_that_is_no_layout(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layout(text)


def test_dt_2_the_specs_that_a_plan_prints_can_be_pinned() -> None:
    case = f1()
    step = autopar.parallelize(
        case.step, mesh="x:2;y:4", pins={"params/w": "[-, x+y]", "^x$": "[x, -]"}
    )
    plan = step.plan(*case.args)
    assert homes(plan)["params['w']"] == (1, 1) and homes(plan)["x"] == (0, -1)
    assert "[-, x+y]" in str(plan)


ROW, COLUMN = P("x"), P(None, "x")
GATHER, EXCHANGE = ("all_gather", "x"), ("all_to_all", "x")
# Where x lies, where to, and what the way there and that of the gradient back cost.
RELAYOUTS: dict[str, tuple[P, P, dict[Any, Any], dict[Any, Any]]] = {
    "split": (P(), ROW, {}, {GATHER: [16_384]}),
    "gathered": (ROW, P(), {GATHER: [16_384]}, {}),
    "moved": (ROW, COLUMN, {EXCHANGE: [2_048]}, {EXCHANGE: [2_048]}),
}


def shard_shape(compiled: Compiled) -> tuple[int, ...]:
    """Of the only result."""
    (sharding,) = jax.tree.leaves(compiled.compiled.output_shardings)
    assert isinstance(sharding, NamedSharding)
    return sharding.shard_shape((64, 64))


@pytest.mark.parametrize("name", RELAYOUTS)
def test_dt_3_relayout_costs_nothing_one_way_and_a_gather_the_other(
    mesh_1d: Mesh, name: str
) -> None:
    source, target, there, _ = RELAYOUTS[name]
    step = autopar.parallelize(
        lambda a: autopar.relayout(a, target), mesh=mesh_1d, pins={"a": source}
    )
    assert traffic(run_as_planned(step, random(0, 64, 64)).plan) == there


@pytest.mark.parametrize("name", RELAYOUTS)
def test_dt_3_the_gradient_lies_as_what_was_laid_out_anew(
    mesh_1d: Mesh, name: str
) -> None:
    source, target, there, back = RELAYOUTS[name]

    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(autopar.relayout(x, target)) * w)

        return jax.grad(loss)(x)

    pins = {"x": source, "w": target}
    step = autopar.parallelize(gradient, mesh=mesh_1d, pins=pins)
    compiled = run_as_planned(step, random(0, 64, 64), random(1, 64, 64))
    parts = [8 if axis else 1 for axis in (*source, None, None)[:2]]
    assert shard_shape(compiled) == (64 // parts[0], 64 // parts[1])
    both = {key: there.get(key, []) + back.get(key, []) for key in {**there, **back}}
    assert traffic(compiled.plan) == both


def test_dt_3_relayout_like_and_its_gradient(mesh_1d: Mesh) -> None:
    """x by rows is laid like w, by columns; its gradient is wanted by rows again."""

    def laid(x: jax.Array, w: jax.Array) -> jax.Array:
        return autopar.relayout_like(x, w)

    def gradient(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.grad(lambda x: jnp.sum(jnp.tanh(laid(x, w)) * w))(x)

    for fun, shape, exchanges in ((laid, (64, 8), 1), (gradient, (8, 64), 2)):
        step = autopar.parallelize(fun, mesh=mesh_1d, pins={"x": ROW, "w": COLUMN})
        compiled = run_as_planned(step, random(0, 64, 64), random(1, 64, 64))
        assert shard_shape(compiled) == shape
        assert traffic(compiled.plan) == {EXCHANGE: [2_048] * exchanges}


def test_dt_3_relayouts_change_nothing_elsewhere() -> None:
    x, w = random(0, 64, 64), random(1, 64, 64)

    def plain(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(x) * w)

    def relaid(x: jax.Array) -> jax.Array:
        like = autopar.relayout_like(autopar.relayout(x, P("nowhere")), w)
        return jnp.sum(jnp.sin(like) * w)

    def second(fun: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jax.grad(fun)(x) ** 2))

    for transform in (jax.jit, jax.grad, second):
        np.testing.assert_array_equal(transform(relaid)(x), transform(plain)(x))
    found, expected = (jax.jvp(fun, (x,), (w,)) for fun in (relaid, plain))
    np.testing.assert_array_equal(found, expected)
    rows = jax.vmap(lambda row: autopar.relayout_like(row, w[0]))(x)
    np.testing.assert_array_equal(rows, x)
    assert "autopar" not in jax.jit(relaid).lower(x).as_text()
    whole = autopar.relayout({"a": 3}, P())
    assert whole["a"] == autopar.relayout_like(whole, {"a": 0.5})["a"] == 3
    with pytest.raises(ValueError, match=r"one shape.*\(64, 64\) and \(64,\)"):
        autopar.relayout_like(x, w[0])


FEATURES, HIDDEN, CLASSES, BATCH = 1200, 48, 2, 64


def tutorial() -> Case:
    """DTensor's tutorial: Dense, BatchNorm, Dense on 1200 features; plain descent.

    Its BatchNorm has no parameters.
    """

    def step(
        params: dict[str, jax.Array], x: jax.Array, labels: jax.Array
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            hidden = jax.nn.sigmoid(x @ params["w1"] + params["b1"])
            mean, variance = hidden.mean(0), hidden.var(0)
            normed = (hidden - mean) * jax.lax.rsqrt(variance + 1e-3)
            logits = normed @ params["w2"] + params["b2"]
            picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
            return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = {
        "w1": random(0, FEATURES, HIDDEN, scale=0.05),
        "b1": jnp.zeros(HIDDEN),
        "w2": random(1, HIDDEN, CLASSES, scale=0.3),
        "b2": jnp.zeros(CLASSES),
    }
    labels = np.random.default_rng(3).integers(0, CLASSES, BATCH)
    batch = random(2, BATCH, FEATURES), jnp.asarray(labels, jnp.int32)
    return Case(step, (params, *batch))


COLUMNS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model")}
ROWS = {"b2": P(), "labels": P("batch"), "^x$": P("batch")}
# The layouts of each mesh, and the bytes of arguments on a device.
TUTORIAL: dict[str, tuple[dict[str, P], int]] = {
    "batch:8": ({"w1": P(), "b1": P(), "w2": P()} | ROWS, 269_416),
    "batch:4,model:2": (COLUMNS | ROWS, 192_360),
    "batch:2,feature:2,model:2": (
        COLUMNS | ROWS | {"w1": P("feature", "model"), "^x$": P("batch", "feature")},
        134_824,
    ),
}


@pytest.mark.parametrize("mesh", TUTORIAL)
def test_dt_7_one_step_in_data_model_and_spatial_layouts(mesh: str) -> None:
    """Normalisation is over the whole batch in each."""
    case, (pins, argument_bytes) = tutorial(), TUTORIAL[mesh]
    step = autopar.parallelize(case.step, mesh=mesh, pins=pins)
    compiled = run_as_planned(step, *case.args)
    analysis = compiled.compiled.memory_analysis()
    assert analysis is not None
    assert analysis.argument_size_in_bytes == argument_bytes
    ours, loss = step(*jax.tree.map(jnp.copy, case.args))
    theirs, expected = jax.jit(case.step)(*case.args)
    np.testing.assert_allclose(loss, expected, rtol=0, atol=1e-5)
    for name, value in ours.items():  # 2e-8, or a unit in the last place of the largest
        largest = float(abs(theirs[name]).max())
        np.testing.assert_allclose(
            value, theirs[name], rtol=0, atol=max(2e-8, 1.2e-7 * largest)
        )
