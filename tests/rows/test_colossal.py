"""Rows of Colossal-AI: state placed and values recomputed by budget, and layouts."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import autopar
from autopar.clusters.cluster import Cluster
from autopar.costs.resharding import Resharder
from autopar.errors import InfeasiblePlanError
from autopar.lowering.memory_use import MemoryUse
from autopar.sharding.mesh import MeshShape
from autopar.sharding.spec import REPLICATED, Spec, to_partition_spec
from autopar.steps.lowered_step import Compiled
from tests.rows.fixtures import Case, random
from tests.rows.running import run_as_planned

NUM_LAYERS, WIDTH = 8, 128


def devices(*sizes: int) -> Mesh:
    names = ("x", "y")[: len(sizes)]
    chosen = np.array(jax.devices()[: int(np.prod(sizes))])
    return Mesh(chosen.reshape(sizes), names)


def averaged() -> Case:
    """Tanh layers with Adam and averaged parameters: four times their bytes."""
    optimizer = optax.adam(1e-2, eps=1e-2)

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, moments, average = state

        def loss(params: dict[str, jax.Array]) -> jax.Array:
            hidden = x
            for kernel in params.values():
                hidden = jnp.tanh(hidden @ kernel)
            return jnp.mean((hidden - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        average = optax.incremental_update(params, average, 0.1)
        return (params, moments, average), value

    params = {f"k{i}": random(i, WIDTH, WIDTH, scale=0.1) for i in range(NUM_LAYERS)}
    state = params, optimizer.init(params), jax.tree.map(jnp.copy, params)
    return Case(step, (state, random(8, 8, WIDTH), random(9, 8, WIDTH)))


def device_bytes(compiled: Compiled) -> int:
    program = compiled.lowered.program
    return MemoryUse.of(compiled.compiled, program.host_bytes).device_bytes


def first_uses(compiled: Compiled) -> dict[str, int]:
    """When each argument is read first, in traced order."""
    graph = compiled.lowered.graph
    found: dict[int, int] = {}
    for position, op in enumerate(graph.blocks[0].operators):
        for operand in op.operands:
            if isinstance(operand, int):
                found.setdefault(operand, position)
    return {i.path: found[i.tensor] for i in graph.inputs if i.tensor in found}


@pytest.fixture(scope="module")
def evicting() -> Compiled:
    """The step within 60% of its state's bytes, on one device."""
    case = averaged()
    budget = sum(leaf.nbytes for leaf in jax.tree.leaves(case.args[0])) * 6 // 10
    step = autopar.parallelize(
        case.step, mesh=devices(1), memory_budget=budget, offload="auto"
    )
    compiled = run_as_planned(step, *case.args)
    assert device_bytes(compiled) <= budget
    assert compiled.plan.predicted.peak_bytes <= budget
    return compiled


def test_col_6_what_is_used_furthest_in_the_future_goes_to_the_host(
    evicting: Compiled,
) -> None:
    inputs = evicting.plan.sharding.inputs
    uses = first_uses(evicting)
    gone = [uses[i.path] for i in inputs if i.memory == "host"]
    params = [i for i in inputs if i.path.startswith("state[0]")]
    state = [i for i in inputs if i.role == "state" and len(i.shape) == 2]
    others = [i for i in state if i not in params]
    held = [uses[i.path] for i in others if i.memory == "device"]
    assert gone
    assert held
    assert len(gone) + len(held) == 3 * NUM_LAYERS
    assert min(gone) >= max(held)
    assert all(uses[i.path] < min(gone) and i.memory == "device" for i in params)


def test_col_6_no_fewer_leaves_would_do(evicting: Compiled) -> None:
    """Memory is used: what is left of the budget holds no more than two leaves."""
    predicted = evicting.plan.predicted
    assert predicted.host_bytes % (WIDTH * WIDTH * 4) == 0
    assert 0 <= predicted.budget_bytes - predicted.peak_bytes < 2 * WIDTH * WIDTH * 4


def test_col_6_losses_stay_equal_and_state_stays_where_it_is(
    evicting: Compiled,
) -> None:
    case = averaged()
    state, x, y = jax.tree.map(jnp.copy, case.args)
    expected, whole = jax.tree.map(jnp.copy, case.args[0]), jax.jit(case.step)
    at_host = [i.memory for i in evicting.plan.sharding.inputs]
    for _ in range(4):
        state, loss = evicting(state, x, y)
        expected, want = whole(expected, x, y)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
        kinds = [leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)]
        wanted = ["pinned_host" if m == "host" else "device" for m in at_host]
        assert kinds == wanted[: len(kinds)]


