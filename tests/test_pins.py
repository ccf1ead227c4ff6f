"""Pins fix how arguments lie; the solver chooses the rest."""

from typing import Any

import jax
import pytest
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
        ({"^x$": P(("model", "data"))}, "must be in mesh order"),
    ],
    ids=["unmatched", "axis", "twice", "rank", "order"],
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
