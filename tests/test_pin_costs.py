"""What pins cost, which of them conflict, and that the solver keeps them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.planner.strategies import tensor_specs
from autopar.sharding.mesh import parse_mesh
from autopar.sharding.spec import to_partition_spec
from tests.marks import slow
from tests.rows.fixtures import Case, f1, f3, random
from tests.rows.named_plans import graph_of
from tests.rows.running import homes, run_as_planned, traffic

MESH = "x:2;y:4"


def random_pins(case: Case, seed: int, number: int) -> dict[str, P]:
    """A legal spec for some arguments."""
    graph = graph_of(case)
    mesh, draw = parse_mesh(MESH), np.random.default_rng(seed)
    pins = {}
    for index in draw.choice(len(graph.inputs), number, replace=False):
        each = graph.inputs[index]
        kind = graph.tensors[each.tensor].type
        specs = tensor_specs(kind, mesh, pending=False)
        spec = specs[draw.integers(len(specs))]
        pins[each.path] = to_partition_spec(spec, kind.rank, mesh.axis_names)
    return pins


@pytest.mark.parametrize(
    ("make", "number", "seed"),
    [
        (f1, 3, 0),
        (f1, 3, 1),
        (f1, 3, 2),
        slow(f3, 4, 0),
    ],
)
def test_random_pins_are_kept_and_never_make_a_plan_better(
    make: Any, number: int, seed: int
) -> None:
    case = make()
    pins = random_pins(case, seed, number)
    free = autopar.parallelize(case.step, mesh=MESH).plan(*case.args)
    step = autopar.parallelize(case.step, mesh=MESH, pins=pins)
    plan = step.plan(*case.args)
    slack = 1 + free.predicted.optimality_gap
    assert free.predicted.step_seconds <= plan.predicted.step_seconds * slack
    compiled = run_as_planned(step, *case.args) if seed == 0 else None
    names = plan.sharding.mesh.axis_names
    for each in plan.sharding.inputs:
        if each.path in pins:
            rank = len(each.shape)
            assert to_partition_spec(each.spec, rank, names) == pins[each.path]
    if compiled is not None:
        placed = jax.tree.leaves(compiled.compiled.input_shardings)
        for sharding, each in zip(placed, plan.sharding.inputs, strict=True):
            assert isinstance(sharding, NamedSharding)
            if each.path in pins:
                wanted = NamedSharding(sharding.mesh, pins[each.path])
                assert sharding.is_equivalent_to(wanted, len(each.shape))


@pytest.mark.parametrize("make", [f1, slow(f3)])
def test_pinning_the_solvers_own_answer_changes_nothing(make: Any) -> None:
    case = make()
    free = autopar.parallelize(case.step, mesh=MESH).plan(*case.args)
    names = free.sharding.mesh.axis_names
    pins = {
        each.path: to_partition_spec(each.spec, len(each.shape), names)
        for each in free.sharding.inputs
    }
    step = autopar.parallelize(case.step, mesh=MESH, pins=pins)
    pinned = step.plan(*case.args)
    assert homes(pinned) == homes(free)
    assert pinned.predicted.step_seconds == pytest.approx(
        free.predicted.step_seconds, rel=1e-9 + free.predicted.optimality_gap
    )
    assert traffic(pinned) == traffic(free)


def test_each_pin_costs_what_the_plan_gains_without_it() -> None:
    case = f1()
    step = autopar.parallelize(
        case.step, mesh="x:8", pins={"params/w": P(), "params/v": P("x"), "^x$": P()}
    )
    costs = step.pin_costs(*case.args)
    whole = step.plan(*case.args).predicted.step_seconds
    assert [cost.pin for cost in costs.costs][0] == "params/w"
    assert {cost.pin for cost in costs.costs} == {"params/w", "params/v", "^x$"}
    for cost in costs.costs:
        rest = {"params/w": P(), "params/v": P("x"), "^x$": P()}
        del rest[cost.pin]
        without = autopar.parallelize(case.step, mesh="x:8", pins=rest)
        seconds = without.plan(*case.args).predicted.step_seconds
        assert cost.seconds_without == seconds
        assert cost.step_seconds == whole
    assert costs.costs[0].seconds > 0
    assert str(costs).splitlines()[1].startswith("params/w")


def test_pins_that_the_solver_would_choose_cost_nothing() -> None:
    case = f1()
    free = autopar.parallelize(case.step, mesh="x:8").plan(*case.args)
    pins = {
        each.path: to_partition_spec(each.spec, len(each.shape), ("x",))
        for each in free.sharding.inputs
    }
    costs = autopar.parallelize(case.step, mesh="x:8", pins=pins).pin_costs(*case.args)
    assert len(costs.costs) == 4
    assert all(cost.seconds <= 1e-4 * costs.step_seconds for cost in costs.costs)


def test_a_pin_inside_the_step_is_priced_by_its_line() -> None:
    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return autopar.pin(a @ b, P()) @ b

    args = random(0, 256, 256), random(1, 256, 256)
    costs = autopar.parallelize(step, mesh="x:8").pin_costs(*args)
    (cost,) = costs.costs
    assert cost.pin.startswith("autopar.pin at ") and "test_pin_costs.py" in cost.pin
    assert cost.seconds > 0


def test_a_step_without_pins_has_no_costs() -> None:
    case = f1()
    costs = autopar.parallelize(case.step, mesh="x:8").pin_costs(*case.args)
    assert costs.costs == () and str(costs) == "no pins"


def test_a_plan_that_was_given_has_no_costs() -> None:
    case = f1()
    plan = autopar.parallelize(case.step, mesh="x:8").plan(*case.args)
    step = autopar.parallelize(case.step, plan=plan)
    with pytest.raises(ValueError, match="`plan` was given"):
        step.pin_costs(*case.args)


@pytest.mark.slow
def test_pins_that_a_real_budget_leaves_no_plan_with_are_named() -> None:
    """Both parameters whole take 1 MiB, one of them a half; the step needs the rest."""

    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)

        grads = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {
        "w": jax.ShapeDtypeStruct((256, 512), jnp.float32),
        "v": jax.ShapeDtypeStruct((512, 256), jnp.float32),
    }
    args = params, jax.ShapeDtypeStruct((64, 256), jnp.float32)
    options = {
        "mesh": "x:8",
        "cluster": autopar.Cluster.preset("8xH100"),
        "memory_budget": 1300 * 1024 + (32 << 20),  # that of products
    }
    pins = {"params/w": P(), "^x$": P("x"), "params/v": P()}
    free = autopar.parallelize(step, **options).plan(*args)
    with pytest.raises(autopar.InfeasiblePlanError) as caught:
        free.what_if(pins)
    blamed = str(caught.value).partition("Without pins there is a plan, ")[2]
    assert all(f"{key!r}:" in blamed for key in pins)
    assert (caught.value.least_budget_bytes or 0) > 1300 * 1024 + (32 << 20)
    for name in ("params/w", "params/v"):  # dropping one of them is enough
        free.what_if({key: spec for key, spec in pins.items() if key != name})
