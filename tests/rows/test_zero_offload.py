"""Row ZER-4 of DeepSpeed: the optimizer's state in the host's memory, and in files."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.lowering.memory_use import MemoryUse
from autopar.steps.lowered_step import Compiled
from tests.rows.fixtures import Case
from tests.rows.running import run_as_planned
from tests.rows.test_fairscale import f2

STATE_BYTES = 1_048_576  # of the parameters; the two moments are as large each
BATCH_BYTES = 2 * 64 * 256 * 4
NUM_MOMENTS = 2 * 4


def adam() -> Case:
    """F2 with Adam, whose large epsilon keeps rounding from becoming whole steps."""
    return f2(optax.adam(1e-2, eps=1e-2))


def kinds(state: Any) -> list[str | None]:
    """Whose memory each moment lies in; the step's counter is left out."""
    _, moments = state
    leaves = [leaf for leaf in jax.tree.leaves(moments) if leaf.ndim]
    return [leaf.sharding.memory_kind for leaf in leaves]


@pytest.fixture(scope="module")
def offloaded() -> Compiled:
    case = adam()
    step = autopar.parallelize(
        case.step,
        mesh="data:8",
        method=autopar.DataParallel(),
        offload="optimizer_state",
    )
    return run_as_planned(step, *case.args)


def test_zer_4_state_is_at_the_host_before_and_after_the_step(
    offloaded: Compiled,
) -> None:
    case = adam()
    state, x, y = jax.tree.map(jnp.copy, case.args)
    homes = offloaded.lowered.program.shardings
    leaves, tree = jax.tree.flatten(state)
    placed = jax.device_put(leaves, list(homes[: len(leaves)]))
    state = jax.tree.unflatten(tree, placed)
    assert kinds(state) == ["pinned_host"] * NUM_MOMENTS
    after, _ = offloaded(state, x, y)
    assert kinds(after) == ["pinned_host"] * NUM_MOMENTS
    assert {leaf.sharding.memory_kind for leaf in after[0].values()} == {"device"}


def test_zer_4_the_device_holds_the_parameters_only(offloaded: Compiled) -> None:
    """And the batch's eighth, and Adam's counter of four bytes."""
    plan = offloaded.plan.sharding
    assert plan.host_bytes() == plan.predicted.host_bytes == 2 * STATE_BYTES
    held = [i for i in plan.inputs if i.memory == "device" and i.role == "state"]
    assert sum(i.bytes for i in held if i.shape) == STATE_BYTES
    memory = MemoryUse.of(offloaded.compiled, offloaded.lowered.program.host_bytes)
    assert memory.argument_bytes == STATE_BYTES + BATCH_BYTES // 8 + 4


def test_zer_4_programs_say_so(offloaded: Compiled) -> None:
    """Two placements a leaf, lowered for GPUs; homes in host memory space S(5).

    For CPU devices, whose memory is the host's, JAX leaves out what only comes in.
    """
    program = offloaded.lowered.program
    traced = program.jitted.trace(program.constants, *program.argument_types)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    pattern = r'(%\S+) = .*annotate_device_placement\((%\S+)\).*placement = "(\w+)"'
    found = re.findall(pattern, lowered)
    came_in = [kind for _, source, kind in found if "#" not in source]
    went_out = [kind for _, source, kind in found if "#" in source]
    assert came_in == ["device"] * NUM_MOMENTS
    assert went_out.count("pinned_host") == NUM_MOMENTS
    layout = offloaded.as_text().splitlines()[0]  # of arguments and results
    assert layout.count("S(5)") == 2 * NUM_MOMENTS


def test_zer_4_moving_is_priced_and_told(
    offloaded: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted = offloaded.plan.predicted
    bandwidth = autopar.Cluster.local().device.host_memory_bandwidth
    assert predicted.host_seconds == pytest.approx(4 * STATE_BYTES / bandwidth)
    parts = predicted.compute_seconds + predicted.collective_seconds
    assert predicted.step_seconds == pytest.approx(parts + predicted.host_seconds)
    offloaded.plan.explain()
    text = capsys.readouterr().out
    assert "host memory" in text
    assert "on the host" in text


def test_zer_4_with_state_in_eighths_transfers_are_eighths() -> None:
    case = adam()
    step = autopar.parallelize(
        case.step,
        mesh="data:8",
        method=autopar.Zero(stage=1),
        offload="optimizer_state",
    )
    plan = run_as_planned(step, *case.args).plan
    assert plan.predicted.host_bytes == 2 * STATE_BYTES // 8


def test_zer_4_a_plan_file_keeps_the_places(
    offloaded: Compiled, tmp_path: Path
) -> None:
    case = adam()
    offloaded.plan.save(tmp_path / "plan.json")
    plan = autopar.Plan.load(tmp_path / "plan.json")
    assert plan.sharding == offloaded.plan.sharding
    run_as_planned(autopar.parallelize(case.step, plan=plan), *case.args)


def test_zer_4_losses_are_equal_with_moments_in_files(tmp_path: Path) -> None:
    """The stand-in for NVMe: between steps the moments are files, not arrays."""
    case = adam()
    step = autopar.parallelize(case.step, mesh="data:8", method=autopar.Zero(stage=1))
    whole = jax.jit(case.step)
    (params, moments), x, y = jax.tree.map(jnp.copy, case.args)
    expected = case.args[0]
    store = autopar.MemmapStore(tmp_path)
    for _ in range(5):
        moments = store.keep(moments)
        held = [leaf for leaf in jax.tree.leaves(moments) if leaf.ndim]
        assert all(isinstance(leaf, np.memmap) for leaf in held)
        (params, moments), loss = step((params, moments), x, y)
        expected, want = whole(expected, x, y)
        np.testing.assert_allclose(loss, want, rtol=1e-5)
    files = [path.stat().st_size for path in tmp_path.iterdir()]
    assert sum(files) == 2 * STATE_BYTES
