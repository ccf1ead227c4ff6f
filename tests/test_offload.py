"""State in the host's memory: who may be there, and that it comes and goes."""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cli import main
from autopar.planner.step_variants import optimizer_state
from tests.rows.fixtures import Case
from tests.rows.named_plans import graph_of
from tests.rows.test_fairscale import f2


@cache
def adam() -> Case:
    return f2(optax.adam(1e-2, eps=1e-2))


TARGET = """
import optax
from tests.rows.test_fairscale import f2

def target():
    case = f2(optax.adam(1e-2))
    return case.step, case.args
"""


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


@cache
def offloaded() -> autopar.ParallelFunction:
    """One plan and one program for all tests."""
    return autopar.parallelize(adam().step, mesh="data:8", offload="optimizer_state")


def test_only_what_the_update_reads_may_go() -> None:
    graph = graph_of(adam())
    found = {graph.inputs[i].path for i in optimizer_state(graph)}
    assert found == {
        f"state[1][0].{moment}['kernel{i}']"
        for moment in ("mu", "nu")
        for i in range(4)
    }


def test_arrays_of_the_device_are_moved_at_the_first_call() -> None:
    case = adam()
    step = offloaded()
    state, loss = step(*jax.tree.map(jnp.copy, case.args))
    assert kinds(state[0]) == {"device"}
    assert kinds(state[1]) == {"pinned_host"}
    expected, want = jax.jit(case.step)(*case.args)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for got, wanted in zip(
        jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_init_makes_state_where_it_lies() -> None:
    case = adam()
    state, x, y = case.args

    def init() -> Any:
        return jax.tree.map(jnp.zeros_like, state)

    step = offloaded()
    made = step.init(init, batch=(x, y))
    assert kinds(made[0]) == {"device"}
    assert kinds(made[1]) == {"pinned_host"}


def test_a_checkpoint_comes_back_to_the_host(tmp_path: Path) -> None:
    case = adam()
    state, x, y = case.args
    step = offloaded()
    state, _ = step(*jax.tree.map(jnp.copy, (state, x, y)))
    autopar.save(tmp_path / "state", state)
    like = step.abstract_state(
        lambda: jax.tree.map(jnp.zeros_like, case.args[0]), batch=(x, y)
    )
    restored = autopar.restore(tmp_path / "state", like)
    assert kinds(restored[1]) == {"pinned_host"}
    for got, want in zip(
        jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_auto_leaves_state_alone_that_fits() -> None:
    case = adam()
    plan = autopar.parallelize(case.step, mesh="data:8", offload="auto").plan(
        *case.args
    )
    assert plan.predicted.host_bytes == 0


def test_the_command_line_plans_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "offload_plan_target.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = ("--remat", "full", "--offload", "optimizer_state", "--no-compare")
    with pytest.raises(SystemExit) as caught:
        main(("plan", "offload_plan_target:target", "--cluster", "8xH100", *options))
    assert not caught.value.code
    seen = capsys.readouterr().out
    assert "host memory" in seen
    assert "full: what the backward pass makes again" in seen


def test_without_such_state_it_is_refused() -> None:
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    step = autopar.parallelize(double, offload="optimizer_state")
    with pytest.raises(ValueError, match="only the update reads"):
        step.plan(jnp.ones((8, 8)))


def test_what_cannot_be_had_is_refused() -> None:
    case = adam()
    with pytest.raises(ValueError, match="'auto' or 'optimizer_state'"):
        autopar.parallelize(case.step, offload="everything")


def test_a_store_writes_over_its_files_and_leaves_scalars(tmp_path: Path) -> None:
    store = autopar.MemmapStore(tmp_path)
    sharded = jax.device_put(
        jnp.arange(64.0, dtype=jnp.bfloat16).reshape(8, 8),
        jax.sharding.NamedSharding(
            jax.make_mesh((8,), ("x",)), jax.sharding.PartitionSpec(None, "x")
        ),
    )
    first = store.keep({"a": sharded, "n": 3, "key": jax.random.key(0)})
    np.testing.assert_array_equal(first["a"], sharded)
    assert isinstance(first["a"], np.memmap)
    assert first["n"] == 3
    second = store.keep({"a": sharded + 1})
    assert second["a"] is first["a"]
    np.testing.assert_array_equal(second["a"], sharded + 1)
    assert len(list(tmp_path.iterdir())) == 1
