"""Programs of many kinds, none written for this library, run as on one device."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autopar.api import parallelize
from autopar.methods.methods import PipelineParallel
from tests.marks import slow

from . import varied_networks as networks
from . import varied_steps as steps

PROGRAMS = (
    networks.llama,
    networks.unet,
    networks.moe_scatter,
    networks.ssm,
    networks.fft_mixer,
    networks.decode,
    networks.odd_sizes,
    steps.gan,
    steps.ppo,
    steps.clip_loss,
    steps.ensemble,
    steps.maml,
    steps.bf16_mixed,
    steps.lora_frozen,
    steps.muon,
)
MESHES = ("x:8", "a:2;b:4")
RTOL = 1e-4
# bfloat16 rounds to 2**-8, and a sum may be rounded on every device.
RTOL_BY_PROGRAM = {steps.bf16_mixed: 2e-2}

MakeProgram = Callable[[], steps.Program]


SLOW = (
    networks.ssm,
    steps.gan,
    steps.ppo,
    steps.clip_loss,
    steps.ensemble,
    steps.lora_frozen,
    steps.muon,
)


def every_case() -> Iterator[Any]:
    """Every program on every mesh; one mesh of most, dealt in turn, is not slow."""
    for i, program in enumerate(PROGRAMS):
        for j, mesh in enumerate(MESHES):
            is_quick = j == i % len(MESHES) and program not in SLOW
            marks = [] if is_quick else [pytest.mark.slow]
            yield pytest.param(
                program, mesh, marks=marks, id=f"{program.__name__}-{mesh}"
            )


def assert_values_are_those_of_one_device(
    got: Any, step: steps.Step, args: tuple[Any, ...], rtol: float = RTOL
) -> None:
    expected = jax.jit(step)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    leaves = jax.tree_util.tree_leaves_with_path(expected)
    for (path, want), actual in zip(leaves, jax.tree.leaves(got), strict=True):
        name = jax.tree_util.keystr(path)
        assert actual.dtype == want.dtype, name
        if not jnp.issubdtype(want.dtype, jnp.inexact):
            np.testing.assert_array_equal(actual, want, err_msg=name)
            continue
        atol = 0.1 * rtol * float(jnp.abs(want).max())
        np.testing.assert_allclose(actual, want, rtol, atol, err_msg=name)


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a step may donate."""
    return jax.tree.map(lambda leaf: leaf.copy(), args)


@pytest.mark.filterwarnings("ignore:Every device of")  # whose sizes none divides
@pytest.mark.parametrize(("program", "mesh"), every_case())
def test_an_unmodified_step_runs_as_on_one_device(
    program: MakeProgram, mesh: str
) -> None:
    step, args = program()
    compiled = parallelize(step, mesh=mesh).lower(*args).compile()
    compiled.audit().raise_if_wrong()
    got = compiled(*copies(args))
    rtol = RTOL_BY_PROGRAM.get(program, RTOL)
    assert_values_are_those_of_one_device(got, step, args, rtol)


@pytest.mark.parametrize("program", [networks.ssm, slow(networks.llama)])
def test_microbatches_of_an_unmodified_step(program: MakeProgram) -> None:
    step, args = program()
    parallel = parallelize(step, mesh="a:2;b:4", num_microbatches=2)
    compiled = parallel.lower(*args).compile()
    compiled.audit().raise_if_wrong()
    assert_values_are_those_of_one_device(compiled(*copies(args)), step, args)


@pytest.mark.slow
def test_a_pipeline_of_an_unmodified_step() -> None:
    step, args = networks.llama(num_layers=2)
    method = PipelineParallel(num_stages=2, num_microbatches=2)
    parallel = parallelize(step, method=method)
    got = parallel(*copies(args))
    assert_values_are_those_of_one_device(got, step, args)
    (pipelined,) = parallel._running()
    assert all(each.ok for each in pipelined.pipeline.audit())