def test_col_6_collectives_are_no_more_than_leaves() -> None:
    case = averaged()
    step = autopar.parallelize(
        case.step,
        mesh=devices(8),
        method=autopar.DataParallel(),
        offload="optimizer_state",
    )
    plan = run_as_planned(step, *case.args).plan
    num_leaves = len(jax.tree.leaves(case.args[0]))
    assert 0 < sum(c.count for c in plan.sharding.collectives) <= num_leaves


MESH = MeshShape(("x", "y"), (2, 2))
SPECS: list[Spec] = list(product((REPLICATED, 0, 1, 2), repeat=2))


def partition_spec(spec: Spec) -> PartitionSpec:
    return to_partition_spec(spec, 3, MESH.axis_names)


@pytest.mark.parametrize("source", SPECS, ids=str)
def test_col_7_every_pair_of_layouts_of_a_tensor_of_rank_3(source: Spec) -> None:
    """One program for each layout, which returns the tensor in all sixteen."""

    def in_all(x: jax.Array) -> list[jax.Array]:
        y = x.astype(jnp.float32)  # of x's own type it would be state, which stays
        return [autopar.pin(y, partition_spec(target)) for target in SPECS]

    x = jnp.arange(4 * 8 * 12).reshape(4, 8, 12)
    step = autopar.parallelize(
        in_all, mesh=devices(2, 2), pins={"x": partition_spec(source)}
    )
    compiled = step.lower(x).compile()
    compiled.audit().raise_if_wrong()
    for found, target in zip(step(x), SPECS, strict=True):
        assert found.sharding.is_equivalent_to(
            jax.sharding.NamedSharding(devices(2, 2), partition_spec(target)), 3
        )
        np.testing.assert_array_equal(found, x)


def test_col_7_no_path_costs_more_than_dim_by_dim() -> None:
    """Dim by dim: each mesh axis leaves its dim, and then goes to the other."""
    resharder = Resharder(MESH, Cluster.preset("4xH100"))

    def seconds(source: Spec, target: Spec) -> float:
        return resharder.seconds(source, target, 1 << 24)

    def axis_by_axis(source: Spec, target: Spec, order: tuple[int, int]) -> float:
        total, spec = 0.0, list(source)
        for states in ((REPLICATED, REPLICATED), target):
            for axis in order:
                before = tuple(spec)
                spec[axis] = states[axis]
                total += seconds(before, tuple(spec))
        return total

    for source, target in product(SPECS, SPECS):
        orders = ((0, 1), (1, 0))
        least = min(axis_by_axis(source, target, order) for order in orders)
        assert seconds(source, target) <= least * (1 + 1e-9), (source, target)


def test_col_7_two_axes_move_to_another_dim_in_three_steps() -> None:
    resharder = Resharder(MESH, Cluster.preset("4xH100"))
    steps = resharder.steps((0, 0), (1, 1))
    assert 0 < len(steps) <= 3


def activations() -> Case:
    """Four layers with more activations than anything else; plain gradient descent."""

    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            hidden = x
            for kernel in params:
                hidden = jnp.tanh(jnp.sin(jnp.tanh(hidden)) @ kernel)
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = [random(i, 32, 32, scale=0.3) for i in range(4)]
    return Case(step, (params, random(9, 2048, 32)))


def test_col_7_recomputation_fits_where_plain_sharding_does_not() -> None:
    case, mesh = activations(), devices(2)
    plain = autopar.parallelize(case.step, mesh=mesh).plan(*case.args)
    budget = plain.predicted.peak_bytes * 8 // 10
    with pytest.raises(InfeasiblePlanError, match="remat='auto'"):
        autopar.parallelize(case.step, mesh=mesh, memory_budget=budget).plan(*case.args)
    step = autopar.parallelize(case.step, mesh=mesh, memory_budget=budget, remat="auto")
    compiled = run_as_planned(step, *case.args)
    assert compiled.plan.sharding.remat
    assert device_bytes(compiled) <= budget
    predicted = compiled.plan.predicted
    assert predicted.step_seconds > plain.predicted.step_seconds
