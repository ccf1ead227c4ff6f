"""Plans within budgets: bytes held, a gap, the same plan each time, the least named."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.lowering.memory_use import MemoryUse
from autopar.option_values import NO_BUDGET
from autopar.planner import budget as budget_planner
from autopar.planner.budget import BudgetPlanner
from autopar.planner.intra_op import IntraOpSolution
from autopar.planner.whole_step import roles_of
from benchmarks.models import build
from tests.marks import slow
from tests.planner.tiny_steps import MESH, free, graph, workload

GAP = 1e-4
models = pytest.mark.parametrize("model", ["mlp", slow("gpt")])


def planner(graph: OpGraph) -> BudgetPlanner:
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    return BudgetPlanner(graph, MESH, Cluster.local(), batch)


def solved_within(model: str, fraction: float) -> IntraOpSolution:
    budget = int(fraction * free(model).plan.predicted.peak_bytes)
    return planner(graph(model)).within(budget, GAP)


within = cache(solved_within)


@models
@pytest.mark.parametrize("fraction", [slow(0.85), 0.75])
def test_a_binding_budget_is_met_with_the_gap_to_the_bound_of_all_plans(
    model: str, fraction: float
) -> None:
    found = within(model, fraction)
    budget = fraction * free(model).plan.predicted.peak_bytes
    assert found.is_searched
    assert found.plan.predicted.peak_bytes <= budget
    assert found.assignment.cost >= free(model).assignment.cost * (1 - GAP)
    to_all = 1 - free(model).assignment.bound / found.assignment.cost
    assert found.plan.predicted.optimality_gap == pytest.approx(to_all, abs=1e-3)


@models
def test_a_budget_that_does_not_bind_leaves_the_cheapest_plan(model: str) -> None:
    found = within(model, 1.0)
    assert not found.is_searched
    assert found.plan == free(model).plan


@pytest.mark.slow
def test_the_less_a_plan_may_hold_the_longer_it_takes() -> None:
    found = [within("gpt", fraction) for fraction in (1.0, 0.85, 0.75)]
    seconds = [each.plan.predicted.step_seconds for each in found]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-6)


@pytest.mark.slow
def test_two_solves_find_the_same_plan() -> None:
    first, again = within("gpt", 0.75), solved_within("gpt", 0.75)
    assert first.assignment.choices == again.assignment.choices
    assert first.assignment.bound == again.assignment.bound
    assert first.plan == again.plan


@models
def test_no_method_that_fits_is_quicker(model: str) -> None:
    budget = int(0.75 * free(model).plan.predicted.peak_bytes)
    found = within(model, 0.75).plan.predicted
    fitting = 0
    for method in (autopar.Zero(2), autopar.Zero(3), autopar.Megatron(tensor=8)):
        fun, args = workload(model).step, workload(model).abstract()
        step = autopar.parallelize(fun, mesh=str(MESH), method=method)
        other = step.plan(*args).predicted
        if other.peak_bytes <= budget:
            fitting += 1
            assert found.step_seconds <= other.step_seconds * (1 + 1e-3)
    assert fitting


def test_a_search_ends_where_no_plan_is_quicker_than_another_mesh_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the cheapest plan, which need not fit."""

    def searched(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(budget_planner, "_Search", searched)
    budget = free("mlp").plan.predicted.peak_bytes // 2
    cutoff = 0.5 * free("mlp").assignment.bound
    found = planner(graph("mlp")).within(budget, GAP, cutoff)
    assert found.assignment.bound >= cutoff


@pytest.mark.slow
def test_as_the_budget_falls_state_is_sharded_until_nothing_fits() -> None:
    """Each plan audited, and compiled within its budget."""
    fun, args = workload("gpt").step, workload("gpt").abstract()
    seen: list[tuple[int, float, int]] = []
    for fraction in (None, 0.78):
        budget = int(fraction * seen[0][2]) if fraction else None
        step = autopar.parallelize(fun, mesh="x:8", memory_budget=budget)
        compiled = step.lower(*args).compile()
        compiled.audit().raise_if_wrong()
        used = MemoryUse.of(compiled.compiled).device_bytes
        assert budget is None or used <= budget
        plan = compiled.plan
        seconds = plan.predicted.step_seconds
        seen.append((plan.sharding.state_bytes(), seconds, used))
    assert seen[1][0] < 0.8 * seen[0][0]
    assert seen[0][1] <= seen[1][1]


def small_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def test_the_least_budget_named_is_planned_and_one_byte_less_is_not() -> None:
    """Of a cluster that is not here, so that nothing is compiled."""
    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def planned(budget: int) -> autopar.Plan:
        step = autopar.parallelize(
            small_step,
            mesh="x:8",
            cluster=Cluster.preset("8xH100"),
            memory_budget=budget,
        )
        return step.plan(spec, spec)

    too_little = 7_000
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        planned(too_little)
    least = raised.value.least_budget_bytes
    assert least is not None and least > too_little
    assert not raised.value.bound_bytes
    assert f"no plan was found below {least:,} B" in str(raised.value)
    assert planned(least).predicted.peak_bytes == least
    with pytest.raises(autopar.InfeasiblePlanError) as again:
        planned(least - 1)
    assert again.value.least_budget_bytes == least


@pytest.mark.slow
def test_a_least_budget_of_a_transformer_is_planned() -> None:
    """Searches within other budgets may find a little less, which none is told of."""
    most = free("gpt").plan.predicted.peak_bytes
    budget = int(0.4 * most)
    for _ in range(3):
        try:
            found = planner(graph("gpt")).within(budget, GAP)
            break
        except autopar.InfeasiblePlanError as error:
            least = error.least_budget_bytes or 0
            assert budget < least < 0.5 * most
            assert f"memory_budget={least}" in str(error)
            budget = least
    else:
        pytest.fail(f"no named budget did, the last being {budget}")
    assert found.plan.predicted.peak_bytes <= budget


@models
def test_the_plan_of_least_memory_holds_less_than_others_whatever_it_costs(
    model: str,
) -> None:
    held = within(model, 0.75).plan.predicted.peak_bytes
    least = planner(graph(model)).least(held)
    assert least.plan.predicted.peak_bytes < held
    assert least.assignment.cost >= free(model).assignment.cost * (1 - GAP)
    with pytest.raises(autopar.InfeasiblePlanError):
        planner(graph(model)).least(least.plan.predicted.peak_bytes // 2)


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_what_no_plan_can_hold_is_refused_without_a_search(
    num_hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what every plan holds."""

    def searched(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(budget_planner, "_Search", searched)
    mlp = workload("mlp")
    cluster = Cluster.preset(f"{num_hosts}x8xH100")
    devices = cluster.num_devices

    def planned(budget: int | None) -> autopar.Plan:
        step = autopar.parallelize(mlp.step, cluster=cluster, memory_budget=budget)
        return step.plan(*mlp.abstract())

    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        planned(1024)
    error = raised.value
    given = jax.tree.leaves(mlp.abstract())
    held = sum(each.size * each.dtype.itemsize for each in given)
    assert error.bound_bytes >= held / devices
    assert "arguments alone take" in str(error)


@pytest.mark.parametrize(
    "model",
    ["mlp", *(slow(n) for n in ("gpt", "moe", "unet"))],
)
def test_no_plan_holds_less_than_the_bound_that_refuses(model: str) -> None:
    workload = build(model)
    traced = trace(workload.step, workload.abstract(), {})
    asked = planner(build_graph(traced, roles_of(traced)))
    found = asked.within(NO_BUDGET, GAP)
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        asked.check_room(1)
    held = [found.plan.predicted.peak_bytes]
    for method in (autopar.Zero(3), autopar.Megatron(tensor=8)):
        step = autopar.parallelize(workload.step, mesh=str(MESH), method=method)
        held.append(step.plan(*workload.abstract()).predicted.peak_bytes)
    assert 0.1 * min(held) < raised.value.bound_bytes <= min(held)
    asked.check_room(raised.value.bound_bytes + 1)


def test_a_method_whose_demand_a_reader_cannot_meet_is_planned_within_a_budget() -> (
    None
):
    """Queries, keys and values of one product: no shard border is where they are cut.

    Megatron demands the product in columns, and the slices read it whole.
    """
    heads, hidden = 4, 64

    def step(w: Any, x: jax.Array) -> Any:
        def loss(w: Any) -> jax.Array:
            borders = [hidden, hidden + hidden // heads]
            q, k, v = jnp.split(x @ w["qkv"], borders, axis=-1)
            q = q.reshape(*q.shape[:2], heads, hidden // heads)
            p = jax.nn.softmax(jnp.einsum("bshd,btd->bhst", q, k))
            y = jnp.einsum("bhst,btd->bshd", p, v).reshape(x.shape) @ w["o"]
            return jnp.mean((y - x) ** 2)

        return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w))

    qkv = jnp.ones((hidden, hidden + 2 * hidden // heads))
    args = {"qkv": qkv, "o": jnp.ones((hidden, hidden))}, jnp.ones((8, 16, hidden))

    def peak(budget: int | None) -> int:
        method, mesh = autopar.Megatron(tensor=4), "data:2;tensor:4"
        options: Any = {"method": method, "mesh": mesh, "memory_budget": budget}
        return autopar.parallelize(step, **options).plan(*args).predicted.peak_bytes

    free = peak(None)
    with pytest.raises(autopar.InfeasiblePlanError) as error:
        peak(int(0.7 * free))
    least = error.value.least_budget_bytes or 0
    assert 0.7 * free < least
    assert peak(least) <= least
