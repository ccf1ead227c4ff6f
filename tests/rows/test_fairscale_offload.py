"""Row FSC-5 of FairScale: activations and models in the host's memory.

A checkpoint_wrapper with offload is a `jax.checkpoint` policy in the step, Pipe is row
GPI-2, and OffloadModel is `offload="state"`. Memory of CPU devices is the host's: what
is moved is seen in programs lowered for GPUs and in the memory kinds of arrays.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import autopar
from autopar.steps.lowered_step import Compiled
from tests.rows.fixtures import Case, random
from tests.rows.running import homes, run_as_planned, run_pipeline_as_planned

NUM_LAYERS, BATCH, WIDTH = 8, 1_024, 64
RESIDUAL_BYTES = NUM_LAYERS * BATCH * WIDTH * 4
OFFLOADING = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["hidden"],
    offload_src="device",
    offload_dst="pinned_host",
)


def scanned(policy: Any = None) -> Case:
    """Eight layers as a loop, each in a checkpoint_wrapper if a policy is given."""

    def layer(hidden: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        hidden = checkpoint_name(jnp.tanh(hidden @ kernel), "hidden")
        return jnp.sin(hidden) * jnp.cos(hidden), None

    body = jax.checkpoint(layer, policy=policy) if policy else layer

    def step(kernels: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(kernels: jax.Array) -> jax.Array:
            final, _ = jax.lax.scan(body, x, kernels)
            return jnp.mean(final**2)

        value, grad = jax.value_and_grad(loss)(kernels)
        return kernels - 0.1 * grad, value

    kernels = random(0, NUM_LAYERS, WIDTH, WIDTH, scale=0.2)
    return Case(step, (kernels, random(1, BATCH, WIDTH)))


def unrolled() -> Case:
    """The same layers one after the other."""

    def layer(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sin(checkpoint_name(jnp.tanh(hidden @ kernel), "hidden"))

    wrapped = jax.checkpoint(layer, policy=OFFLOADING)

    def step(kernels: list[jax.Array], x: jax.Array) -> Any:
        def loss(kernels: list[jax.Array]) -> jax.Array:
            hidden = x
            for kernel in kernels:
                hidden = wrapped(hidden, kernel)
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(kernels)
        return [p - 0.1 * g for p, g in zip(kernels, grads, strict=True)], value

    kernels = [random(i, WIDTH, WIDTH, scale=0.2) for i in range(4)]
    return Case(step, (kernels, random(9, BATCH, WIDTH)))


def compiled(case: Case, **options: Any) -> Compiled:

    return run_as_planned(
        autopar.parallelize(case.step, mesh="data:8", **options), *case.args
    )


def placements(step: Compiled) -> list[tuple[str, str]]:
    """Where the program, lowered for GPUs, puts what: memory and type, in order."""
    program = step.lowered.program
    traced = program.jitted.trace(program.constants, *program.argument_types)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    pattern = r'annotate_device_placement.*placement = "(\w+)".*\(tensor<([^>]*)>\) ->'
    return re.findall(pattern, text)


def temp_bytes(step: Compiled) -> int:
    stats: Any = step.compiled.memory_analysis()
    return stats.temp_size_in_bytes


def test_fsc_5_device_memory_falls_by_more_than_what_is_offloaded() -> None:
    """What the wrapper makes again goes, too; on a CPU the host's part stays in temp,
    as in the user's own program."""
    plain, wrapped = (compiled(scanned(each)) for each in (None, OFFLOADING))
    shard = RESIDUAL_BYTES // 8  # of eight devices
    on_host = f"{BATCH // 8}x{WIDTH}xf32"
    found = placements(wrapped)
    assert ("pinned_host", on_host) in found and ("device", on_host) in found
    assert not placements(plain)
    assert temp_bytes(plain) - temp_bytes(wrapped) >= shard


def test_fsc_5_without_a_loop_each_layer_goes_and_comes() -> None:
    found = placements(compiled(unrolled()))
    on_host = f"{BATCH // 8}x{WIDTH}xf32"
    assert found.count(("pinned_host", on_host)) == 4
    assert found.count(("device", on_host)) == 4


@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_fsc_5_microbatches_offload_their_own(num_microbatches: int) -> None:
    step = compiled(
        scanned(OFFLOADING),
        method=autopar.ShardParallel(num_microbatches),
    )
    on_host = f"{BATCH // 8 // num_microbatches}x{WIDTH}xf32"
    assert {("pinned_host", on_host), ("device", on_host)} <= set(placements(step))


def test_fsc_5_stages_of_a_pipe_hand_their_residuals_to_the_host() -> None:
    """Four layers a stage; GPipe keeps the residuals of all microbatches."""
    number = 4
    saving = jax.checkpoint_policies.save_only_these_names("hidden")
    before, after = scanned(saving), scanned(OFFLOADING)
    method = autopar.PipelineParallel(2, number, "gpipe")
    plan = autopar.parallelize(before.step, method=method).plan(*before.args)
    step = autopar.parallelize(after.step, method=method)
    pipe = run_pipeline_as_planned(step, *after.args)
    programs = pipe.lowered.step.pipeline.lowered
    forward = [each for each in programs if each.planned.cut.kind == "forward"]
    for each in forward:
        kinds = [home.memory_kind for home in each.program.output_shardings]
        assert kinds.count("pinned_host") == 1
    assert len(forward) == 2
    residuals = RESIDUAL_BYTES // 2 // 4  # a stage has half the layers, on 4 devices
    one = residuals // number
    peaks = plan.stages.peak_bytes, pipe.plan.stages.peak_bytes
    for saved, offloaded in zip(*peaks, strict=True):
        assert residuals - 1.5 * one <= saved - offloaded <= residuals


def test_fsc_5_an_offloaded_model_is_on_the_device_within_steps_only() -> None:
    case = unrolled()
    step = compiled(case, offload="state")
    plan = step.plan.sharding
    memory = {each.path: each.memory for each in plan.inputs}
    assert {m for path, m in memory.items() if path.startswith("kernels")} == {"host"}
    assert memory["x"] == "device" and plan.state_bytes() == 0
    assert homes(step.plan).keys() == memory.keys()
    parallel = autopar.parallelize(case.step, mesh="data:8", offload="state")
    kernels, x = jax.tree.map(jnp.copy, case.args)
    expected = case.args[0]
    for _ in range(3):
        kernels, _ = parallel(kernels, x)
        expected, _ = jax.jit(case.step)(expected, x)
    assert {leaf.sharding.memory_kind for leaf in kernels} == {"pinned_host"}
    for got, want in zip(kernels, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
