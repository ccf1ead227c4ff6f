"""Plans within budgets: exact rows, a gap, the same plan each time, the least named."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.audit.memory_use import MemoryUse
from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.methods.named_methods import Zero, restriction_of
from autopar.methods.restrictions import Limit
from autopar.planner import (
    budget_candidates,
    budget_search,
    least_memory,
    search_work,
)
from autopar.planner.budget_candidates import BudgetCandidates
from autopar.planner.intra_op import IntraOpSolution
from autopar.planner.plan_within import plan_within, plan_within_binding
from autopar.planner.planning import roles_of
from benchmarks.models import build
from tests.planner.tiny_gpt import MESH, TINY, free, gpt


def solved_within(fraction: float) -> IntraOpSolution:
    budget = int(fraction * free().plan.predicted.peak_bytes)
    return plan_within(gpt(), MESH, Cluster.local(), budget)


within = cache(solved_within)


@pytest.mark.parametrize("fraction", [pytest.param(0.85, marks=pytest.mark.slow), 0.75])
def test_a_binding_budget_is_met_within_the_gap(fraction: float) -> None:
    found = within(fraction)
    budget = fraction * free().plan.predicted.peak_bytes
    assert found.plan.predicted.peak_bytes <= budget
    assert found.plan.predicted.optimality_gap <= budget_search.BUDGET_GAP
    assert found.assignment.bound >= free().assignment.bound * (1 - 1e-3)
    assert found.assignment.cost >= free().assignment.cost * (1 - 1e-4)
    to_free = 1 - free().assignment.bound / found.assignment.cost
    assert found.plan.predicted.free_gap == pytest.approx(to_free, abs=1e-3)
    assert found.plan.predicted.free_gap > found.plan.predicted.optimality_gap


@pytest.mark.slow
def test_two_solves_find_the_same_plan() -> None:
    first, again = within(0.75), solved_within(0.75)
    assert first.assignment.choices == again.assignment.choices
    assert first.assignment.bound == again.assignment.bound
    assert first.plan == again.plan


@pytest.mark.slow
def test_copies_of_many_slices_of_a_loop_are_foreseen_together() -> None:
    """Met one plan at a time, they were more than there are rounds."""
    workload = build("gpt", scan_layers=True, remat=True)
    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    budget = 1_321_462  # 0.8 of what the free plan compiles to
    found = plan_within_binding(graph, MESH, Cluster.local(), budget)
    assert found.plan.predicted.peak_bytes <= budget
    assert found.plan.predicted.optimality_gap <= budget_search.BUDGET_GAP


@pytest.mark.slow
def test_as_the_budget_falls_state_is_sharded_until_nothing_fits() -> None:
    """Each plan audited, and compiled within its budget."""
    workload = build("gpt", **TINY)
    seen: list[tuple[int, float, int]] = []
    for fraction in (None, 0.78):
        budget = int(fraction * seen[0][2]) if fraction else None
        step = autopar.parallelize(workload.step, mesh="x:8", memory_budget=budget)
        compiled = step.lower(*workload.abstract()).compile()
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

    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        planned(1_000)
    least = raised.value.least_budget_bytes
    assert least is not None
    assert f"no plan was found below {least:,} B" in str(raised.value)
    assert planned(least).predicted.peak_bytes == least
    with pytest.raises(autopar.InfeasiblePlanError) as again:
        planned(least - 1)
    assert again.value.least_budget_bytes == least


def test_a_search_at_its_limit_of_work_has_a_gap_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Work is counted, so that two searches end with the same plan."""
    monkeypatch.setattr(search_work, "MOST_WORK", 0.7)
    budget = int(0.8 * free().plan.predicted.peak_bytes)
    first, again = (
        plan_within_binding(gpt(), MESH, Cluster.local(), budget) for _ in range(2)
    )
    assert first.assignment.choices == again.assignment.choices
    assert first.plan.predicted.peak_bytes <= budget
    assert first.plan.predicted.optimality_gap > budget_search.BUDGET_GAP
    assert f"within {budget} B a device ended at its limit of work" in caplog.text


def test_searches_that_share_their_work_end_together() -> None:
    """The second meets its plans, and solves nothing."""
    budget = int(0.8 * free().plan.predicted.peak_bytes)
    work = search_work.SearchWork(0.7)
    place = gpt(), MESH, Cluster.local(), budget
    first = plan_within_binding(*place, work=work)
    spent = work.clock.spent
    assert spent >= 0.7 and work.left == 0
    second = plan_within_binding(*place, starts=starts(), work=work)
    assert work.clock.spent == spent
    held = [each.plan.predicted.peak_bytes for each in (first, second)]
    assert max(held) <= budget


