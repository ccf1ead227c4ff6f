"""cuDNN's attention in a step is one operator, split by examples, heads or queries."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.attention import fused_attention
from autopar.attention.fused_attention import KINDS
from autopar.costs.compute import flops
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import Operator
from autopar.lowering.exported_program import export_program
from autopar.planner.whole_step import roles_of
from autopar.rules.base import factors_of
from tests.marks import slow

BATCH, SEQ, HEADS, DEPTH = 8, 32, 8, 16


def with_gradients(implementation: str, **given: Any) -> Callable[..., Any]:
    def step(
        q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array, *bias: Any
    ) -> Any:
        def attention(q: jax.Array, k: jax.Array, v: jax.Array, *bias: Any) -> Any:
            options: Any = {"implementation": implementation, **given}
            return jax.nn.dot_product_attention(q, k, v, *bias, **options)

        y, backward = jax.vjp(attention, q, k, v, *bias)
        return y, *backward(dy)

    return step


def operands(
    kv_heads: int = HEADS, q_heads: int = HEADS, batch: int = BATCH
) -> list[jax.Array]:
    heads = (q_heads, kv_heads, kv_heads, q_heads)
    return [random(i, batch, SEQ, count, DEPTH) for i, count in enumerate(heads)]


def random(seed: int, *shape: int) -> jax.Array:
    numbers = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(numbers, jnp.bfloat16)


def plain(*operands: Any, **params: Any) -> list[Any]:
    """What cuDNN would make of its operands, by JAX's own operators."""
    q, k, v, bias, *lengths = operands[:6]
    window, kind = params["sliding_window_length"], params["mask_type"].name
    given: Any = {"is_causal": "CAUSAL" in kind, "scale": params["scale"]}
    if window is not None:
        given["local_window_size"] = (window - 1, 0)
    if lengths[0].size:
        given["query_seq_lengths"], given["key_value_seq_lengths"] = lengths

    def run(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        return jax.nn.dot_product_attention(
            *(q, k, v, bias if bias.size else None), **given
        )

    if len(operands) == 10:
        statistic = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))
        return [run(q, k, v, bias), statistic]
    _, backward = jax.vjp(run, q, k, v, bias)
    return list(backward(operands[12]))[: 4 if bias.size else 3]


CASES: Any = {
    "one head": (operands(1, 1, batch=1), {}),
    "causal": (operands(), {"is_causal": True}),
    "grouped heads": (operands(2), {"is_causal": True}),
    "window": (operands(), {"is_causal": True, "local_window_size": (5, 0)}),
    "bias": ([*operands(), random(4, 1, HEADS, SEQ, SEQ)], {}),
    "one head, bias": ([*operands(1, 1, batch=1), random(4, 1, 1, SEQ, SEQ)], {}),
    "lengths": (
        operands(),
        {"key_value_seq_lengths": jnp.arange(BATCH, dtype=jnp.int32) + SEQ - BATCH},
    ),
}


@pytest.mark.parametrize(
    ("name", "pinned", "factor"),
    [
        slow("one head", "[-, n, -, -]", "t"),
        slow("causal", "[-, -, n, -]", "h"),
        ("grouped heads", "[n, -, -, -]", "b"),
        ("window", "[-, -, n, -]", "h"),
        slow("bias", "[n, -, -, -]", "b"),
        ("bias", "[-, -, n, -]", "h"),
        ("one head, bias", "[-, n, -, -]", "t"),
        ("lengths", "[n, -, -, -]", "b"),
    ],
)
def test_shards_make_what_the_whole_makes(
    name: str, pinned: str, factor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are those of one device, with `plain` for cuDNN."""
    for kind in KINDS:
        monkeypatch.setitem(fused_attention._RUNS, kind, plain)
    arguments, given = CASES[name]
    pins = {"q": pinned, "dy": pinned}
    function = with_gradients("cudnn", **given)
    step = autopar.parallelize(function, mesh="n:8", pins=pins, batch_argnums=())
    compiled = step.lower(*arguments).compile()
    compiled.audit().raise_if_wrong()
    plan = compiled.plan.sharding
    found = {op.kind: op.factors for op in plan.operators if op.kind in KINDS}
    assert found == dict.fromkeys(KINDS, (factor,))
    wanted = jax.jit(with_gradients("xla", **given))(*arguments)
    for got, want in zip(compiled(*arguments), wanted, strict=True):
        want = np.asarray(want, np.float32)
        atol = 2.0**-6 * np.abs(want).max()
        np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=atol)


def test_a_masked_query_is_split_by_examples_and_heads_alone() -> None:
    traced = trace(with_gradients("cudnn", is_causal=True), operands(2), {})
    operators = build_graph(traced, roles_of(traced)).operators()
    found = {op.kind: op for op in operators if op.kind in KINDS}
    for op in found.values():
        sizes = {factor.name: factor.size for factor in factors_of(op)}
        assert sizes == {"-": 0, "b": BATCH, "h": 2}


def test_programs_for_gpus_call_cudnn() -> None:
    """Exported for GPUs, where neither a GPU nor cuDNN is."""
    step = autopar.parallelize(with_gradients("cudnn", is_causal=True), mesh="n:8")
    program = step.lower(*operands()).program
    code = export_program(program, "cuda").code
    assert b"__cudnn$fmhaSoftmax" in code
    assert b"__cudnn$fmhaSoftmaxBackward" in code


def test_other_devices_refuse_it_with_the_remedy() -> None:
    step = autopar.parallelize(with_gradients("cudnn"), mesh="n:8", batch_argnums=())
    with pytest.raises(NotImplementedError, match="attention='fused'"):
        step(*operands())


def test_beside_a_traced_step_jax_misses_cudnn_as_ever() -> None:
    with pytest.raises(RuntimeError, match="cuDNN is not detected"):
        jax.jit(with_gradients("cudnn")).lower(*operands())


def test_masked_scores_are_not_paid_for() -> None:
    """Half of all without a window, and those of the window with one."""

    def work(**given: Any) -> list[float]:
        traced = trace(with_gradients("cudnn", **given), operands(), {})
        found = [op for op in build_graph(traced, roles_of(traced)).operators()]
        return [op_flops(op) for op in found if op.kind in KINDS]

    products = 2.0 * BATCH * HEADS * SEQ * SEQ * DEPTH
    assert work() == [2 * products, 5 * products]
    assert work(is_causal=True) == [products, 2.5 * products]
    windowed = work(is_causal=True, local_window_size=(SEQ // 8 - 1, 0))
    assert windowed == [products / 4, 5 * products / 8]


def op_flops(op: Operator) -> float:
    shapes = [[t.shape for t in kinds] for kinds in (op.operand_types, op.result_types)]
    return flops(op.kind, op.params, *shapes)
