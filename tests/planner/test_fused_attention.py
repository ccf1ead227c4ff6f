"""`attention="fused"`: attention as it is written becomes one kernel, or is told."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention

import autopar
from autopar.attention.fused_attention import KERNELS
from autopar.attention.rule import (
    FUSED_KINDS,
    lower,
    with_kernel,
    without_kernel,
)
from autopar.errors import FallbackWarning
from autopar.lowering.exported_program import export_program
from autopar.planner.attention_trace import with_fused_attention
from tests.marks import slow
from tests.planner.test_attention_finder import (
    Attention,
    causal,
    dropped,
    softmax_attention,
)
from tests.rows.fixtures import random
from tests.rows.running import run_as_planned

BATCH, SEQ, HEADS, DEPTH = 8, 16, 8, 8


def training(attention: Attention) -> Callable[..., Any]:
    """A step of SGD on the products of one layer."""

    def step(params: Any, x: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            q, k, v = (
                (x @ params[name]).reshape(*x.shape[:2], -1, DEPTH) for name in "qkv"
            )
            y = attention(q, k, v).reshape(*x.shape[:2], -1)
            return jnp.mean((y @ params["o"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    return step


def arguments(kv_heads: int = HEADS, dtype: Any = jnp.float32) -> Any:
    width = HEADS * DEPTH
    widths = {"q": width, "k": kv_heads * DEPTH, "v": kv_heads * DEPTH, "o": width}
    params = {
        n: random(i, width, size) / 4 for i, (n, size) in enumerate(widths.items())
    }
    cast = lambda x: x.astype(dtype)  # noqa: E731
    return jax.tree.map(cast, (params, random(9, BATCH, SEQ, width)))


def built_in(**given: Any) -> Attention:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **given)


def fused(written: Attention, **given: Any) -> Any:
    given = {"mesh": "n:8", "attention": "fused", **given}
    return autopar.parallelize(training(written), **given)


@pytest.mark.parametrize(
    ("attention", "kv_heads"),
    [
        slow(softmax_attention(), HEADS),
        slow(softmax_attention(causal), HEADS),
        (jax.checkpoint(softmax_attention(causal)), HEADS),
        slow(built_in(is_causal=True), 2),
        (built_in(is_causal=True, local_window_size=(4, 0)), 2),
    ],
)
def test_values_are_those_of_the_step_as_written(
    attention: Attention, kv_heads: int
) -> None:
    compiled = run_as_planned(fused(attention), *arguments(kv_heads))
    operators = compiled.plan.sharding.operators
    assert {op.kind for op in operators}.issuperset(FUSED_KINDS)
    assert not any(op.kind == "exp" for op in operators)


def test_a_plan_and_its_file_keep_the_kernel(tmp_path: Path) -> None:
    given, attention = arguments(), softmax_attention(causal)
    plan = fused(attention).plan(*given)
    plan.save(tmp_path / "plan.json")
    kept = autopar.Plan.load(tmp_path / "plan.json")
    again = autopar.parallelize(training(attention), mesh="n:8", plan=kept)
    assert run_as_planned(again, *given).plan.sharding.operators


def test_a_kernel_is_one_of_microbatches_too() -> None:
    method = autopar.ShardParallel(num_microbatches=2)
    step = fused(softmax_attention(causal), method=method)
    compiled = run_as_planned(step, *arguments())
    assert FUSED_KINDS[1] in {op.kind for op in compiled.plan.sharding.operators}


def test_programs_for_gpus_call_cudnn() -> None:
    step = fused(built_in(is_causal=True))
    program = step.lower(*arguments(2, jnp.bfloat16)).program
    code = export_program(program, "cuda").code
    assert b"__cudnn$fmhaSoftmaxBackward" in code


@pytest.mark.parametrize(
    ("attention", "why"),
    [
        (softmax_attention(change_weights=dropped), "dropout"),
        (softmax_attention(lambda x: 5 * jnp.tanh(x / 5)), "tanh"),
        (built_in(local_window_size=(2, 2)), "neither causal nor a window"),
    ],
)
def test_what_has_no_kernel_is_told(attention: Attention, why: str) -> None:
    with pytest.warns(FallbackWarning, match=f"as it is written.*{why}"):
        plan = fused(attention).plan(*arguments())
    assert not {op.kind for op in plan.sharding.operators} & {*FUSED_KINDS}


@pytest.mark.filterwarnings("ignore:.*as it is written")
@pytest.mark.parametrize(
    "attention",
    [
        softmax_attention(change_weights=dropped),
        softmax_attention(softmax=jax.nn.sigmoid),
    ],
    ids=["no kernel", "no attention"],
)
def test_what_has_no_kernel_stays_as_written(attention: Attention) -> None:
    made = fused(attention)(*arguments())
    for got, want in zip(
        jax.tree.leaves(made),
        jax.tree.leaves(jax.jit(training(attention))(*arguments())),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_made_again", [True, False])
def test_scanned_layers_keep_scores_unless_they_are_made_again(
    is_made_again: bool,
) -> None:
    def layers(q: Any, k: Any, v: Any) -> Any:
        one = softmax_attention(causal)
        layer = jax.checkpoint(one) if is_made_again else one
        return jax.lax.scan(lambda x, _: (x + layer(x, k, v), None), q, None, 2)[0]

    step = fused(layers)
    if is_made_again:
        assert {op.kind for op in step.lower(*arguments()).graph.operators()} >= {
            *FUSED_KINDS
        }
    else:
        with pytest.warns(FallbackWarning, match=r"scan layers in jax\.checkpoint"):
            step.plan(*arguments())


def test_cudnn_takes_narrow_floats_alone() -> None:
    step = fused(built_in(), cluster=autopar.Cluster.preset("1x8xH100"))
    with pytest.warns(FallbackWarning, match="cuDNN takes float16 and bfloat16"):
        step.plan(*arguments())


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="'fused', one kernel"):
        fused(built_in(), attention="flash")
    ring = autopar.ShardParallel(attention="ring")
    with pytest.raises(ValueError, match="one kernel or a ring"):
        fused(built_in(), method=ring)


@pytest.fixture
def kernels_of_tpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On CPUs too, by JAX's interpreter of kernels."""
    name = "make_splash_mha_single_device"
    interpreted = partial(getattr(splash_attention, name), interpret=True)
    monkeypatch.setattr(splash_attention, name, interpreted)
    for kind, kernel in zip(FUSED_KINDS, KERNELS["tpu"], strict=True):
        lower(kind, with_kernel(kernel), "cpu")
    yield
    for kind in FUSED_KINDS:
        lower(kind, without_kernel(kind), "cpu")


@pytest.mark.usefixtures("kernels_of_tpus")
@pytest.mark.parametrize(
    "given",
    [
        {},
        slow({"is_causal": True}),
        {"is_causal": True, "local_window_size": (9, 0)},
    ],
)
def test_the_kernel_of_tpus_makes_what_the_step_says(given: Any) -> None:
    def step(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> Any:
        y, backward = jax.vjp(built_in(**given), q, k, v)
        return y, *backward(dy)

    operands = [random(i, 1, 128, heads, 64) for i, heads in enumerate((2, 1, 1, 2))]
    made = jax.jit(with_fused_attention(step, "v5e"))(*operands)
    for got, want in zip(made, jax.jit(step)(*operands), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())
