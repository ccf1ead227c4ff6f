"""What calibration measures, fits and writes, and that plans can be priced with it."""

from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

import autopar.commands.calibrate as measuring
from autopar.cli import main
from autopar.clusters.cluster import Cluster
from autopar.clusters.cluster_file import to_toml
from autopar.clusters.hardware import Link
from autopar.clusters.measured_links import Timing, as_measured
from autopar.commands.calibrate import Effort, calibrate, slowing_of
from autopar.frontend.tracing import trace
from autopar.graph.build_graph import build_graph
from autopar.planner.intra_op import plan_intra_op
from autopar.planner.whole_step import roles_of
from autopar.sharding.collective import COLLECTIVE_KINDS
from autopar.sharding.mesh import MeshShape
from benchmarks.models import build
from benchmarks.plan_price import plan_seconds
from tests.marks import slow

QUICK = Effort(
    sizes=(16, 32, 64),
    dtypes=("float32",),
    memory_bytes=1 << 16,
    collective_bytes=(1 << 10, 1 << 14),
    run_seconds=0.002,
    runs=2,
)


def test_what_was_measured_is_kept_made_to_ascend() -> None:
    seconds = {1e3: 3e-6, 1e5: 2e-6, 1e7: 4e-6}
    timings = [
        Timing(kind, size, num_bytes, each)
        for kind in COLLECTIVE_KINDS
        for size in (2, 8)
        for num_bytes, each in seconds.items()
    ]
    link = as_measured(timings, Link("wire", 1.0, 1.0))
    pairs = [(1e3, 3e-6), (1e5, 3e-6), (1e7, 4e-6)]
    assert link.measured == {k: {2: pairs, 8: pairs} for k in COLLECTIVE_KINDS}
    assert link.alpha_seconds == 3e-6
    assert link.bandwidth == pytest.approx(1e13, rel=1e-3)


def test_what_slows_small_products_is_found_again() -> None:
    def times(n: int) -> float:
        return (1 + 4e5 / n**2) * (1 + 100 / n)

    area, depth = slowing_of([(n, times(n)) for n in (256, 512, 1024, 4096, 8192)])
    for n in (512, 2048):
        assert 1 + area / n**2 + depth / n == pytest.approx(times(n), rel=0.1)
    assert slowing_of([(512, 1.0), (1024, 1.0)]) == (0.0, 0.0)


@pytest.fixture(scope="module")
def measured() -> Cluster:
    return calibrate(QUICK)


def test_this_machine_is_measured_and_its_file_is_read_back(
    measured: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(to_toml(measured, "two\nlines"))
    loaded = Cluster.load(path)
    assert to_toml(loaded) == to_toml(measured)
    assert loaded.devices_per_host == jax.device_count()
    assert 1e6 < loaded.device.peak_flops["float32"] < 1e15
    assert loaded.device == measured.device
    assert set(loaded.host_link.measured) == set(COLLECTIVE_KINDS)
    assert loaded.host_link == loaded.network_link


def test_the_loops_hold_the_collectives_that_they_time_and_keep_their_shape() -> None:
    mesh = jax.make_mesh((8,), ("member",), axis_types=(AxisType.Auto,))
    names = {
        "all_reduce": "psum",
        "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter",
        "all_to_all": "all_to_all",
        "collective_permute": "ppermute",
    }
    spec = jax.sharding.PartitionSpec("member")
    for kind in COLLECTIVE_KINDS:
        step = measuring._STEPS[kind]
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        traced = jax.make_jaxpr(mapped)(jax.numpy.zeros(8 * 64))
        text = str(traced)
        assert f"{names[kind]}[" in text or f"{names[kind]}_invariant[" in text
        (out,) = traced.out_avals
        assert out.shape == (8 * 64,), "a loop repeats it"


def graph_of(name: str) -> Any:
    workload = build(name)
    traced = trace(workload.step, workload.abstract(), {})
    return build_graph(traced, roles_of(traced))


@pytest.mark.parametrize("name", ["mlp", slow("lstm")])
def test_a_plan_priced_with_its_own_cluster_costs_what_it_predicts(name: str) -> None:
    graph, cluster = graph_of(name), Cluster.preset("2x4xH100")
    plan = plan_intra_op(graph, MeshShape(("x", "y"), (2, 4)), cluster, gap=0.01).plan
    seconds = plan_seconds(graph, plan, cluster)
    assert seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    slower = plan_seconds(graph, plan, Cluster.preset("2x4xV100"))
    assert slower > 1.5 * seconds


def test_the_command_writes_a_file(
    measured: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(measuring, "calibrate", lambda **_: measured)
    path = tmp_path / "my.toml"
    with pytest.raises(SystemExit) as caught:
        main(("calibrate", "--out", str(path)))
    assert not caught.value.code
    assert f"written to {path}" in capsys.readouterr().out
    assert to_toml(Cluster.load(path)) == to_toml(measured)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        ({"all_sum": {}}, "did you mean all_reduce"),
        ({"all_reduce": {2: 2.0}}, "`measured.all_reduce.2` must be two or more pairs"),
        ({"all_reduce": {2: [(1, 1e-5)]}}, "must be two or more pairs"),
        ({"all_reduce": {2: [(1, 2e-5), (2, 1e-5)]}}, "of more bytes no fewer seconds"),
        ([1, 2], "`measured` must be a table"),
    ],
)
def test_bad_timings_of_a_link_are_refused(measured: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link("wire", 1e-6, 1e9, 1.0, measured)
