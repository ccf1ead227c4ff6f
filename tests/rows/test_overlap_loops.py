"""Loops over layers that gather the next layer while this one is multiplied."""

import re

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.audit.memory_use import MemoryUse
from autopar.plans.slices_ahead import NEXT
from autopar.steps.lowered_step import Compiled
from tests.rows.fixtures import Case, Params, random, sgd
from tests.rows.running import run_as_planned, traffic
from tests.rows.test_overlap import cluster, four_devices

WIDTH, INNER, ROWS = 64, 128, 32
LAYER_BYTES = WIDTH * INNER * 4  # of each of its two matrices


def layers_of(num_layers: int, *, reverse: bool = False, unroll: int = 1) -> Case:
    """Residual layers with two products each, in one scan; SGD."""

    def step(layers: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
        def loss(layers: Params) -> jax.Array:
            def layer(h: jax.Array, p: Params) -> tuple[jax.Array, jax.Array]:
                h = h + jnp.tanh(h @ p["up"]) @ p["down"]
                return h, jnp.mean(h**2)

            h, norms = jax.lax.scan(layer, x, layers, reverse=reverse, unroll=unroll)
            weights = jnp.arange(1.0, num_layers + 1)
            return jnp.mean((h - y) ** 2) + 0.01 * jnp.sum(norms * weights)

        value, grads = jax.value_and_grad(loss)(layers)
        return sgd(layers, grads), value

    layers = {
        "up": random(0, num_layers, WIDTH, INNER, scale=0.05),
        "down": random(1, num_layers, INNER, WIDTH, scale=0.05),
    }
    return Case(step, (layers, random(2, ROWS, WIDTH), random(3, ROWS, WIDTH)))


def compiled_with(case: Case, *, overlaps: bool) -> Compiled:
    step = autopar.parallelize(
        case.step,
        mesh=four_devices(),
        method=autopar.Zero(3),
        cluster=cluster(overlaps=overlaps, visible_fraction=1.0),
    )
    return run_as_planned(step, *case.args)


def is_ahead(compiled: Compiled) -> bool:
    operators = compiled.plan.sharding.operators
    return any(op.name.startswith(NEXT) for op in operators)


def forward_loop(text: str) -> str:
    """Gathers (G) and products (x) of the loop that reduces nothing, as scheduled."""
    found = []
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        order = []
        for line in computation.splitlines():
            if " all-gather(" in line:
                order.append("G")
            elif re.search(r'op_name="[^"]*/dot_general"', line):
                order.append("x")
            elif " reduce-scatter(" in line:
                order.append("R")
        if "G" in order and "R" not in order:
            found.append("".join(order))
    (only,) = found
    return only


@pytest.mark.parametrize(("num_layers", "reverse"), [(2, False), (5, True)])
def test_the_next_layer_is_gathered_beside_this_one(
    num_layers: int, reverse: bool
) -> None:
    """As many gathers as without; the last iteration stands behind the loop."""
    case = layers_of(num_layers, reverse=reverse)
    compiled = compiled_with(case, overlaps=True)
    assert is_ahead(compiled)
    assert traffic(compiled.plan) == {
        ("all_gather", "x"): [LAYER_BYTES] * 4 * num_layers,
        ("reduce_scatter", "x"): [LAYER_BYTES // 4] * 2 * num_layers,
        ("all_reduce", "x"): traffic(compiled.plan)["all_reduce", "x"],
    }
    counts = {str(row.collective): row for row in compiled.audit().rows}
    gathered = counts["all_gather"]
    assert gathered.planned_bytes == gathered.lowered_bytes


def test_in_the_loop_gathers_come_before_the_last_product() -> None:
    plain, ahead = (
        compiled_with(layers_of(5), overlaps=each) for each in (False, True)
    )
    assert not is_ahead(plain) and is_ahead(ahead)
    assert traffic(plain.plan) == traffic(ahead.plan)
    order = forward_loop(ahead.as_text())
    assert order.count("G") == 2 and order.endswith("x")
    # Of the next layer: what this one multiplies with came with the loop's state.
    text = ahead.as_text()
    entry = text[text.index("\nENTRY") :]
    assert entry.count(" all-gather(") >= 2 > plain_entry_gathers(plain.as_text())


def plain_entry_gathers(text: str) -> int:
    return text[text.index("\nENTRY") :].count(" all-gather(")


def test_memory_of_the_next_layer_is_predicted() -> None:
    case = layers_of(5)
    ratios, peaks = [], []
    for overlaps in (False, True):
        compiled = compiled_with(case, overlaps=overlaps)
        seen = MemoryUse.of(compiled.compiled, 0).device_bytes
        peaks.append(compiled.plan.predicted.peak_bytes)
        ratios.append(seen / peaks[-1])
    assert peaks[1] >= peaks[0] + LAYER_BYTES
    assert 0.8 < ratios[1] < max(1.15, 1.05 * ratios[0])


@pytest.mark.parametrize(("num_layers", "unroll"), [(1, 1), (4, 2)])
def test_loops_that_are_left_as_they_are(num_layers: int, unroll: int) -> None:
    case = layers_of(num_layers, unroll=unroll)
    assert not is_ahead(compiled_with(case, overlaps=True))
