"""A plan for a step that was edited: what is still there keeps its choice."""

import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.plans.plan_file import from_json, to_json
from autopar.steps.parallel_plan import Plan
from tests.rows.fixtures import Case, f1, random
from tests.rows.running import homes

MESH = "x:2;y:4"
# Whole parameters and a split output: nothing that the solver would choose itself.
PINS = {"params/w0": "[-, -]", "params/w1": "[x, -]"}


def layers(sizes: list[int], names: list[str] | None = None) -> Case:
    """Layers of these sizes by name, trained by gradient descent."""
    names = names or [f"w{i}" for i in range(len(sizes) - 1)]
    shapes = zip(sizes[:-1], sizes[1:], strict=True)
    params = {
        name: random(i, *shape, scale=shape[0] ** -0.5)
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            hidden = x
            for name in names:
                hidden = jnp.tanh(hidden @ params[name])
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return Case(step, (params, random(9, 32, sizes[0])))


def planned(case: Case, **options: Any) -> Plan:
    return autopar.parallelize(case.step, **options).plan(*case.args)


@pytest.fixture(scope="module")
def old() -> Plan:
    return planned(layers([64, 64, 64]), mesh=MESH, pins=PINS)


def kept_paths(old: Plan, new: Plan) -> set[str]:
    before, after = homes(old), homes(new)
    return {path for path in before if before[path] == after.get(path)}


def test_a_step_that_did_not_change_has_the_very_plan(old: Plan) -> None:
    assert planned(layers([64, 64, 64]), like=old) == old


def test_a_hand_edited_plan_of_the_same_step_stays_as_it_is(old: Plan) -> None:
    document = json.loads(to_json(old.sharding))
    document["predicted"]["step_seconds"] *= 2
    edited = Plan(from_json(json.dumps(document), "plan.json"))
    assert planned(layers([64, 64, 64]), like=edited) == edited


def test_a_new_layer_is_solved_and_the_others_stay(
    old: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    case = layers([64, 64, 64, 64])
    with caplog.at_level(logging.WARNING, "autopar"):
        new = planned(case, like=old)
    assert kept_paths(old, new) == set(homes(old))
    assert (
        "planned anew: params['w2']" in caplog.text
        and "3 of 4 arguments" in caplog.text
    )
    pins = {each.path: homes_as_pins(old)[each.path] for each in old.sharding.inputs}
    fixed = planned(case, mesh=MESH, pins=pins)
    most = fixed.predicted.step_seconds * 1.0101
    assert new.predicted.step_seconds <= most
    assert {e.path for e in old.diff(new).leaves} == {"params['w2']"}


def homes_as_pins(plan: Plan) -> dict[str, P]:
    names = plan.sharding.mesh.axis_names
    return {
        each.path: P(
            *(
                tuple(n for n, s in zip(names, each.spec, strict=True) if s == dim)
                or None
                for dim in range(len(each.shape))
            )
        )
        for each in plan.sharding.inputs
    }


def test_a_layer_that_is_gone_or_renamed_is_told(
    old: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        new = planned(layers([64, 64, 64], ["w0", "out"]), like=old)
    assert kept_paths(old, new) == {"params['w0']", "x"}
    assert "planned anew: params['out']" in caplog.text
    assert "no more there: params['w1']" in caplog.text


def test_a_size_that_still_divides_keeps_its_spec_and_another_does_not(
    old: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    wider = planned(layers([64, 64, 80]), like=old)
    assert kept_paths(old, wider) == set(homes(old))
    with caplog.at_level(logging.WARNING, "autopar"):
        odd = planned(layers([64, 63, 64]), like=old)
    assert "planned anew: params['w1']" in caplog.text
    assert kept_paths(old, odd) >= {"params['w0']", "x"}


def test_a_dim_more_is_planned_anew(caplog: pytest.LogCaptureFixture) -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tensordot(x, w, x.ndim - 1)

    old = planned(Case(step, (random(0, 64, 64), random(1, 8, 64))), mesh="x:8")
    case = Case(step, (random(0, 8, 64, 64), random(1, 8, 8, 64)))
    with caplog.at_level(logging.WARNING, "autopar"):
        planned(case, like=old)
    assert "planned anew: w" in caplog.text


def test_values_stay_those_of_jit(old: Plan) -> None:
    case = layers([64, 64, 64, 64])
    step = autopar.parallelize(case.step, like=old, donate_argnums=())
    results, expected = step(*case.args), jax.jit(case.step)(*case.args)
    for got, want in zip(
        jax.tree.leaves(results), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_pins_come_before_the_plan(old: Plan) -> None:
    new = planned(layers([64, 64, 64, 64]), like=old, pins={"w[01]": P("y", "x")})
    assert homes(new)["params['w0']"] == homes(new)["params['w1']"] == (1, 0)
    assert homes(new)["x"] == homes(old)["x"]


def test_a_mesh_with_the_same_axes_keeps_what_it_can(old: Plan) -> None:
    case = layers([64, 64, 64, 64])
    new = planned(case, like=old, mesh="x:4;y:2")
    assert kept_paths(old, new) == set(homes(old))
    renamed = planned(case, like=old, mesh="a:2;b:4")
    assert homes(renamed)["params['w0']"] == (-1, -1)  # it names no axis


def test_another_number_of_devices_needs_a_mesh(old: Plan) -> None:
    cluster = autopar.Cluster.preset("2x8xH100")
    with pytest.raises(ValueError, match="name the mesh, for example mesh='x:-1;y:4'"):
        planned(layers([64, 64, 64]), like=old, cluster=cluster)
    new = planned(layers([64, 64, 64]), like=old, cluster=cluster, mesh="x:-1;y:4")
    assert str(new.sharding.mesh) == "x:4;y:4"
    assert kept_paths(old, new) == set(homes(old))


def test_what_no_longer_fits_the_memory_is_planned_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = {"params": P()}
    old = planned(layers([256, 256]), mesh="x:8", pins=whole)
    case = layers([256, 512])
    budget = 512 * 1024  # what the whole parameters would take alone
    with caplog.at_level(logging.WARNING, "autopar"):
        new = planned(case, like=old, memory_budget=budget)
    assert "all is planned anew" in caplog.text
    assert new.predicted.peak_bytes <= budget


def test_an_operator_keeps_its_factors_where_that_costs_nothing(old: Plan) -> None:
    case = layers([64, 64, 64])

    def with_metric(params: Any, x: jax.Array) -> Any:
        return *case.step(params, x), jnp.max(x)

    new = planned(Case(with_metric, case.args), like=old)
    before = {op.name: op.factors for op in old.sharding.operators}
    after = {op.name: op.factors for op in new.sharding.operators}
    assert {name: after[name] for name in before} == before
    assert "reduce_max.0" in after


def test_a_plan_of_another_function_is_refused_and_the_remedy_named(old: Plan) -> None:
    with pytest.raises(ValueError, match=r"parallelize\(step, like=plan\)"):
        planned(layers([64, 64, 64, 64]), plan=old)


def test_a_path_is_read(old: Plan, tmp_path: Path) -> None:
    old.save(tmp_path / "plan.json")
    case = layers([64, 64, 64])
    assert planned(case, like=tmp_path / "plan.json") == old
    assert planned(case, like=str(tmp_path / "plan.json")) == old
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(autopar.PlanFileError, match="truncated"):
        planned(case, like=tmp_path / "plan.json")


@pytest.mark.parametrize("name", ["plan", "rules", "method"])
def test_what_contradicts_it_is_refused(old: Plan, name: str) -> None:
    rules = autopar.LayoutRules("batch:x", {"x": "batch -"})
    given = {"plan": old, "rules": rules, "method": autopar.DataParallel()}[name]
    with pytest.raises(ValueError, match="`like` keeps what a plan chose"):
        autopar.parallelize(f1().step, like=old, **{name: given})


def test_it_must_be_a_plan(old: Plan) -> None:
    with pytest.raises(TypeError, match="`like` must be an autopar.Plan or the path"):
        autopar.parallelize(f1().step, like=3)  # type: ignore[call-overload]
    method = autopar.PipelineParallel(num_stages=2)
    with pytest.raises(ValueError, match="form of a plan, which is one program"):
        autopar.parallelize(f1().step, like=old, method=method)


def stage_homes(plan: Plan) -> dict[str, tuple[int, ...]]:
    programs = (each.sharding for each in plan.stages.programs)
    return {i.path: i.spec for each in programs for i in each.inputs}


def test_a_pipeline_keeps_its_stages_and_places(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    method = autopar.PipelineParallel(
        num_stages=2, num_microbatches=4, stage_products=[1, 2]
    )
    case = layers([64, 64, 64, 64])
    old = planned(case, mesh="x:4", method=method, pins={"params/w1": "[x, -]"})
    old.save(path := tmp_path / "plan.json")
    assert planned(case, like=path) == old
    with pytest.raises(ValueError, match="which is a pipeline, but the method"):
        planned(case, like=old, method=autopar.ShardParallel())
    with caplog.at_level(logging.INFO, "autopar"):
        edited = layers([64, 64, 64, 64, 64], ["w0", "w1", "new", "w2"])
        new = planned(edited, like=path, pins={"params/w0": "[-, x]"})
    (told,) = (r for r in caplog.records if "given as `like`" in r.message)
    assert told.levelno == logging.WARNING
    assert "3 of 4 arguments keep their place; planned anew: params['new']" in (
        told.message
    )
    assert new.stages.meshes == old.stages.meshes
    assert new.stages.num_microbatches == 4 and not new.stages.stage_products
    before, after = stage_homes(old), stage_homes(new)
    for name in ("params['w1']", "params['w2']", "x"):
        assert after[name] == before[name]
    assert before["params['w1']"] == (0,) and after["params['w0']"] == (1,)
    asked = new.what_if({"params/new": "[-, -]"})
    assert stage_homes(asked)["params['new']"] == (-1,)
    assert stage_homes(asked)["params['w1']"] == (0,)
