"""A memory budget is a hard constraint: of the plan, and of the compiled program."""

import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.clusters.cluster import Cluster
from autopar.costs.memory import MemoryProfile, memory_profile
from autopar.costs.resharding import Resharder
from autopar.lowering.memory_use import MemoryUse
from autopar.option_values import RESERVED_FRACTION, default_budget, parse_budget
from autopar.planner.budget import BudgetPlanner
from autopar.planner.intra_op import read_profile
from autopar.planner.memory_constraints import MemoryRows
from autopar.planner.memory_users import memory_users
from autopar.planner.sharding_problem import ShardingProblem, build_problem
from autopar.sharding.mesh import parse_mesh
from autopar.solver.assignment import Assignment
from benchmarks.models import build
from tests.marks import slow
from tests.rows.fixtures import Case, dense_stack, random
from tests.rows.named_plans import graph_of
from tests.rows.test_fairscale import f2


def dear_launches() -> Cluster:
    """The local cluster, where one collective more costs a lot."""
    return replace(Cluster.local(), launch_seconds=1e-3)


def compiled_bytes(compiled: Any) -> int:
    return MemoryUse.of(compiled.compiled).device_bytes


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("70GiB", 70 * 2**30),
        ("1.5 GB", 1_500_000_000),
        ("900mb", 900_000_000),
        ("4096", 4096),
        ("60B", 60),
        (123, 123),
        (np.int64(70), 70),
    ],
)
def test_a_budget_is_bytes_or_a_text(given: int | str, expected: int) -> None:
    assert parse_budget(given) == expected


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("70 gigs", ValueError, "unit 'gigs'"),
        ("lots", ValueError, "number with a unit"),
        ("-1GiB", ValueError, "must be positive"),
        ("60", ValueError, "must have a unit if it is so small, but got '60'"),
        (0, ValueError, "must be positive"),
        (1.5, TypeError, "of type float"),
        (True, TypeError, "of type bool"),
    ],
)
def test_a_bad_budget_says_what_to_write(given: Any, error: type, text: str) -> None:
    with pytest.raises(error, match=text) as raised:
        autopar.parallelize(lambda x: x, memory_budget=given)
    assert re.search("'[67]0GiB'", str(raised.value))


def test_a_plan_that_is_given_has_no_budget() -> None:
    step = autopar.parallelize(lambda x: x + 1.0)
    plan = step.plan(jnp.ones(8))
    with pytest.raises(ValueError, match="`memory_budget` must be left out"):
        autopar.parallelize(lambda x: x + 1.0, plan=plan, memory_budget="1GiB")


def test_the_default_is_the_devices_memory_less_a_reserve() -> None:
    cluster = Cluster.preset("8xH100")
    reserve = 1 - RESERVED_FRACTION
    assert default_budget(cluster) == int(cluster.device.memory_bytes * reserve)
    plan = autopar.parallelize(lambda x: x + 1.0).plan(jnp.ones(8))
    assert plan.predicted.peak_bytes <= default_budget(Cluster.local())


def layers() -> Case:
    """A scan over layers that the backward pass makes again."""

    def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(w: jax.Array) -> jax.Array:
            layer = jax.checkpoint(lambda y, w: (jnp.sin(jnp.tanh(y @ w)), None))
            return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(state)
        return state - 0.1 * grads, value

    kind = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32)
    return Case(step, (kind, jax.ShapeDtypeStruct((256, 64), jnp.float32)))


def zoo(name: str, **options: Any) -> Case:
    workload = build(name, **options)
    return Case(workload.step, workload.abstract())


@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        (lambda: zoo("mlp"), "x:8"),
        (layers, "x:2;y:4"),
        slow(
            lambda: zoo("gpt", scan_layers=True, remat=True),
            "x:2;y:4",
        ),
    ],
    ids=["mlp", "layers", "gpt"],
)
def test_predicted_memory_is_near_the_compiled_programs(make: Any, mesh: str) -> None:
    """No plan is compiled again here: this is the model's own error."""
    case = make()
    step = autopar.parallelize(case.step, mesh=mesh)
    compiled = step.lower(*case.args).compile()
    assert compiled.plan.predicted.memory_correction == 1.0
    ratio = compiled.plan.predicted.peak_bytes / compiled_bytes(compiled)
    assert 0.7 < ratio < 1.35


