"""Steps compiled for clusters that are not here: audited, told, and never called."""

import logging
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autopar
from autopar.errors import TargetError
from autopar.report.compiled_figures import CompiledFigures
from autopar.steps.lowered_pipeline import CompiledPipeline
from autopar.steps.lowered_step import Compiled
from autopar.targets import target
from benchmarks.models import build

pytestmark = pytest.mark.targets


def parallel(step: Any, cluster: str, **options: Any) -> Any:
    made = autopar.Cluster.preset(cluster)
    return autopar.parallelize(step, cluster=made, **options)


@cache
def compiled(model: str, cluster: str, mesh: str = "x:8") -> Compiled:
    workload = build(model)
    step = parallel(workload.step, cluster, mesh=mesh)
    return step.lower(*workload.abstract()).compile()


@pytest.mark.parametrize(
    ("model", "cluster"),
    [
        ("gpt", "1x8xH100"),
        ("moe", "1x8xH100"),
        ("mlp", "1x8xV100"),
        ("mlp", "1x8xA100"),
        ("mlp", "1x8xB200"),
    ],
)
def test_a_planned_step_has_the_collectives_of_its_plan(
    model: str, cluster: str
) -> None:
    program = compiled(model, cluster)
    found = program.audit()
    found.raise_if_wrong()
    assert found.rows
    assert found.memory is not None
    assert found.memory.argument_bytes == program.plan.sharding.state_bytes() + sum(
        each.bytes for each in program.plan.sharding.inputs if each.role != "state"
    )
    assert "num_partitions=8" in program.as_text().splitlines()[0]


def test_a_step_compiled_for_gpus_is_replayed() -> None:
    found = compiled("gpt", "1x8xH100").predicted
    assert found is not None
    assert {"kernels", "products", "collectives", "launches"} <= found.by_class.keys()
    sent = found.by_class["collectives"]
    assert 0 < found.exposed_seconds <= sent < found.seconds
    alone = sum(found.by_class.values()) - sent
    assert found.seconds == pytest.approx(alone + found.exposed_seconds)


def test_a_mesh_over_two_hosts_has_its_last_axis_within_them() -> None:
    program = compiled("mlp", "2x8xH100", "h:2;x:8")
    program.audit().raise_if_wrong()
    assert "num_partitions=16" in program.as_text().splitlines()[0]


def test_a_sum_over_hosts_and_then_within_them_may_become_one_over_all() -> None:
    workload = build("mlp")
    method = autopar.DataParallel()
    step = parallel(workload.step, "2x8xA100", mesh="h:2;x:8", method=method)
    found = step.lower(*workload.abstract()).compile().audit()
    found.raise_if_wrong()
    folded = [each for each in found.differences if "fold: " in each.reason]
    assert [each.collective.split(" over ")[1] for each in folded] == ["x", "h,x", "h"]


def test_a_compiled_step_says_where_it_would_run() -> None:
    program = compiled("mlp", "1x8xA100")
    with pytest.raises(RuntimeError, match="which are 1x8xA100, but this process has"):
        program(*build("mlp").arguments())


def test_a_plan_says_what_it_was_compiled_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workload = build("mlp")
    step = parallel(workload.step, "1x4xH100", mesh="x:4")
    modelled = step.plan(*workload.abstract())
    assert modelled.compiled == (
        "modelled, not compiled; plan with compile=True, or --compile"
    )
    found = step.plan(*workload.abstract(), compile=True).compiled
    assert isinstance(found, CompiledFigures)
    assert found.ok
    assert found.target == "1x4xH100"
    assert found.peak_bytes > modelled.sharding.state_bytes()
    step.plan(*workload.abstract(), compile=True).explain()
    assert "compiled for 1x4xH100" in capsys.readouterr().out


@cache
def compiled_pipeline() -> CompiledPipeline:
    workload = build("mlp")
    method = autopar.PipelineParallel(num_stages=2, num_microbatches=2)
    step = parallel(workload.step, "2x8xH100", method=method)
    return step.lower(*workload.abstract()).compile()


def test_every_program_of_a_pipeline_is_compiled_for_its_host() -> None:
    program = compiled_pipeline()
    found = program.audit()
    found.raise_if_wrong()
    assert {name.split(",")[0] for name, _ in found.audits} == {"stage 0", "stage 1"}
    headers = [t for t in program.as_text().splitlines() if t.startswith("HloModule")]
    assert len(headers) == len(found.audits)
    assert all("num_partitions=8" in each for each in headers)


def test_a_compiled_pipeline_says_where_it_would_run() -> None:
    with pytest.raises(RuntimeError, match="which are 1x8xH100, but this process has"):
        compiled_pipeline()(*build("mlp").arguments())


def test_what_was_compiled_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, logger="autopar")
    first, second = (_doubled("1x2xH100").compile() for _ in range(2))
    assert not first.compiled.was_kept
    assert second.compiled.was_kept
    assert second.as_text() == first.as_text()
    assert second.memory_analysis() == first.memory_analysis()


def test_a_limit_ends_the_compiler_and_the_next_program_gets_another() -> None:
    with pytest.raises(TimeoutError, match="double was to compile within 0 s"):
        _doubled("1x2xH100").compile(limit_seconds=0)
    assert _doubled("1x2xH100").compile().audit().ok


def test_a_device_that_the_compiler_does_not_know_is_quoted_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown = "gpu_device_info { cores: 1 }"
    monkeypatch.setattr(target, "gpu_proto", lambda kind: unknown)
    with pytest.raises(TargetError, match="double must compile for 1x2xH100, but its"):
        _doubled("1x2xH100").compile()


def test_a_users_own_jax_does_not_see_the_compilers() -> None:
    code = """
import sys, jax
jax.devices()
assert not any("cuda12" in name for name in sys.modules)
"""
    own = {name: value for name, value in os.environ.items() if "JAX" not in name}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=own)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _doubled(cluster: str) -> Any:
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    return parallel(double, cluster, mesh="x:2").lower(
        jax.ShapeDtypeStruct((16, 8), jnp.float32)
    )


@pytest.mark.parametrize(
    ("cluster", "kernel"),
    [("1x8xH100", "__cudnn$fmhaSoftmaxBackward"), ("v5e:2x4", "tpu_custom_call")],
)
def test_fused_attention_is_a_kernel_of_the_target(cluster: str, kernel: str) -> None:
    """And scores are nowhere in the program."""
    seq_len, heads = 1024, 3
    sizes: dict[str, Any] = {"num_layers": 1, "seq_len": seq_len, "hidden": 384}
    workload = build(
        "gpt", compute_dtype="bfloat16", batch_size=8, num_heads=heads, **sizes
    )
    step = parallel(workload.step, cluster, mesh="x:8", attention="fused")
    program = step.lower(*workload.abstract()).compile()
    program.audit().raise_if_wrong()
    assert kernel in program.as_text()
    assert f"{seq_len},{seq_len}]" not in program.as_text()
