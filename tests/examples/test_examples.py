"""Every example prints the loss that it has without its decorator, on eight devices."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from flax import nnx

from autopar.api import ParallelFunction
from autopar.steps.lowered_pipeline import CompiledPipeline
from autopar.steps.lowered_step import Compiled

EXAMPLES = Path(__file__).parents[2] / "examples"
# The step of each, and what its framework would put in our decorator's place.
STEPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "flax_linen": ("train_step", jax.jit),
    "flax_nnx": ("train_step", nnx.jit),
    "flax_nnx_functional": ("train_step", jax.jit),
    "haiku_transform": ("update", jax.jit),
    "equinox_stateful": ("make_step", eqx.filter_jit),
    "equinox_filter_jit": ("make_step", lambda step: step),
    "optax_chains": ("train_step", lambda step: jax.jit(step, static_argnums=0)),
    "keras_stateless": ("train_step", jax.jit),
}


# Those of `make test`: frameworks whose steps no other test runs.
QUICK = {"flax_linen", "haiku_transform"}


class Compiling:
    """A parallelized step that keeps the compiled step of each of its plans."""

    def __init__(self, step: ParallelFunction) -> None:
        self._step = step
        self.compiled: dict[int, Compiled | CompiledPipeline] = {}

    def __call__(self, *args: Any) -> Any:
        compiled = self._step.lower(*args).compile()
        self.compiled[id(compiled.plan)] = compiled
        return self._step(*args)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arrays(tree: Any) -> dict[str, np.ndarray]:
    """By path; keys as their bits."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    is_key = jax.dtypes.prng_key
    return {
        jax.tree_util.keystr(path): np.asarray(
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, is_key)
            else leaf
        )
        for path, leaf in leaves
    }


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(STEPS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in STEPS
    ],
)
def test_an_example_trains_as_without_its_decorator(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, (step_name, undecorated) = load(name), STEPS[name]
    step = Compiling(getattr(module, step_name))
    monkeypatch.setattr(module, step_name, step)
    results = arrays(module.main())
    assert "on 8 devices: loss " in capsys.readouterr().out

    for compiled in step.compiled.values():
        compiled.audit().raise_if_wrong()
        assert compiled.plan.predicted.split_flops_fraction > 0.9

    module = load(name)  # Keras keeps the trained variables in its model
    function = getattr(module, step_name).__wrapped__
    monkeypatch.setattr(module, step_name, undecorated(function))
    expected = arrays(module.main())
    assert results.keys() == expected.keys()
    for path, theirs in expected.items():
        assert results[path].dtype == theirs.dtype, path
        largest = float(abs(theirs).max(initial=0))
        np.testing.assert_allclose(
            results[path], theirs, rtol=1e-4, atol=1e-5 * largest, err_msg=path
        )


@pytest.mark.slow
def test_an_example_runs_as_its_first_lines_say() -> None:
    env = {**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "8"}
    path = EXAMPLES / "flax_linen.py"
    assert f"JAX_NUM_CPU_DEVICES=8 python examples/{path.name}" in path.read_text()
    done = subprocess.run(
        [sys.executable, path], cwd=EXAMPLES.parent, env=env, capture_output=True
    )
    assert b"step 4 on 8 devices: loss " in done.stdout, done.stderr