def run_twice(step: Any, case: Case) -> tuple[Any, list[float]]:
    """The state after two steps and their losses."""
    state, *batch = jax.tree.map(jnp.copy, case.args)
    losses = []
    for _ in range(2):
        state, loss = step(state, *batch)
        losses.append(float(loss))
    return state, losses


PINNED = {r"^state\[0\]": P(), r"^(x|y)$": P("x")}


def test_as_the_budget_falls_optimizer_state_is_sharded() -> None:
    """Parameters are pinned whole, so that ZeRO is all that is left to do."""
    adam = optax.adam(1e-2, eps=1e-2)
    case = f2(adam)
    (params, _), *batch = case.args
    params = {name: params[name] for name in ("kernel0", "kernel1")}
    case = Case(case.step, ((params, adam.init(params)), *batch))
    final, expected = run_twice(jax.jit(case.step), case)
    budget: int | None = None
    states, seconds = [], []
    for _ in range(2):
        step = autopar.parallelize(
            case.step,
            mesh="x:8",
            cluster=dear_launches(),
            pins=PINNED,
            memory_budget=budget,
        )
        compiled = step.lower(*case.args).compile()
        compiled.audit().raise_if_wrong()
        held, plan = compiled_bytes(compiled), compiled.plan
        if budget is not None:
            assert held <= budget == plan.predicted.budget_bytes
        states.append(plan.sharding.state_bytes())
        seconds.append(plan.predicted.step_seconds)
        state, found = run_twice(step, case)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        for ours, theirs in zip(
            jax.tree.leaves(state), jax.tree.leaves(final), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-4)
        budget = int(0.9 * held)
    assert states[1] < states[0]
    assert seconds[1] >= seconds[0]


def test_where_nothing_fits_the_largest_users_of_memory_are_named() -> None:
    case = dense_stack(64, 64, 1)
    step = autopar.parallelize(case.step, mesh="x:8", memory_budget=20_000)
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        step.plan(*case.args)
    error = raised.value
    assert error.least_budget_bytes is not None
    assert error.least_budget_bytes > 20_000
    assert f"memory_budget={error.least_budget_bytes}" in str(error)
    named = str(error).split("Most is taken by\n")[1].splitlines()
    assert sum(line.startswith(" ") for line in named) == 5
    assert "batch['" in str(error)


