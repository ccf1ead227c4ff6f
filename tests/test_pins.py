"""Pins fix how arguments lie; the solver chooses the rest."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar


def step(params: dict[str, Any], x: jax.Array) -> jax.Array:
    return x @ params["mlp"]["w1"] @ params["mlp"]["w2"]


def arguments() -> tuple[Any, jax.ShapeDtypeStruct]:
    shape = jax.ShapeDtypeStruct((16, 16), "float32")
    return {"mlp": {"w1": shape, "w2": shape}}, shape


def homes(pins: dict[str, P], mesh: str = "data:2;model:4") -> list[tuple[int, ...]]:
    """Where w1, w2 and x lie: the dim that each axis splits, or -1."""
    plan = autopar.parallelize(step, mesh=mesh, pins=pins).plan(*arguments())
    return [each.spec for each in plan.sharding.inputs]


@pytest.mark.parametrize("path", ["params['mlp']['w1']", "params/mlp/w1", "w1$"])
def test_a_path_in_either_spelling_or_an_expression_found_in_it(path: str) -> None:
    assert homes({path: P("data", "model")})[0] == (0, 1)
    assert homes({path: P(None, ("data", "model"))})[0] == (1, 1)
    assert homes({path: P()})[0] == (-1, -1)


def test_the_exact_path_comes_before_expressions_and_these_in_order() -> None:
    pins = {"mlp": P("data"), "w2": P("model"), "params/mlp/w1": P(None, "model")}
    assert homes(pins)[:2] == [(-1, 1), (0, -1)]


def test_a_free_dim_is_left_to_the_axes_that_the_pin_does_not_name() -> None:
    row = homes({"^x$": P("data", autopar.FREE)})[2]
    assert row[0] == 0 and row[1] in (-1, 1)


def test_what_is_pinned_stays_so_when_the_step_returns_it() -> None:
    def update(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return {"w": params["w"] + x.T @ x}

    shape = jax.ShapeDtypeStruct((16, 16), "float32")
    pinned = autopar.parallelize(update, pins={"w": P(None, "x")})
    compiled = pinned.lower({"w": shape}, shape).compile()
    (out,) = jax.tree.leaves(compiled.compiled.output_shardings)
    assert out.shard_shape((16, 16)) == (16, 2)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"w3": P("data")}, "'w3' is in none of the 3; did you mean params"),
        ({"w1": P("rows")}, r"only name axes of the mesh .* but got 'rows'"),
        ({"w1": P("data", "data")}, "may split one dim only, but 'data' appears twice"),
        ({"w1": P(None, None, "data")}, "at most one entry for each dim"),
        ({"^x$": P(("model", "model"))}, "dim only, but 'model' appears twice"),
        ({"w1(": P()}, r"'w1\(' is in none of the 3"),
    ],
    ids=["unmatched", "axis", "twice", "rank", "repeated", "expression"],
)
def test_a_pin_that_cannot_be_is_refused(pins: dict[str, P], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        homes(pins)


def test_an_axis_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="Axes must divide the dims that they split"):
        autopar.parallelize(lambda x: 2 * x, pins={"x": P("x")}).plan(
            jax.ShapeDtypeStruct((12,), "float32")
        )


def test_keys_cannot_be_split() -> None:
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8))
    draw = autopar.parallelize(jax.vmap(jax.random.uniform), pins={".": P("x")})
    with pytest.raises(ValueError, match="PRNG keys must lie whole on every device"):
        draw.plan(keys)


def test_a_pin_is_a_partition_spec() -> None:
    with pytest.raises(TypeError, match="must be a jax.sharding.PartitionSpec"):
        homes({"w1": ("data",)})  # type: ignore[dict-item]


@pytest.mark.parametrize("pins", ["w1", ["w1"], [("w1", P(), P())], {0: P()}, 5])
def test_pins_are_specs_by_path(pins: Any) -> None:
    with pytest.raises(TypeError, match="`pins` must be specs by path"):
        autopar.parallelize(step, pins=pins)


def test_state_that_is_pinned_as_placed_stays_where_its_array_lies() -> None:
    def update(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return {k: v + x.T @ x for k, v in w.items()}

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    lies = NamedSharding(mesh, P(None, "data"))
    w = {"a": jax.device_put(jax.numpy.ones((16, 16)), lies), "b": np.ones((16, 16))}
    x = np.ones((8, 16), "float32")

    def first(pins: Any, **options: Any) -> Any:
        moved = autopar.parallelize(update, pins=pins, donate_argnums=(), **options)
        return moved(w, x)["a"].sharding.spec

    assert first({}) != lies.spec
    assert first({"w/a": "placed"}) == first({".": "placed"}) == lies.spec
    plan = autopar.parallelize(update).plan(w, x)
    assert plan.what_if({"w/a": "placed"}).sharding.inputs[0].spec == (1, -1)
    with pytest.raises(ValueError, match="'b' is found in none; place it with"):
        first({"b": "placed"})
    with pytest.raises(ValueError, match="of the step, x:8, but .* lies on data:2;mod"):
        first({"a": "placed"}, mesh="x:8")
    stages = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    with pytest.raises(ValueError, match="A leaf lives on one stage.* is on stage 0"):
        first({"w/a": "placed"}, method=stages)


def test_pins_and_a_plan_exclude_each_other() -> None:
    plan = autopar.parallelize(step, mesh="x:8").plan(*arguments())
    with pytest.raises(ValueError, match="`pins` must be left out with `plan`"):
        autopar.parallelize(step, plan=plan, pins={"w1": P("x")})


def test_a_key_that_is_a_path_is_no_expression() -> None:
    """As one, `params['mlp']['w1']` is found in every path with `params/`."""
    first = homes({"params['mlp']['w1']": P("data"), "w2": P("model")})
    assert first[:2] == [(0, -1), (-1, 0)]
    second = homes({"params['mlp']['w1']": P("data"), "params": P("model")})
    assert second[:2] == [(0, -1), (-1, 0)]
