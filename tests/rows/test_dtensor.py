"""Rows of TensorFlow DTensor: split operands, component tensors, laid out variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import ParallelFunction
from autopar.audit.compiled_collectives import (
    collectives_in_compiled,
    collectives_in_lowered,
)
from autopar.pipelines.state_init import PlacedInit, init_programs
from autopar.planner.traced_init import trace_init
from autopar.state.placements import LeafPart
from autopar.steps.lowered_step import Compiled
from tests.rows.fixtures import Case
from tests.rows.named_plans import plan_of_layout
from tests.rows.running import homes, run_as_planned, traffic


def example() -> Case:
    """The product of DTensor's guide: A is 2 x 3, B is 3 x 2."""

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return a @ b

    numbers = jnp.arange(6, dtype=jnp.float32)
    return Case(multiply, (numbers.reshape(2, 3), numbers.reshape(3, 2)))


def six_devices() -> Mesh:
    return Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("x", "y"))


def flops(compiled: Compiled) -> float:
    """Of one device, as the compiler counts them."""
    analysis = compiled.compiled.cost_analysis()
    assert analysis is not None
    return analysis["flops"]


@pytest.mark.parametrize(
    ("layout", "device_flops", "expected"),
    [
        ({}, 24, {}),
        ({3: "x"}, 8, {("all_reduce", "x"): [16]}),
    ],
    ids=["replicated", "contracted"],
)
def test_dt_5_work_is_divided_as_the_operands_are(
    layout: dict[int, str],
    device_flops: int,
    expected: dict[tuple[str, str], list[int]],
) -> None:
    """A multiply and an add each: 12 and 4 multiplies a device, 72 and 24 in all."""
    case = example()
    plan = plan_of_layout(case, six_devices(), layout)
    assert traffic(plan) == expected
    step = autopar.parallelize(case.step, mesh=six_devices(), plan=plan)
    assert flops(run_as_planned(step, *case.args)) == device_flops


def test_dt_5_rows_are_split_as_well() -> None:
    """A's rows lie over y: 2 multiplies a device, 12 in all, none repeated."""
    case = example()
    pins = {"a": P("y", "x"), "b": P("x")}
    step = autopar.parallelize(case.step, mesh=six_devices(), pins=pins)
    plan = step.plan(*case.args)
    assert homes(plan) == {"a": (1, 0), "b": (0, -1)}
    assert traffic(plan) == {("all_reduce", "x"): [8]}
    assert flops(run_as_planned(step, *case.args)) == 4


def test_dt_5_no_work_is_repeated_when_nothing_is_pinned() -> None:
    case = example()
    step = autopar.parallelize(case.step, mesh=six_devices())
    assert flops(run_as_planned(step, *case.args)) == 4


def shards_by_device(array: jax.Array) -> dict[int, np.ndarray]:
    """DTensor's component tensors: the local array of every device."""
    return {s.device.id: np.asarray(s.data) for s in array.addressable_shards}


def laid_rows() -> tuple[ParallelFunction, jax.Array]:
    """range(128) on [X(2), Y(3)] laid [X], as a step keeps it; and how it goes in."""
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("X", "Y"))

    def keep(x: jax.Array) -> jax.Array:
        return autopar.pin(x * 1, P("X"))

    return autopar.parallelize(keep, mesh=mesh, pins={"x": P("X")}), jnp.arange(128)