def test_the_least_budget_that_an_error_names_does() -> None:
    """Up to what compiling adds to the prediction, which the second error names."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    budget: int | None = 10_000
    for _ in range(4):
        try:
            plan = autopar.parallelize(step, mesh="x:8", memory_budget=budget).plan(
                spec, spec
            )
            break
        except autopar.InfeasiblePlanError as error:
            assert error.least_budget_bytes is not None
            assert error.least_budget_bytes > (budget or 0)
            budget = error.least_budget_bytes
    else:
        pytest.fail(f"no named budget did, the last being {budget}")
    assert plan.predicted.budget_bytes == budget


def test_users_of_memory_are_named_largest_first() -> None:
    def step(params: jax.Array, x: jax.Array) -> tuple[Any, jax.Array]:
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(params)
        updates, _ = optax.sgd(0.1).update(grads, optax.sgd(0.1).init(params))
        return optax.apply_updates(params, updates), grads.sum()

    lowered = autopar.parallelize(step, mesh="x:8").lower(
        jnp.ones((64, 64)), jnp.ones((8, 64))
    )
    profile = memory_profile(lowered.graph, lowered.plan.sharding)
    users = memory_users(profile)
    sizes = [user.bytes for user in users]
    assert sizes == sorted(sizes, reverse=True)
    assert {"params", "x"} <= {user.name for user in users}
    others = profile.argument_bytes + profile.output_bytes
    at_peak = sum(sizes) - profile.argument_bytes
    assert round(profile.factor * at_peak) + others == profile.peak_bytes


# Sizes of which few split four ways: brute force goes through every assignment.
SMALL: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "dot_relu_dot": (lambda x, w, v: jax.nn.relu(x @ w) @ v, ((3, 4), (4, 2), (2, 3))),
    "read_twice": (lambda x, w: (x @ w) * jnp.sum(w), ((3, 5), (5, 4))),
    "update": (lambda w, x: w - 0.1 * (x @ w), ((3, 4), (3, 3))),
    "two_products": (lambda x, w: (x @ w) @ w.T + x, ((8, 3), (3, 5))),
}
MESH = parse_mesh("a:4")


@dataclass(frozen=True)
class EveryPlan:
    """All plans of a small step: what each costs and holds."""

    problem: ShardingProblem
    choices: list[tuple[int, ...]]
    profiles: list[MemoryProfile]
    costs: np.ndarray

    @property
    def bytes(self) -> np.ndarray:
        return np.array([each.peak_bytes for each in self.profiles])


@cache
def every_plan(name: str) -> EveryPlan:
    fun, shapes = SMALL[name]
    case = Case(fun, tuple(random(i, *shape) for i, shape in enumerate(shapes)))
    graph, cluster = graph_of(case), Cluster.local()
    resharder = Resharder(MESH, cluster)
    problem = build_problem(graph, MESH, cluster, resharder)
    sizes = [node.costs.size for node in problem.choice_graph.nodes]
    assert math.prod(sizes) <= 200_000
    plans, profiles, costs = [], [], []
    for choices in np.ndindex(*sizes):
        cost = problem.choice_graph.cost(choices)
        if cost < math.inf:
            assignment = Assignment(choices, cost, 0.0)
            profiles.append(read_profile(problem, assignment, cluster, resharder))
            plans.append(choices)
            costs.append(cost)
    return EveryPlan(problem, plans, profiles, np.array(costs))


@pytest.mark.parametrize("name", SMALL)
def test_rows_of_a_plan_are_exact_for_it(name: str) -> None:
    """The fullest point comes first, and is what the plan holds."""
    every = every_plan(name)
    rows_of = MemoryRows(every.problem)
    for choices, profile in zip(every.choices, every.profiles, strict=True):
        rows = rows_of.of(profile, choices)
        held = [row.used(every.problem.choice_graph, choices) for row in rows]
        assert held[0] == pytest.approx(profile.peak_bytes, abs=1)
        assert max(np.diff(held), default=0) < 1e-6


@pytest.mark.parametrize("name", SMALL)
def test_rows_of_one_plan_tell_of_others(name: str) -> None:
    """What is fused and when it runs may differ, so not exactly."""
    every = every_plan(name)
    cheapest = int(every.costs.argmin())
    rows = MemoryRows(every.problem).of(
        every.profiles[cheapest], every.choices[cheapest]
    )
    graph, plans = every.problem.choice_graph, np.array(every.choices)
    told = np.max([row.used_by(graph, plans) for row in rows], axis=0)
    ratios = told / every.bytes
    assert np.median(ratios) == pytest.approx(1.0, abs=0.15)
    assert np.mean(np.abs(ratios - 1) < 0.3) >= 0.75


@pytest.mark.parametrize("name", SMALL)
def test_the_plan_within_a_budget_is_near_that_of_brute_force(name: str) -> None:
    every = every_plan(name)
    asked = BudgetPlanner(every.problem.graph, MESH, Cluster.local())
    held = np.unique(every.bytes)
    for budget in held[:: max(len(held) // 6, 1)].tolist():
        best = every.costs[every.bytes <= budget].min()
        found = asked.within(budget, gap=0.0)
        assert found.plan.predicted.peak_bytes <= budget
        assert found.assignment.cost <= 1.05 * best
        assert found.assignment.bound <= best * (1 + 1e-9)
    with pytest.raises(autopar.InfeasiblePlanError):
        asked.within(int(held[0]) // 2, gap=0.0)
    assert asked.least(int(held[-1])).plan.predicted.peak_bytes <= 1.25 * held[0]
