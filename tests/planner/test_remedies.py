"""What every plan holds at least, quick refusals, and what is asked for instead."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import autopar
import autopar.planner.even_share as even_share
import autopar.planner.out_of_reach as out_of_reach
from autopar.cli import main
from autopar.clusters.cluster import Cluster
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.methods.gather_again import graph_of_plan
from autopar.methods.named_methods import Megatron, Zero, restriction_of
from autopar.planner import planning, search_work
from autopar.planner.even_share import even_share_bytes, memory_on_one_device
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.memory_users import alike_users, memory_users
from autopar.planner.planning import roles_of
from autopar.sharding.mesh import parse_mesh
from benchmarks.models import build
from tests.planner import deep_step

DEEP: dict[str, Any] = {"num_layers": 4, "seq_len": 64, "batch_size": 128}


@pytest.mark.parametrize("model", ["gpt", "moe", "unet"])
def test_no_plan_holds_less_than_an_even_share(model: str) -> None:
    workload = build(model)
    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    batch = [each.tensor for each in graph.inputs if each.role == "batch"]
    share = even_share_bytes(graph, 8)
    place = graph, parse_mesh("x:8"), Cluster.local()
    held = [plan_intra_op(*place).plan.predicted.peak_bytes]
    for method in (Zero(3, reshard_after_forward=False), Megatron(8, sequence=True)):
        limits = (restriction_of(method, graph, place[1], batch),)
        found = plan_intra_op(*place, restrictions=limits)
        held.append(found.plan.predicted.peak_bytes)
    assert share <= 1.1 * min(held)
    assert share > 0.3 * min(held)


def test_on_one_device_an_even_share_is_what_the_plan_holds() -> None:
    workload = build("gpt")
    traced = trace(workload.step, workload.abstract(), {})
    graph = build_graph(traced, roles_of(traced))
    alone = plan_intra_op(graph, parse_mesh("x:1"), Cluster.preset("1x1xA100"))
    assert graph_of_plan(graph, alone.plan) is graph
    assert memory_on_one_device(graph).peak_bytes == alone.plan.predicted.peak_bytes


def test_equal_values_of_layers_are_named_once() -> None:
    workload = build("gpt", **DEEP)
    traced = trace(workload.step, workload.abstract(), {})
    profile = memory_on_one_device(build_graph(traced, roles_of(traced)))
    alike = alike_users(profile)
    assert sum(each.bytes for each in alike) == sum(
        each.bytes for each in memory_users(profile)
    )
    softmax = next(each for each in alike if each.user.name == "jvp()/exp")
    assert softmax.count == 4
    assert str(softmax).split()[2:6] == ["4", "x", "16.0", "MiB"]
    assert str(Path.cwd()) not in "".join(map(str, alike))
    assert [each.bytes for each in alike] == sorted(
        (each.bytes for each in alike), reverse=True
    )


@pytest.mark.parametrize("is_zero_known", [True, False])
def test_what_is_out_of_reach_is_refused_without_a_search(
    is_zero_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for one near an even share, where ZeRO-3 is not."""
    workload = build("mlp")
    searched: list[int] = []
    best = planning.BudgetCandidates.best

    def counted(self: Any) -> Any:
        searched.append(self.budget_bytes)
        return best(self)

    monkeypatch.setattr(planning.BudgetCandidates, "best", counted)
    monkeypatch.setattr(even_share, "MANY_OPERATORS", 0)
    if not is_zero_known:
        monkeypatch.setattr(out_of_reach, "METHODS", ())
    cluster = Cluster.preset("8xA100")

    def plan(budget: int) -> autopar.Plan:
        step = autopar.parallelize(workload.step, cluster=cluster, memory_budget=budget)
        return step.plan(*workload.abstract())

    with pytest.raises(autopar.InfeasiblePlanError, match="shared out evenly") as one:
        plan(10_000)
    share = one.value.far_bound_bytes
    assert searched == [planning.NO_BUDGET, int(out_of_reach.NEAR_SHARE * share)]
    least, found = one.value.least_budget_bytes, one.value.least_plan
    assert least is not None and found.predicted.peak_bytes == least
    assert 10_000 < share <= least < 1.5 * share
    fits: dict[str, Any] = {"memory_budget": least, "mesh": "x:8"}
    if is_zero_known:
        fits["method"] = autopar.Zero(3)
    step = autopar.parallelize(workload.step, cluster=cluster, **fits)
    assert step.plan(*workload.abstract()).predicted.peak_bytes <= least


def test_a_long_step_that_memory_binds_is_searched_on_the_levels_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On one axis only its cheapest plan of all is made, once."""
    workload = build("mlp")
    made: list[tuple[str, int, bool]] = []
    best = planning.BudgetCandidates.best

    def counted(self: Any) -> Any:
        made.append((str(self.mesh), self.budget_bytes, self.free is not None))
        return best(self)

    monkeypatch.setattr(planning, "is_long", lambda graph: True)
    monkeypatch.setattr(search_work, "WORK_OF_MESHES", 0.5)
    monkeypatch.setattr(planning.BudgetCandidates, "best", counted)

    def plan(budget: int, mesh: str | None = None) -> autopar.Plan:
        made.clear()
        place: Any = {"cluster": Cluster.preset("2x4xA100"), "mesh": mesh}
        step = autopar.parallelize(workload.step, memory_budget=budget, **place)
        return step.plan(*workload.abstract())

    free = plan(10**9, "x:8").predicted.peak_bytes
    plan(10**9)
    assert made[:2] == [("x:8", planning.NO_BUDGET, False), ("x:8", 10**9, True)]
    budget = int(0.9 * free)
    assert plan(budget).predicted.peak_bytes <= budget
    assert made[:2] == [("x:8", planning.NO_BUDGET, False), ("x:2;y:4", budget, False)]
    assert "x:8" not in [mesh for mesh, *_ in made[1:]]


def test_variants_that_are_out_of_reach_are_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(even_share, "MANY_OPERATORS", 0)
    workload = build("gpt")
    step = autopar.parallelize(
        workload.step, mesh="x:8", memory_budget=10_000, remat="auto", offload="auto"
    )
    with pytest.raises(autopar.InfeasiblePlanError, match="shared out evenly"):
        step.plan(*workload.abstract())


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A deep step in a file of the current folder, and a cluster, as they are typed."""
    shutil.copy(deep_step.__file__, tmp_path / "deep_layers.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "deep_layers:deep", "--cluster", "8xA100"


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(("plan", *args))
    assert caught.value.code == 1
    return capsys.readouterr().err


def test_what_an_error_says_to_ask_for_has_a_plan(
    deep: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*deep, "--budget", "420KB"]
    said = refused(capsys, *given)
    found = re.search(r"With (.*) \((--.*)\) a plan holds", said)
    assert found is not None, said
    assert found.groups() == (
        "remat='full', num_microbatches=4",
        "--remat full --microbatches 4",
    )
    with pytest.raises(SystemExit) as caught:
        main(("plan", *given, *found.group(2).split(), "--no-compare"))
    assert not caught.value.code


def test_where_nothing_would_do_the_error_says_so(
    deep: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *deep, "--budget", "1KB")
    assert "No remat, microbatches and offload were found" in said
