"""Examples, nodes and edges that the devices do not divide: padded, and exact."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import autopar
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.planner.whole_step import roles_of
from autopar.transforms.padded_trace import with_padding
from tests.like_jit import assert_same, make_batch, make_params, sgd_step
from tests.marks import slow
from tests.rows.fixtures import random, sgd

Step = Callable[..., Any]


def padded(step: Step, *args: Any, to: dict[int, int]) -> Any:
    """The padded jaxpr of a step; `to` are sizes of dim 0, by leaf."""
    traced = trace(step, args, {})
    return with_padding(traced, build_graph(traced, roles_of(traced)), to).jaxpr


def assert_padding_changes_nothing(step: Step, *args: Any, to: dict[int, int]) -> None:
    leaves = jax.tree.leaves(args)
    made = jax.jit(jaxpr_as_fun(padded(step, *args, to=to)))(*leaves)
    expected = jax.tree.leaves(jax.jit(step)(*args))
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def indices(below: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, below, shape), jnp.int32)


def graph_step(
    params: dict[str, jax.Array],
    nodes: jax.Array,
    edges: jax.Array,
    senders: jax.Array,
    receivers: jax.Array,
) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        hidden = nodes @ params["nodes"]
        sent = jax.nn.relu(hidden[senders] + edges @ params["edges"])
        received = jax.ops.segment_sum(sent, receivers, len(nodes))
        return jnp.mean(jnp.tanh(hidden + received) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return sgd(params, gradients), value


def graph(num_edges: int, num_nodes: int) -> tuple[Any, ...]:
    params = {"nodes": random(0, 6, 16), "edges": random(1, 4, 16)}
    ends = indices(num_nodes, 2, num_edges)
    return params, random(2, num_nodes, 6), random(3, num_edges, 4), *ends


def reductions(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    exploding = 1 / (x - x[0])  # infinite in its first row
    return [
        *(f(x, 0) for f in (jnp.sum, jnp.max, jnp.min, jnp.prod, jnp.var)),
        *(f(x, 0) for f in (jnp.argmax, jnp.argmin, jnp.sort, jnp.cumsum)),
        *(f(x > 1) for f in (jnp.any, jnp.all, jnp.sum)),
        lax.cumlogsumexp(x, 0, reverse=True),
        x.T @ (y[:, None] + jnp.log(x**2)),
        jnp.where(jnp.isfinite(exploding), exploding, 0).sum(0),
        jnp.einsum("nh,ng->hg", jnp.exp(x), jnp.where(x > 0, 1 / x, 0)),
        jnp.outer(y, y).max(),
        (x.astype(jnp.int8) @ jnp.ones(x.shape[1], jnp.int8)).max(),
        x.reshape(-1).sum(),
        jax.nn.softmax(x, 0),
        jnp.concatenate([x, x[:2]])[::-1],
    ]


def scatters(x: jax.Array, places: jax.Array) -> list[jax.Array]:
    rows, largest = jnp.zeros((7, x.shape[1])), len(x) - 1
    return [
        rows.at[places].add(x),
        rows.at[places].max(x),
        rows.at[places].multiply(x),
        rows.at[jnp.sort(places)].set(x[:1], unique_indices=False),
        rows.at[places + 3].add(x, mode="drop"),
        rows.at[places].add(x, mode="clip"),
        jax.ops.segment_sum(x, jnp.sort(places), 7, indices_are_sorted=True),
        jnp.zeros_like(x).at[places].add(x),
        jnp.take(x, places + largest, axis=0, mode="fill"),
        jnp.take(x, places + largest, axis=0, mode="clip"),
        x.at[jnp.arange(len(x)), places % x.shape[1]].add(1.0),
        x[-places - 1],
    ]


def loops(x: jax.Array, y: jax.Array) -> list[Any]:
    def body(carry: Any, sliced: jax.Array) -> tuple[Any, Any]:
        carry = jnp.tanh(carry + sliced * y[:, None])
        return carry, carry.sum(0)

    def grow(value: jax.Array) -> jax.Array:
        return jnp.where(value < 9, value * 1.5 + 1, value)

    return [
        *lax.scan(body, jnp.zeros_like(x), jnp.arange(3.0)),
        lax.scan(lambda total, row: (total + row @ row, total), 0.0, x),
        lax.while_loop(lambda value: jnp.any(value < 9), grow, abs(x)),
        lax.cond(y.sum() > 0, lambda x: x * 2, lambda x: x.at[0].set(1), x),
        jax.vmap(lambda row, number: row * number)(x, y),
    ]


def dropout(params: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
    def loss(params: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(x @ params)
        kept = jax.random.bernoulli(key, 0.7, hidden.shape)
        noise = jax.random.normal(jax.random.fold_in(key, 1), hidden.shape)
        return jnp.mean(jnp.where(kept, hidden / 0.7, 0) + noise * hidden)

    return params - jax.grad(loss)(params)


def convolution(kernel: jax.Array, images: jax.Array) -> jax.Array:
    def loss(kernel: jax.Array) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        made = lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=dims
        )
        made = made / jnp.sqrt(jnp.var(made, (0, 1, 2)) + 1e-5)
        pools = (1, 2, 2, 1)
        made = lax.reduce_window(made, -jnp.inf, lax.max, pools, pools, "VALID")
        return jnp.mean(made**2)

    return kernel - jax.grad(loss)(kernel)


@pytest.mark.parametrize(("size", "devices"), [(13, 3), slow(30, 8)])
@pytest.mark.parametrize(
    ("step", "args", "leaves"),
    [
        (reductions, lambda n: (random(0, n, 5), random(1, n)), (0, 1)),
        (scatters, lambda n: (random(0, n, 4), indices(7, n)), (0, 1)),
        (loops, lambda n: (random(0, n, 3), random(1, n)), (0, 1)),
        (convolution, lambda n: (random(0, 3, 3, 2, 4), random(1, n, 4, 4, 2)), (1,)),
        (graph_step, lambda n: graph(3 * n, n), (2, 3, 4, 5)),
        (
            dropout,
            lambda n: (random(0, 5, 6), random(1, n, 5), jax.random.key(2)),
            (1,),
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_padding_changes_no_value(
    step: Step, args: Any, leaves: tuple[int, ...], size: int, devices: int
) -> None:
    given = args(size)
    sizes = {leaf: len(jax.tree.leaves(given)[leaf]) for leaf in leaves}
    to = {leaf: n + devices - n % devices for leaf, n in sizes.items()}
    assert_padding_changes_nothing(step, *given, to=to)


def test_a_step_on_examples_is_padded_from_end_to_end() -> None:
    """Nothing is cut to its true size, and only what is reduced is masked."""
    text = str(padded(sgd_step, make_params(), make_batch(30), to={1: 32, 2: 32}))
    assert not re.search(r"\[30\b", text.partition("let")[2].partition(" = pad")[2])
    assert len(re.findall("= pad", text)) == 2
    assert len(re.findall("select_n", text)) == 2  # the loss, and its cotangent


def run_like_jit(step: Step, *args: Any, **options: Any) -> autopar.Plan:
    expected = jax.jit(step)(*args)
    parallel = autopar.parallelize(step, donate_argnums=(), **options)
    assert_same(parallel(*args), expected)
    return parallel.plan(*args)


@pytest.mark.parametrize(
    ("step", "args", "padding"),
    [
        (sgd_step, (make_params(), make_batch(30)), ((30, 32),)),
        (graph_step, graph(1003, 301), ((301, 304), (1003, 1008))),
    ],
)
def test_a_method_that_must_split_examples_pads_them(
    step: Step, args: tuple[Any, ...], padding: Any, tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", autopar.FallbackWarning)
        plan = run_like_jit(step, *args, method=autopar.DataParallel())
    assert plan.sharding.padding == padding
    heaviest = max(plan.sharding.operators, key=lambda each: each.flops * each.split)
    assert heaviest.split == 8
    plan.save(tmp_path / "plan.json")
    again = autopar.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert run_like_jit(step, *args, plan=again).sharding.padding == padding


def test_a_plan_says_what_is_padded_and_what_it_costs() -> None:
    args = make_params(), make_batch(1003)
    step = autopar.parallelize(sgd_step, method=autopar.DataParallel())
    plan = step.plan(*args)
    assert "1,003 padded to 1,008 (0.5% more work)" in str(plan)


def test_examples_are_padded_where_that_is_quicker() -> None:
    def planned(examples: int) -> autopar.Plan:
        cluster = autopar.Cluster.preset("1x8xA100")
        kinds = [(512, 512), (examples, 512)]
        args = [jax.ShapeDtypeStruct(kind, jnp.float32) for kind in kinds]
        return autopar.parallelize(squares, cluster=cluster).plan(*args)

    def squares(params: jax.Array, x: jax.Array) -> jax.Array:
        def loss(params: jax.Array) -> jax.Array:
            return jnp.mean(jnp.tanh(x @ params) ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    uneven, even = planned(65_535), planned(65_536)
    assert uneven.sharding.padding == ((65_535, 65_536),)
    assert not even.sharding.padding
    seconds = [each.predicted.step_seconds for each in (uneven, even)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.5)


def test_microbatches_are_padded_each() -> None:
    args = make_params(), make_batch(60)
    method = autopar.DataParallel(num_microbatches=4)
    plan = run_like_jit(sgd_step, *args, method=method)
    assert plan.sharding.padding == ((60, 64),)
    with pytest.raises(ValueError, match="must divide the batch size 30, but got 4"):
        autopar.parallelize(sgd_step, num_microbatches=4).plan(
            make_params(), make_batch(30)
        )


def test_state_is_never_padded() -> None:
    params = {"w": random(0, 13, 8)}
    batch = {"x": random(1, 32, 13), "y": random(2, 32, 8)}
    plan = run_like_jit(sgd_step, params, batch)
    assert plan.sharding.padding == ()
    assert [each.shape for each in plan.sharding.inputs] == [(13, 8), (32, 13), (32, 8)]
