"""Row MTF-8 of Mesh-TensorFlow: microbatches, dtypes, recomputation and counters."""

import re
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.audit.compiled_collectives import collectives_in_compiled
from autopar.sharding.collective import Collective
from autopar.steps.lowered_step import Compiled
from tests.rows.fixtures import Case, Params, mixture_of_experts, random
from tests.rows.running import run_as_planned, traffic

NUM_LAYERS, BATCH, WIDTH, HIDDEN = 3, 64, 32, 128
PARAMETER_BYTES = NUM_LAYERS * 2 * WIDTH * HIDDEN * 4


def mixed_precision() -> Case:
    """Gradients of layers with float32 masters and bfloat16 products."""

    def layer(x: jax.Array, params: Params) -> jax.Array:
        up, down = (params[name].astype(jnp.bfloat16) for name in ("up", "down"))
        hidden = jax.nn.gelu(x.astype(jnp.bfloat16) @ up) @ down
        return jnp.tanh(x + hidden.astype(jnp.float32))

    def gradients(params: Params, x: jax.Array) -> tuple[Params, jax.Array]:
        def loss(params: Params) -> jax.Array:
            final, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)
            return jnp.mean(final**2)

        value, grads = jax.value_and_grad(loss)(params)
        return grads, value

    params = {
        "up": random(0, NUM_LAYERS, WIDTH, HIDDEN, scale=0.1),
        "down": random(1, NUM_LAYERS, HIDDEN, WIDTH, scale=0.1),
    }
    return Case(gradients, (params, random(2, BATCH, WIDTH)))


def compiled(num_microbatches: int) -> Compiled:
    """The step in microbatches, its layers done again in the backward pass."""
    case = mixed_precision()
    step = autopar.parallelize(
        case.step,
        mesh="data:8",
        method=autopar.DataParallel(),
        num_microbatches=num_microbatches,
        batch_argnums=1,
        remat="full",
    )
    found: Any = step.lower(*case.args).compile()
    found.audit().raise_if_wrong()
    return found


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_mtf_8_gradients_are_equal_and_reduced_once_a_step(number: int) -> None:
    case = mixed_precision()
    found = compiled(number)
    grads, _ = found(*jax.tree.map(jnp.copy, case.args))
    expected, _ = jax.jit(case.step)(*case.args)
    for got, want in zip(
        jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True
    ):
        scale = float(jnp.abs(want).max())
        np.testing.assert_allclose(got, want, atol=2e-2 * scale)  # of bfloat16
    reduced = traffic(found.plan)
    assert set(reduced) == {("all_reduce", "data")}
    sizes = [size for size in reduced["all_reduce", "data"] if size > 4]
    assert sum(sizes) == PARAMETER_BYTES  # once, whatever the number


def test_mtf_8_masters_are_float32_and_products_bfloat16() -> None:
    text = compiled(4).lowered.as_text()
    assert re.search(rf"tensor<{NUM_LAYERS}x{WIDTH}x{HIDDEN}xf32>", text)
    products = re.findall(r"dot_general.*: \(tensor<(\S+)>, tensor<(\S+)>\)", text)
    assert products
    assert all(
        left.endswith("xbf16") and right.endswith("xbf16") for left, right in products
    )


def dot_flops(text: str) -> int:
    """Flops of all products of a StableHLO module without loops."""
    pattern = re.compile(
        r"stablehlo\.dot_general .*?contracting_dims = \[([\d, ]*)\] x .*?"
        r": \(tensor<([\dx]*)x?\w+>, tensor<\S+>\) -> tensor<([\dx]*?)x?(?:f|bf)\d+>"
    )
    total = 0
    for contracted, left, result in pattern.findall(text):
        sizes = [int(size) for size in left.strip("x").split("x")]
        summed = prod(sizes[int(dim)] for dim in contracted.split(","))
        kept = [int(size) for size in result.strip("x").split("x") if size]
        total += 2 * summed * prod(kept)
    return total


def total_bytes(collectives: Any, kind: str) -> int:
    found: list[Collective] = [each for each in collectives if each.kind == kind]
    return sum(each.total_bytes for each in found)


def test_mtf_8_the_plans_totals_are_those_of_the_program() -> None:
    """Einsum flops of one device, all_reduce and all_to_all bytes of a step."""
    case = mixture_of_experts()
    step = autopar.parallelize(case.step, mesh="x:8", remat=None)
    found = run_as_planned(step, *case.args)
    plan = found.plan.sharding
    products = [op for op in plan.operators if op.kind == "dot_general"]
    assert products
    flops = sum(op.flops / op.split for op in products)
    assert flops == dot_flops(found.lowered.as_text())
    in_program = collectives_in_compiled(found.as_text())
    for kind in ("all_reduce", "all_to_all"):
        assert total_bytes(plan.collectives, kind) > 0
        assert total_bytes(plan.collectives, kind) == total_bytes(in_program, kind)
