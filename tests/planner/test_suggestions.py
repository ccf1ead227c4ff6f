"""What a step holds shared out evenly, and what is asked for where nothing fits."""

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import main
from autopar.clusters.cluster import Cluster
from autopar.costs.memory import memory_profile
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.graph.op_graph import OpGraph
from autopar.methods.named_methods import Megatron, Zero, restriction_of
from autopar.planner.gather_again import graph_of_plan
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.lower_bound import even_share_bytes
from autopar.planner.memory_users import alike_users, memory_users
from autopar.planner.whole_step import roles_of
from autopar.plans.plan import ShardingPlan
from autopar.sharding.mesh import parse_mesh
from benchmarks.models import build
from tests.marks import slow
from tests.planner import deep_step


def graph_of(model: str, **options: Any) -> OpGraph:
    workload = build(model, **options)
    traced = trace(workload.step, workload.abstract(), {})
    return build_graph(traced, roles_of(traced))


@pytest.mark.parametrize(
    "model",
    ["mlp", *(slow(n) for n in ("gpt", "moe", "unet"))],
)
def test_few_plans_hold_less_than_an_even_share(model: str) -> None:
    graph = graph_of(model)
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


@pytest.fixture(scope="module")
def alone() -> tuple[OpGraph, ShardingPlan]:
    """Equal layers on one device."""
    graph = graph_of("gpt", num_layers=2, seq_len=64, batch_size=128)
    return graph, plan_intra_op(graph, parse_mesh("x:1"), Cluster.local()).plan


def test_on_one_device_an_even_share_is_what_the_plan_holds(
    alone: tuple[OpGraph, ShardingPlan],
) -> None:
    graph, plan = alone
    assert graph_of_plan(graph, plan) is graph
    assert even_share_bytes(graph, 1) == plan.predicted.peak_bytes


def test_equal_values_of_layers_are_named_once(
    alone: tuple[OpGraph, ShardingPlan],
) -> None:
    profile = memory_profile(*alone)
    alike = alike_users(profile)
    held = [user.bytes * count for user, count in alike]
    assert sum(held) == sum(each.bytes for each in memory_users(profile))
    assert any(count > 1 and count % 2 == 0 for _, count in alike)
    assert not any(str(Path.cwd()) in str(user) for user, _ in alike)
    assert held == sorted(held, reverse=True)


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
    given = [*deep, "--budget", "4450KB"]
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
