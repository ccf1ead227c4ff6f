"""Row of ZeRO's `zero.Init`: models larger than a device are made and run in parts."""

import re
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import autopar
from autopar.audit.compiled_collectives import collectives_in_lowered
from autopar.lowering.programs import SpmdProgram
from autopar.pipelines.state_init import PlacedInit, init_programs
from autopar.planner.traced_init import trace_init
from autopar.state.placements import LeafPart
from tests.rows.fixtures import Case, random, sgd
from tests.rows.running import run_as_planned

WIDTH, NUM_DEVICES, NUM_TILES = 512, 8, 4
SHARD_BYTES = WIDTH * WIDTH * 4 // NUM_DEVICES


def init(key: jax.Array) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 3)
    return {f"w{i}": jax.random.normal(k, (WIDTH, WIDTH)) for i, k in enumerate(keys)}


def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    def loss(params: Any) -> jax.Array:
        hidden = x
        for kernel in params.values():
            hidden = jnp.tanh(hidden @ kernel)
        return jnp.mean(hidden**2)

    value, grads = jax.value_and_grad(loss)(params)
    return sgd(params, grads), value


def largest_buffer(program: SpmdProgram) -> int:
    """Bytes of the largest array of numbers in a compiled program, on one device."""
    found = re.findall(r"\b[fsu](\d+)\[([\d,]+)\]", program.compile().as_text() or "")
    sizes = (prod(int(n) for n in dims.split(",")) for _, dims in found)
    return max(int(bits) // 8 * n for (bits, _), n in zip(found, sizes, strict=True))


def test_zer_5_no_device_ever_holds_more_than_its_shard_of_a_leaf() -> None:
    """Of the program that makes the state, no buffer is larger; nothing is sent."""
    sharded = autopar.parallelize(step, mesh="x:8", method=autopar.Zero(3))
    key, x = jax.random.key(0), jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    state = sharded.init(init, key, batch=x)
    homes = tuple((LeafPart(leaf.sharding),) for leaf in jax.tree.leaves(state))
    placed = PlacedInit(trace_init(init, (key,), {}), homes)
    (made,) = init_programs(placed, autopar.Cluster.local())
    assert not collectives_in_lowered(made.program.lower())
    assert largest_buffer(made.program) == SHARD_BYTES
    whole = jax.jit(init)(key)
    for leaf, want in zip(jax.tree.leaves(state), jax.tree.leaves(whole), strict=True):
        assert {shard.data.nbytes for shard in leaf.addressable_shards} == {SHARD_BYTES}
        np.testing.assert_array_equal(leaf, want)


def linear(num_tiles: int) -> Case:
    """One large product and its SGD step, the kernel in tiles of its columns."""

    def step(tiles: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(tiles: jax.Array) -> jax.Array:
            def add(total: jax.Array, tile: jax.Array) -> tuple[jax.Array, None]:
                return total + jnp.sum((x @ tile) ** 2), None

            return lax.scan(add, jnp.zeros(()), tiles)[0] / WIDTH

        value, grad = jax.value_and_grad(loss)(tiles)
        return sgd(tiles, grad, 1e-3), value

    kernel = random(0, WIDTH, WIDTH, scale=WIDTH**-0.5)
    tiles = jnp.stack(jnp.split(kernel, num_tiles, axis=1))
    return Case(step, (tiles, random(1, 8, WIDTH)))


def test_zer_5_a_linear_in_four_tiles_takes_a_quarter_of_the_memory() -> None:
    """Each tile is gathered, used and gone before the next one is."""
    losses, largest = [], []
    for num_tiles in (1, NUM_TILES):
        case = linear(num_tiles)
        sharded = autopar.parallelize(
            case.step, mesh="x:8", method=autopar.Zero(3), batch_argnums=(1,)
        )
        compiled = run_as_planned(sharded, *case.args)
        largest.append(largest_buffer(compiled.lowered.program))
        losses.append(sharded(*jax.tree.map(jnp.copy, case.args))[1])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert largest == [WIDTH * WIDTH * 4, WIDTH * WIDTH * 4 // NUM_TILES]
