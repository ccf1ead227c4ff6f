"""Paths between specs: what they give, what they cost, what the programs then hold."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import permutations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from autopar.audit.audit import audit
from autopar.audit.compiled_collectives import (
    collectives_in_compiled,
    collectives_in_lowered,
)
from autopar.clusters.cluster import Cluster
from autopar.costs.collectives import at_size
from autopar.costs.resharding import Resharder
from autopar.lowering.spmd import apply_step
from autopar.sharding.collective import Collective
from autopar.sharding.mesh import MeshShape
from autopar.sharding.paths import cheapest_path, refined_mesh
from autopar.sharding.placement import (
    Placement,
    Step,
    permuted_pairs,
    placement_of,
)
from autopar.sharding.spec import (
    REPLICATED,
    SUM,
    TURN,
    Spec,
    axes_of_dim,
    num_shards,
    to_partition_spec,
    with_axes,
)

CLUSTER = Cluster.preset("8xA100")
BYTES = float(1 << 24)
MESHES = {
    "2x2": MeshShape(("x", "y"), (2, 2)),
    "2x4": MeshShape(("x", "y"), (2, 4)),
    "4x2": MeshShape(("x", "y"), (4, 2)),
    "2x2x2": MeshShape(("x", "y", "z"), (2, 2, 2)),
}
Pair = tuple[Spec, Spec]


def pairs_of(states: Iterable[int], num_axes: int, most: int = 128) -> list[Pair]:
    """All pairs of specs with these states, or as many of them by chance."""
    specs = list(product(states, repeat=num_axes))
    pairs = list(product(specs, specs))
    return pairs if len(pairs) <= most else random.Random(0).sample(pairs, most)


def ordered_pairs(states: Iterable[int], num_axes: int, most: int = 150) -> list[Pair]:
    """As `pairs_of`, with the axes of each dim in every order; most are not in mesh
    order on both ends."""
    specs: set[Spec] = set()
    for spec in product(states, repeat=num_axes):
        dims = sorted({state for state in spec if state >= 0})
        for orders in product(*(permutations(axes_of_dim(spec, d)) for d in dims)):
            found = spec
            for dim, axes in zip(dims, orders, strict=True):
                found = with_axes(found, dim, axes)
            specs.add(found)
    pairs = list(product(sorted(specs), sorted(specs)))
    return pairs if len(pairs) <= most else random.Random(0).sample(pairs, most)


class Devices:
    """Shards on the devices of a mesh, and the steps, written with numpy."""

    def __init__(self, resharder: Resharder) -> None:
        self.resharder, self.sizes = resharder, resharder.mesh.axis_sizes
        self.positions = list(product(*map(range, self.sizes)))
        self.laid = cache(self._lay)

    def _lay(self, rank: int, spec: Spec, size: int = 8) -> list[np.ndarray]:
        """Shards of 0, 1, ...; of a pending sum, with noise that adds to nothing."""
        whole = np.arange(size**rank).reshape((size,) * rank)
        shards = []
        for position in self.positions:
            shard = whole
            for dim in range(whole.ndim):
                for axis in axes_of_dim(spec, dim):
                    parts = np.split(shard, self.sizes[axis], dim)
                    shard = parts[position[axis]]
            shards.append(shard)
        noise = np.random.default_rng(0)
        for group in self.pending_groups(spec):
            for device in group[1:]:
                part = noise.integers(-9, 9, shards[device].shape)
                shards[group[0]] = shards[group[0]] - part
                shards[device] = part
        return shards

    def pending_groups(self, spec: Spec) -> list[list[int]]:
        """Devices whose shards add up, alone where nothing is pending."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for device, position in enumerate(self.positions):
            key = [i for i, s in zip(position, spec, strict=True) if s != SUM]
            groups.setdefault(tuple(key), []).append(device)
        return list(groups.values())

    def run(self, shards: Sequence[np.ndarray], step: Step) -> list[np.ndarray]:
        """The shards after a step."""
        if not step.is_collective:
            (axis,) = step.axes
            stride, size = step.part or (1, self.sizes[axis])
            index = [position[axis] // stride % size for position in self.positions]
            if step.kind == "mask":
                return [s * (i == 0) for s, i in zip(shards, index, strict=True)]
            return [
                np.split(shard, size, step.dim)[i]
                for shard, i in zip(shards, index, strict=True)
            ]
        found: dict[int, np.ndarray] = {}
        for group in self.resharder.groups(step):
            parts = [shards[device] for device in group]
            for member, device in enumerate(group):
                match step.kind:
                    case "all_gather":
                        found[device] = np.concatenate(parts, step.dim)
                    case "all_reduce":
                        found[device] = sum(parts, np.zeros_like(parts[0]))
                    case "reduce_scatter":
                        total = sum(parts, np.zeros_like(parts[0]))
                        found[device] = np.split(total, len(group), step.dim)[member]
                    case "all_to_all":
                        cut = [np.split(p, len(group), step.target_dim) for p in parts]
                        mine = [pieces[member] for pieces in cut]
                        found[device] = np.concatenate(mine, step.dim)
                    case _:
                        found[group[1]] = parts[0]
        assert len(found) == len(shards), "a device got nothing"
        return [found[device] for device in range(len(shards))]


def assert_right(resharder: Resharder, rank: int, pairs: Iterable[Pair]) -> None:
    devices = Devices(resharder)
    for source, target in pairs:
        shards = devices.laid(rank, source)
        for step in resharder.steps(source, target):
            shards = devices.run(shards, step)
            assert shards[0].size == 8**rank * step.fraction, (source, target, step)
        closed = tuple(REPLICATED if state == SUM else state for state in target)
        expected = devices.laid(rank, closed)
        for group in devices.pending_groups(target):
            total = sum(shards[device] for device in group)
            assert np.array_equal(total, expected[group[0]]), (source, target)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_path_leads_where_it_says(mesh: str, rank: int) -> None:
    resharder = Resharder(MESHES[mesh], CLUSTER)
    pairs = pairs_of(range(-1, rank), resharder.mesh.num_axes)
    assert_right(resharder, rank, pairs)


@pytest.mark.parametrize("mesh", MESHES)
def test_paths_from_and_to_pending_sums(mesh: str) -> None:
    resharder = Resharder(MESHES[mesh], CLUSTER)
    assert_right(resharder, 2, pairs_of(range(-2, 2), resharder.mesh.num_axes))


@pytest.mark.parametrize("mesh", MESHES)
def test_axes_of_a_dim_in_any_order(mesh: str) -> None:
    """All pairs on two axes, pending sums included, and a sample on three."""
    resharder = Resharder(MESHES[mesh], CLUSTER)
    pairs = ordered_pairs(range(-2, 2), resharder.mesh.num_axes)
    assert_right(resharder, 2, pairs)


@pytest.mark.parametrize("mesh", MESHES)
def test_another_order_is_one_permutation_of_one_shard(mesh: str) -> None:
    shape = MESHES[mesh]
    resharder = Resharder(shape, CLUSTER)
    orders = list(permutations(range(shape.num_axes)))
    specs = [with_axes((REPLICATED,) * shape.num_axes, 0, axes) for axes in orders]
    for source, target in permutations(specs, 2):
        (step,) = resharder.steps(source, target)
        assert step.kind == "collective_permute"
        assert step.fraction == 1 / shape.size


def test_the_order_of_axes_of_one_device_means_nothing() -> None:
    resharder = Resharder(MeshShape(("x", "y"), (1, 4)), CLUSTER)
    source, target = with_axes((-1, -1), 0, (0, 1)), with_axes((-1, -1), 0, (1, 0))
    assert source != target
    assert resharder.steps(source, target) == ()


@pytest.mark.parametrize(
    "sizes", [(6, 4), (1, 8), (3, 2, 2), (12,), (1,), (2, 32), (2, 4, 8)]
)
def test_sizes_that_share_factors_or_none(sizes: tuple[int, ...]) -> None:
    mesh = MeshShape(("x", "y", "z")[: len(sizes)], sizes)
    resharder = Resharder(mesh, Cluster.preset("8x8xH100"))
    devices = Devices(resharder)
    size = 64 if 24 % max(sizes) else 24
    for source, target in pairs_of((-1, 0, 1), len(sizes), 100):
        parts = [num_shards(spec, sizes) for spec in (source, target)]
        if any(size % part for part in parts):
            continue
        shards = devices.laid(2, source, size)
        for step in resharder.steps(source, target):
            shards = devices.run(shards, step)
        assert all(map(np.array_equal, shards, devices.laid(2, target, size)))


@pytest.mark.parametrize(
    ("sizes", "fine"),
    [
        ((2, 4), (2, 2, 2)),
        ((8, 8), (8, 8)),
        ((4, 16), (4, 4, 4)),
        ((6, 4), (2, 3, 2, 2)),
        ((1, 5), (5,)),
        ((1,), (1,)),
        ((2, 32), (2, 32)),
    ],
)
def test_axes_are_cut_where_sizes_share_a_factor(
    sizes: tuple[int, ...], fine: tuple[int, ...]
) -> None:
    found, parts = refined_mesh(MeshShape(("x", "y")[: len(sizes)], sizes))
    assert found.axis_sizes == fine and len(parts) == len(sizes)


@pytest.mark.parametrize("mesh", MESHES)
def test_no_path_costs_more_than_one_without_a_permutation(mesh: str) -> None:
    resharder = Resharder(MESHES[mesh], CLUSTER)
    fine, parts = refined_mesh(MESHES[mesh])
    cheaper = 0

    def price(step: Step) -> float:
        permuted = step.kind == "collective_permute"
        return math.inf if permuted else resharder._prices.seconds(step)

    for source, target in pairs_of(range(-1, 2), resharder.mesh.num_axes):
        start, goal = (placement_of(spec, 2, parts) for spec in (source, target))
        path = cheapest_path(start, goal, fine.axis_sizes, parts, price)
        direct = sum(map(price, path))
        seconds = resharder.seconds(source, target, BYTES)
        assert seconds <= direct * (1 + 1e-9)
        cheaper += seconds < direct * 0.99
    assert cheaper


@pytest.mark.parametrize("mesh", MESHES)
def test_no_detour_is_cheaper(mesh: str) -> None:
    """By way of a spec that cuts no dim finer than the ends do."""
    resharder = Resharder(MESHES[mesh], CLUSTER)
    sizes = resharder.mesh.axis_sizes
    axes = [(axis,) for axis in range(len(sizes))]
    specs = list(product((-1, 0, 1), repeat=len(sizes)))
    seconds = at_size(resharder.by_size(specs, specs), BYTES)
    counts = np.array([placement_of(spec, 2, axes).counts(sizes) for spec in specs])
    most = np.maximum(counts[:, None], counts[None, :])  # [source, target, dim]
    for way in range(len(specs)):
        detour = seconds[:, [way]] + seconds[[way], :]
        allowed = (counts[way] <= most).all(-1)
        assert (seconds <= detour * (1 + 1e-9) + 1e-9)[allowed].all(), specs[way]


def exchanging(resharder: Resharder, rank: int, most: int) -> list[Pair]:
    """Pairs of specs whose paths exchange shards, or use parts of an axis."""
    states = range(-1, rank)
    found = [
        pair
        for pair in pairs_of(states, resharder.mesh.num_axes, 1000)
        if any(step.groups or step.part for step in resharder.steps(*pair))
    ]
    return found if len(found) <= most else random.Random(1).sample(found, most)


def reordering(resharder: Resharder, rank: int, most: int) -> list[Pair]:
    """Pairs of specs of which at least one is not in mesh order."""
    pairs = ordered_pairs(range(-1, rank), resharder.mesh.num_axes, 10_000)
    found = [pair for pair in pairs if max(map(max, pair)) >= TURN]
    return found if len(found) <= most else random.Random(1).sample(found, most)


@pytest.mark.parametrize(
    ("mesh", "chosen", "most"),
    [
        ("2x4", exchanging, 6),
        ("2x2x2", exchanging, 6),
        ("2x2", reordering, 12),
        ("2x4", reordering, 12),
        ("2x2x2", reordering, 6),
    ],
)
def test_programs_give_the_values_with_the_predicted_collectives(
    mesh: str, chosen: Callable[[Resharder, int, int], list[Pair]], most: int
) -> None:
    """Every path in one program, each from an array of its own."""
    shape = MESHES[mesh]
    resharder = Resharder(shape, CLUSTER)
    pairs = chosen(resharder, 2, most)
    assert pairs
    devices = np.array(jax.devices()[: shape.size]).reshape(shape.axis_sizes)
    grid = Mesh(devices, shape.axis_names, axis_types=(AxisType.Auto,) * devices.ndim)

    def change(*arrays: jax.Array) -> list[jax.Array]:
        results = []
        for (source, target), x in zip(pairs, arrays, strict=True):
            x = lax.optimization_barrier(x)
            for step in resharder.steps(source, target):
                x = apply_step(x, step, shape)
            results.append(x)
        return results

    specs: list[list[Any]] = [
        [to_partition_spec(spec, 2, shape.axis_names) for spec in ends]
        for ends in zip(*pairs, strict=True)
    ]
    program = jax.jit(
        jax.shard_map(
            change,
            mesh=grid,
            in_specs=tuple(specs[0]),
            out_specs=specs[1],
            check_vma=False,
        )
    )
    arrays = [
        jnp.arange(32.0 * 16).reshape(32, 16) + 1000 * i for i in range(len(pairs))
    ]
    lowered = program.lower(*arrays)
    compiled = lowered.compile()
    for got, expected in zip(compiled(*arrays), arrays, strict=True):
        np.testing.assert_array_equal(got, expected)
    planned = [
        Collective(
            *(step.kind, resharder.groups(step), "float32"),
            round(32 * 16 * 4 * step.fraction),
        )
        for pair in pairs
        for step in resharder.steps(*pair)
        if step.is_collective
    ]
    optimized = collectives_in_compiled(compiled.as_text() or "")
    found = audit(planned, collectives_in_lowered(lowered), optimized, num_devices=8)
    assert found.ok, found


def test_a_permutation_of_thousands_of_devices() -> None:
    """Device 8 x + y holds the shard of that number, then 512 y + x."""
    ends = Placement(((0, 1),), ()), Placement(((1, 0),), ())
    pairs = permuted_pairs(*ends, (512, 8))
    assert pairs == tuple((d, 8 * (d % 512) + d // 512) for d in range(4096))
