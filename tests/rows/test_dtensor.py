"""Rows of TensorFlow DTensor: ordinary operators on split operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.lowered_step import Compiled
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