def test_dt_4_components_lie_as_the_layout_says() -> None:
    keep, numbers = laid_rows()
    run_as_planned(keep, numbers)
    for device, component in shards_by_device(keep(numbers)).items():
        first = 64 * (device // 3)
        np.testing.assert_array_equal(component, np.arange(first, first + 64))


def test_dt_4_what_is_unpacked_and_packed_is_the_same() -> None:
    """`addressable_shards` unpacks, JAX's make_array packs, and the step takes it."""
    keep, numbers = laid_rows()
    laid = keep(numbers)
    components = [shard.data for shard in laid.addressable_shards]
    packed = jax.make_array_from_single_device_arrays(
        laid.shape, laid.sharding, components
    )
    np.testing.assert_array_equal(packed, numbers)
    assert packed.sharding == laid.sharding  # fetch_layout
    again = keep(packed)
    assert again.sharding.is_equivalent_to(laid.sharding, 1)  # check_layout
    np.testing.assert_array_equal(again, numbers)


def test_dt_4_components_that_are_no_such_layout_are_refused() -> None:
    keep, numbers = laid_rows()
    laid = keep(numbers)
    components = [shard.data[:32] for shard in laid.addressable_shards]
    with pytest.raises(ValueError, match="shape"):
        jax.make_array_from_single_device_arrays(laid.shape, laid.sharding, components)


def init_kernel(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (256, 256))


def decay(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A variable that is assigned once a step."""
    return kernel * 0.5, (x @ kernel).sum()


def laid_kernel() -> tuple[ParallelFunction, jax.ShapeDtypeStruct]:
    step = autopar.parallelize(decay, mesh="x:8", pins={"kernel": P("x")})
    return step, jax.ShapeDtypeStruct((8, 256), jnp.float32)


def test_dt_6_a_value_is_made_in_shards() -> None:
    step, x = laid_kernel()
    kernel = step.init(init_kernel, jax.random.key(0), batch=x)
    expected = jax.jit(init_kernel)(jax.random.key(0))
    np.testing.assert_array_equal(kernel, expected)
    sizes = {shard.data.nbytes for shard in kernel.addressable_shards}
    assert sizes == {32_768} and len(kernel.addressable_shards) == 8


def test_dt_6_no_device_makes_or_is_sent_more_than_its_shard() -> None:
    init = trace_init(init_kernel, (jax.random.key(0),), {})
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    home = (LeafPart(NamedSharding(mesh, P("x"))),)
    (made,) = init_programs(PlacedInit(init, (home,)), autopar.Cluster.local())
    compiled = made.program.compile()
    assert not collectives_in_lowered(made.program.lower())
    assert not collectives_in_compiled(compiled.as_text() or "")
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.output_size_in_bytes == 32_768
    assert memory.temp_size_in_bytes < 256 * 256 * 4


def test_dt_6_a_variable_keeps_its_layout_and_its_memory() -> None:
    step, x = laid_kernel()
    kernel = step.init(init_kernel, jax.random.key(0), batch=x)
    home = kernel.sharding
    for _ in range(2):
        before = {s.data.unsafe_buffer_pointer() for s in kernel.addressable_shards}
        old = kernel
        kernel, _ = step(kernel, jnp.ones((8, 256)))
        assert old.is_deleted()
        assert kernel.sharding.is_equivalent_to(home, 2)
        after = {s.data.unsafe_buffer_pointer() for s in kernel.addressable_shards}
        assert after == before


@pytest.mark.parametrize("how", ["pin", "constraint"])
def test_dt_6_assigning_another_layout_is_refused(how: str) -> None:
    """The error names both places, and says what to do."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    other = NamedSharding(mesh, P(None, "x"))

    def assign(kernel: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        kernel, value = decay(kernel, x)
        if how == "pin":
            return autopar.pin(kernel, other.spec), value
        return jax.lax.with_sharding_constraint(kernel, other), value

    place = {"pin": r"autopar\.pin", "constraint": "sharding_constraint"}[how]
    said = (
        r"kernel comes in as .*'x'.* by its pin and is returned as .*None, 'x'.* by "
        rf"{place} at \S*test_dtensor.*; leave out one of the two"
    )
    arrays = jnp.ones((256, 256)), jnp.ones((8, 256))
    step = autopar.parallelize(assign, mesh=mesh, pins={"kernel": P("x")})
    with pytest.raises(ValueError, match=said):
        step.plan(*arrays)
    agreeing = autopar.parallelize(assign, mesh=mesh, pins={"kernel": other.spec})
    assert agreeing.plan(*arrays)


def test_dt_6_a_value_in_another_layout_is_moved_and_comes_back_in_its_own() -> None:
    step, x = laid_kernel()
    home = step.init(init_kernel, jax.random.key(0), batch=x).sharding
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    other = NamedSharding(mesh, P(None, "x"))
    kernel = jax.device_put(init_kernel(jax.random.key(0)), other)
    kernel, _ = step(kernel, jnp.ones((8, 256)))
    assert kernel.sharding.is_equivalent_to(home, 2)
