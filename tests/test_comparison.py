"""A plan's shardings for plain jit, and a step sharded by hand beside a plan."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import autopar

P = PartitionSpec
STAGES = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
Params = dict[str, jax.Array]


def train_step(params: Params, batch: jax.Array) -> tuple[Params, jax.Array]:
    def loss_of(params: Params) -> jax.Array:
        hidden = jax.nn.relu(batch @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def arguments() -> tuple[Params, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (16, 64))
    down = jax.random.normal(keys[1], (64, 16))
    return {"up": up, "down": down}, jax.random.normal(keys[2], (24, 16))


def by_hand(mesh: Mesh | AbstractMesh) -> Callable[..., Any]:
    def on(*axes: str | None) -> NamedSharding:
        return NamedSharding(mesh, P(*axes))

    params = {"up": on(None, "model"), "down": on("model")}
    given = {"in_shardings": (params, on("data")), "out_shardings": (params, None)}
    return jax.jit(train_step, donate_argnums=0, **given)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_a_plain_jit_takes_the_shardings_of_a_plan() -> None:
    pins = {"params/up": P(None, "model")}
    step = autopar.parallelize(train_step, mesh="data:2;model:4", pins=pins)
    found = step.plan(*arguments()).shardings()
    assert found.arguments[0]["up"].spec == P(None, "model")
    jitted = jax.jit(
        train_step, in_shardings=found.arguments, out_shardings=found.results
    )
    results = jitted(*arguments())
    assert_close(results, jax.jit(train_step)(*arguments()))
    assert jax.tree.map(lambda x: x.sharding, results) == found.results
    # What it returns comes in again as it lies.
    assert found.results[0] == found.arguments[0]


def test_shardings_are_on_the_mesh_that_is_given(mesh: Mesh) -> None:
    step = autopar.parallelize(train_step, mesh="data:2;model:4")
    plan = step.plan(*arguments())
    turned = Mesh(mesh.devices[::-1], mesh.axis_names)
    found = plan.shardings(turned)
    assert all(each.mesh == turned for each in jax.tree.leaves(found))
    with pytest.raises(ValueError, match=r"mesh of its axes, data:2;model:4, but got"):
        plan.shardings(Mesh(mesh.devices.T, ("model", "data")))


def test_shardings_follow_what_if_and_are_of_the_step_alone() -> None:
    step = autopar.parallelize(train_step, mesh="x:8")
    plan = step.plan(*arguments())
    pinned = plan.what_if({"params/up": P(None, "x")})
    assert pinned.shardings().arguments[0]["up"].spec == P(None, "x")
    with pytest.raises(ValueError, match="was loaded"):
        autopar.Plan(plan.decision).shardings()
    with pytest.raises(ValueError, match="batch went by keyword"):
        step.plan(arguments()[0], batch=arguments()[1]).shardings()
    with pytest.raises(TypeError, match="is a pipeline"):
        autopar.parallelize(train_step, method=STAGES).plan(*arguments()).shardings()


def test_modules_of_nnx_have_no_shardings_for_jit() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def step(model: Any, x: jax.Array) -> jax.Array:
        return model(x).sum()

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    plan = autopar.parallelize(step, mesh="x:8").plan(model, jnp.ones((8, 8)))
    with pytest.raises(ValueError, match=r"what nnx\.split returns"):
        plan.shardings()


def test_a_step_by_hand_is_beside_its_plan(mesh: Mesh) -> None:
    specs = {"params/up": P(None, "model"), "params/down": P("model"), "batch": "data"}
    specs["batch"] = P("data")
    step = autopar.parallelize(train_step, mesh="data:2;model:4", pins=specs)
    found = autopar.compare(step, by_hand(mesh), *arguments())
    # Sharded alike, both reduce the same: the loss, two gradients and activations.
    assert found.planned.bytes_by_kind["all_reduce"] > 0
    assert found.other.bytes_by_kind["all_reduce"] > 0
    assert found.other.replayed is None  # nobody knows how quick virtual devices are
    ours = found.planned.device_bytes
    assert ours == pytest.approx(found.other.device_bytes, rel=0.3)
    text = str(found)
    assert "the plan of train_step beside train_step (jit)" in text
    assert "peak memory" in text and "  all_reduce" in text


def test_a_step_may_constrain_itself_and_arguments_say_where_they_lie(
    mesh: Mesh,
) -> None:
    params, batch = arguments()
    split = jax.device_put(batch, NamedSharding(mesh, P(("data", "model"))))
    copies = jax.device_put(params, NamedSharding(mesh, P()))
    step = autopar.parallelize(train_step)
    found = autopar.compare(step, train_step, copies, split)
    assert set(found.other.bytes_by_kind) == {"all_reduce"}
    # Where arguments lie is not asked of the plan.
    assert step.plan(params, batch) == step.plan(*arguments())


def test_another_plan_may_be_the_other_step() -> None:
    step, other = (autopar.parallelize(train_step, mesh=m) for m in ("x:8", "x:2;y:4"))
    found = autopar.compare(step, other, *arguments())
    assert found.names[1] == "train_step (another plan)"


def test_what_cannot_be_compared_says_so(mesh: Mesh) -> None:
    with pytest.raises(TypeError, match="needs a parallelized step first"):
        autopar.compare(train_step, train_step, *arguments())  # type: ignore[arg-type]
    step = autopar.parallelize(train_step)
    with pytest.raises(ValueError, match=r"for 8 devices, but .* is for 1"):
        autopar.compare(step, jax.jit(train_step), *arguments())
    pipeline = autopar.parallelize(train_step, method=STAGES)
    with pytest.raises(NotImplementedError, match="a plan is a pipeline"):
        autopar.compare(pipeline, by_hand(mesh), *arguments())


def test_the_command_prints_the_same_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autopar.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "by_hand_train.py").write_text(
        "import jax\n"
        "from tests import test_comparison as steps\n"
        "def planned(): return steps.train_step, steps.arguments()\n"
        "def jitted(): return steps.by_hand(jax.make_mesh((2, 4), "
        "('data', 'model'), axis_types=(jax.sharding.AxisType.Auto,) * 2))\n"
    )
    with pytest.raises(SystemExit, match="0"):
        main(["compare", "by_hand_train:planned", "by_hand_train:jitted"])
    assert "the plan of train_step beside train_step (jit)" in capsys.readouterr().out