def test_a_bound_at_the_cutoff_ends_a_search_once_a_plan_fits() -> None:
    """What takes as long as another mesh's plan is searched no further."""
    budget = int(0.8 * free().plan.predicted.peak_bytes)
    place = gpt(), MESH, Cluster.local(), budget
    cutoff = free().assignment.bound * (1 + 1e-4)
    ended = plan_within_binding(*place, starts=starts(), cutoff=cutoff)
    assert ended.plan.predicted.peak_bytes <= budget
    assert cutoff <= ended.assignment.bound
    assert ended.assignment.gap > budget_search.BUDGET_GAP


@pytest.mark.slow
def test_a_search_that_gains_nothing_ends_at_half_its_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    budget = int(0.7 * free().plan.predicted.peak_bytes)
    place = gpt(), MESH, Cluster.local(), budget
    monkeypatch.setattr(budget_search, "BUDGET_GAP", 1e-12)  # below its rounding
    monkeypatch.setattr(budget_search, "WORTH_A_ROUND", 1.0)
    work = search_work.SearchWork(100.0)
    work.clock.spend(51.0)
    found = plan_within_binding(*place, gap=0.0, starts=starts(), work=work)
    assert found.plan.predicted.peak_bytes <= budget
    assert found.assignment.gap > budget_search.BUDGET_GAP
    assert work.left == 0  # for methods
    assert f"within {budget} B a device ended in vain" in caplog.text


def starts() -> tuple[Limit, ...]:
    batch = [each.tensor for each in gpt().inputs if each.role == "batch"]
    return (restriction_of(Zero(3), gpt(), MESH, batch),)


def test_methods_are_not_searched_far_below_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[int] = []

    def search(*place: Any, **options: Any) -> IntraOpSolution:
        searched.append(place[-1])
        return plan_within_binding(*place, **options)

    monkeypatch.setattr(budget_candidates, "plan_within_binding", search)
    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    traced = trace(small_step, (spec, spec), {})
    graph = build_graph(traced, roles_of(traced))
    place = graph, MESH, Cluster.preset("8xH100")
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        BudgetCandidates(*place, 1_000, (1,), {}, 1e-4).best()
    assert searched == [1_000]
    least = raised.value.least_budget_bytes
    assert least is not None
    with pytest.raises(autopar.InfeasiblePlanError):
        BudgetCandidates(*place, least - 1, (1,), {}, 1e-4).best()
    assert len(searched) > 2


def candidates(budget: int) -> BudgetCandidates:
    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    traced = trace(small_step, (spec, spec), {})
    graph = build_graph(traced, roles_of(traced))
    return BudgetCandidates(
        *(graph, MESH, Cluster.preset("8xH100"), budget, (1,), {}, 1e-4)
    )


def test_far_below_the_least_the_search_ends_early_and_what_it_names_is_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []

    def least(*given: Any) -> least_memory.LeastMemory:
        found = least_memory.least_memory(*given)
        steps.append(found.num_steps)
        return found

    monkeypatch.setattr(budget_search, "least_memory", least)
    monkeypatch.setattr(least_memory, "FAR_WORK", 0.0)
    too_little = 1_000
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        candidates(too_little).best()
    error = raised.value
    assert error.least_budget_bytes is not None
    assert 1.2 * too_little < error.far_bound_bytes <= error.least_budget_bytes
    assert "The search ended early" in str(error)
    found = candidates(error.least_budget_bytes).best()
    assert found.plan.predicted.peak_bytes <= error.least_budget_bytes
    monkeypatch.setattr(least_memory, "FAR_BELOW", 1e9)
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        candidates(too_little).best()
    assert not raised.value.far_bound_bytes
    assert steps[-1] > steps[0]


def test_no_method_is_planned_where_the_budget_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(least_memory, "FAR_WORK", 0.0)

    def planned(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(BudgetCandidates, "_plan", planned)
    with pytest.raises(autopar.InfeasiblePlanError):
        candidates(1_000).best()


@pytest.mark.slow
def test_the_least_budget_of_a_transformer_is_planned() -> None:
    """Less than the least that a search for the fastest plan within a budget meets."""
    too_little = free().plan.predicted.peak_bytes // 4
    with pytest.raises(autopar.InfeasiblePlanError) as raised:
        plan_within(gpt(), MESH, Cluster.local(), too_little)
    least = raised.value.least_budget_bytes
    assert least is not None
    assert too_little < least < 0.55 * free().plan.predicted.peak_bytes
    assert f"memory_budget={least}" in str(raised.value)
    found = plan_within(gpt(), MESH, Cluster.local(), least)
    assert found.plan.predicted.peak_bytes <= least


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

    least = peak(None)
    with pytest.raises(autopar.InfeasiblePlanError) as error:
        peak(int(0.9 * least))
    assert 0.9 * least < (error.value.least_budget_bytes or 0) <= least
