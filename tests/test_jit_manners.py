"""What `jax.jit` takes and answers, `autopar.parallelize` does too."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from functools import cache
from typing import TYPE_CHECKING, Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopar
from autopar.api import parallelize

P = PartitionSpec
Params = dict[str, jax.Array]


def train_step(
    params: Params, batch: jax.Array, *, scale: float = 1.0, kind: str = "relu"
) -> tuple[Params, dict[str, jax.Array]]:
    def loss_of(params: Params) -> tuple[jax.Array, jax.Array]:
        hidden = getattr(jax.nn, kind)(batch @ params["up"])
        result = hidden @ params["down"]
        return jnp.mean(result**2) * scale, result

    (loss, result), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
    new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return new, {"loss": loss, "result": result}


def arguments() -> tuple[Params, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (16, 64))
    down = jax.random.normal(keys[1], (64, 16))
    return {"up": up, "down": down}, jax.random.normal(keys[2], (32, 16))


@cache
def expected(kind: str) -> Any:
    return jax.jit(train_step, static_argnames="kind")(*arguments(), kind=kind)


def assert_like_jit(found: Any, kind: str = "relu") -> None:
    for one, other in zip(*map(jax.tree.leaves, (found, expected(kind))), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "model"))


def specs(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding.spec, tree)


def test_shardings_of_arguments_and_results_are_kept(mesh: Mesh) -> None:
    up = NamedSharding(mesh, P(None, "model"))
    step = autopar.parallelize(
        train_step,
        in_shardings=({"up": up, "down": None}, P("data")),
        out_shardings=(None, {"loss": None, "result": P(("data", "model"))}),
        static_argnames="kind",
    )
    found = step(*arguments(), kind="gelu")
    assert_like_jit(found, kind="gelu")
    assert specs(found)[0]["up"] == P(None, "model")
    assert specs(found)[1]["result"] == P(("data", "model"))
    assert found[0]["up"].sharding.mesh == mesh
    batch = step.plan(*arguments()).sharding.inputs[2]
    assert (batch.path, batch.spec) == ("batch", (0, -1))


@pytest.mark.parametrize(
    ("of_state", "of_result"),
    [(P("model"), P(None, ("model", "data"))), (P("data", "model"), P())],
)
def test_a_result_and_a_next_state_lie_where_they_are_asked_to(
    mesh: Mesh, of_state: PartitionSpec, of_result: PartitionSpec
) -> None:
    out = {**FREE, "up": of_state}, {"loss": None, "result": of_result}
    found = autopar.parallelize(train_step, mesh=mesh, out_shardings=out)(*arguments())
    assert_like_jit(found)
    for made, spec in ((found[0]["up"], of_state), (found[1]["result"], of_result)):
        assert made.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


FREE: dict[str, Any] = {"up": None, "down": None}


def test_one_sharding_is_of_all_below_it(mesh: Mesh) -> None:
    whole = NamedSharding(mesh, P())
    step = autopar.parallelize(
        train_step, in_shardings=(whole, None), out_shardings=whole
    )
    assert {*jax.tree.leaves(specs(step(*arguments())))} == {P()}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"in_shardings": (None, None, P())}, "one entry .* params, batch, but got 3"),
        ({"in_shardings": ({"upp": P()}, None)}, r"did you mean params\['up'\]"),
        (
            {"in_shardings": ({"up": P(None, None, "x")}, None)},
            r"pin `in_shardings` for params\['up'\] of params\['up'\]",
        ),
        ({"in_shardings": P()}, "must be a tuple with an entry for each argument"),
        ({"in_shardings": (7,)}, "NamedShardings, PartitionSpecs or None"),
        ({"out_shardings": (P(), P(), P())}, "prefix of the tree of results"),
        ({"static_argnames": "knd"}, "names of arguments, but got 'knd'"),
        ({"donate_argnames": 0}, "names of arguments"),
        (
            {"static_argnames": "kind", "donate_argnames": "kind"},
            "static argument has no buffer to donate, but 'kind'",
        ),
        (
            {"in_shardings": ({"up": P("x")}, None), "out_shardings": ({}, None)},
            "prefix of the tree of results",
        ),
        (
            {
                "in_shardings": ({"up": P("x")}, None),
                "out_shardings": ({**FREE, "up": P(None, "x")}, None),
            },
            "is returned as .* by out_shardings; leave out one",
        ),
    ],
)
def test_what_cannot_be_says_why(options: dict[str, Any], reason: str) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        autopar.parallelize(train_step, mesh="x:8", **options).plan(*arguments())


def test_shardings_are_on_one_mesh(mesh: Mesh) -> None:
    other = Mesh(mesh.devices.T, ("model", "data"))
    given = {"up": NamedSharding(mesh, P()), "down": NamedSharding(other, P())}
    with pytest.raises(ValueError, match="must be on the mesh of the step"):
        autopar.parallelize(train_step, in_shardings=(given, None))
    with pytest.raises(ValueError, match="must be on the mesh of the step, x:8, but"):
        autopar.parallelize(
            train_step, mesh="x:8", pins={"batch": NamedSharding(mesh, P("data"))}
        )


def test_pins_take_named_shardings_and_say_the_mesh(mesh: Mesh) -> None:
    pins = {"params/up": NamedSharding(mesh, P("model"))}
    step = autopar.parallelize(train_step, pins=pins)
    assert step(*arguments())[0]["up"].sharding == pins["params/up"]


def test_names_are_static_and_donated_as_positions_are() -> None:
    step = autopar.parallelize(
        train_step, static_argnames=("kind",), donate_argnames="params"
    )
    params, batch = jax.device_put(arguments(), jax.devices()[0])
    params = jax.tree.map(jnp.copy, params)
    assert_like_jit(step(params, batch, kind="gelu"), kind="gelu")
    assert_like_jit(step(arguments()[0], batch=batch, kind="gelu"), kind="gelu")
    assert step.options.donate_argnums == (0,)
    assert_like_jit(step(*arguments()))
    given = step(*arguments())[0]
    step(given, arguments()[1])
    assert given["up"].is_deleted()

    def scaled(x: jax.Array, factor: int) -> jax.Array:
        return x * factor if factor > 1 else x

    by_name = autopar.parallelize(scaled, static_argnames="factor")
    assert float(by_name(jnp.ones(8), 3)[0]) == 3
    assert float(by_name(jnp.ones(8), factor=1)[0]) == 1

    def keywords(x: jax.Array, *, scale: jax.Array) -> jax.Array:
        return x * scale

    whole = autopar.parallelize(keywords, donate_argnames=["scale"])
    scale = jnp.ones(8)
    assert float(whole(jnp.ones(8), scale=scale).sum()) == 8
    assert whole.lower(jnp.ones(8), scale=scale).program.donated == (1,)


def test_a_step_is_traced_and_forgotten() -> None:
    calls: list[int] = []

    def counted(params: Params, batch: jax.Array) -> Any:
        calls.append(1)
        return train_step(params, batch)

    step = autopar.parallelize(counted, mesh="x:8")
    traced = step.trace(*arguments())
    assert traced.fun_name == "counted"
    assert len(traced.jaxpr.eqns) == len(jax.make_jaxpr(train_step)(*arguments()).eqns)
    expected = jax.eval_shape(train_step, *arguments())
    assert step.eval_shape(*arguments()) == expected == traced.out_info
    assert "dot_general" in traced.lower().as_text(dialect="stablehlo")

    step(*arguments())
    before = len(calls)
    step(*arguments())
    assert len(calls) == before
    step.clear_cache()
    assert_like_jit(step(*arguments()))
    assert len(calls) > before


METHODS = [None, autopar.PipelineParallel(num_stages=2, num_microbatches=2)]


@pytest.mark.parametrize("method", METHODS, ids=["one program", "pipeline"])
def test_what_is_shown_at_a_prompt_is_short(method: Any) -> None:
    step = autopar.parallelize(train_step, method=method)
    lowered = step.lower(*arguments())
    compiled = lowered.compile()
    plan = step.plan(*arguments())
    for each in (step, step.trace(*arguments()), lowered, compiled, plan):
        lines = repr(each).splitlines()
        assert 1 <= len(lines) <= 20
        assert max(map(len, lines)) <= 100
    assert repr(step).startswith("<autopar.parallelize(train_step, ")
    costs = compiled.cost_analysis()
    one = costs[0] if isinstance(costs, tuple) else costs
    assert one["flops"] > 0


if TYPE_CHECKING:  # `make lint` says whether the step keeps its signature

    @parallelize
    def plain(w: jax.Array, *, scale: float = 1.0) -> tuple[jax.Array, int]:
        return w * scale, 1

    @parallelize(mesh="x:8", static_argnames="scale")
    def with_options(w: jax.Array, scale: float) -> dict[str, jax.Array]:
        return {"w": w * scale}

    def check(w: jax.Array) -> None:
        assert_type(plain(w, scale=2.0), tuple[jax.Array, int])
        assert_type(with_options(w, 2.0), dict[str, jax.Array])
        plain(w, scale="two")  # pyright: ignore[reportArgumentType]
        plain()  # pyright: ignore[reportCallIssue]
        with_options(w)  # pyright: ignore[reportCallIssue]
        parallelize(plain, meshes="x:8")  # pyright: ignore[reportCallIssue]
