"""Mistakes get an error that gives the rule, the value seen and the remedy."""

import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar

X = np.ones((16, 8), np.float32)


def double(x: jax.Array) -> jax.Array:
    return x * 2


def make_state() -> dict[str, jax.Array]:
    return {
        "w": jnp.ones((16, 8)),
        "momentum": jnp.zeros((16, 8)),
        "count": jnp.zeros((), jnp.int32),
    }


class TestOptions:
    @pytest.mark.parametrize(
        ("mesh", "message"),
        [
            ("x:16", "x:16 needs 16 and there are 8; use smaller axes, or -1"),
            ("x:2;y:3", "must use every device, but x:2;y:3 holds 6 of 8; use -1"),
            ("", "at least one axis, but got none; for a single device write 'x:1'"),
            ({}, "at least one axis, but got none"),
            ((), "at least one axis, but got none"),
            ("x:0;y:8", "size 1 or more, but 'x' has 0"),
            ("x:-1;y:3", "must divide the 8 devices, but their product is 3"),
            ("x:2;x:4", "must be distinct, but 'x' occurs 2 times"),
            ("x=8", "name:size pairs such as 'data:2;model:4', but 'x=8'"),
        ],
        ids=repr,
    )
    def test_meshes(self, mesh: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            autopar.parallelize(double, mesh=mesh)(X)

    def test_fewer_devices_than_the_mesh(self) -> None:
        step = autopar.parallelize(double, cluster=autopar.Cluster.preset("2x8xH100"))
        assert step.plan(X).sharding.mesh.size == 16
        with pytest.raises(ValueError, match=r"needs 16 devices, but .* has 8; .*plan"):
            step(X)

    @pytest.mark.parametrize(
        ("method", "message"),
        [
            (
                "auto",
                r"one of autopar.Auto\(\), .* or None, but got 'auto' of type str",
            ),
            (3, "but got 3 of type int"),
            (
                autopar.ShardParallel,
                r"the class ShardParallel; write ShardParallel\(\)",
            ),
        ],
        ids=repr,
    )
    def test_methods(self, method: Any, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            autopar.parallelize(double, method=method)

    def test_meshes_of_stages_that_are_searched_for(self) -> None:
        method = autopar.PipelineParallel(stage_meshes=["x:4", "x:4"])
        with pytest.raises(ValueError, match="give the number of stages"):
            autopar.parallelize(double, method=method)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"cluster": "8xH100"}, r"autopar.Cluster, but got '8xH100'; use .*preset"),
            ({"plan": "plan.json"}, r"but got 'plan.json' of type str; .*Plan.load"),
            ({"donate_argnums": "state"}, "positions, .* but got 'state'"),
            ({"static_argnums": 2.5}, "positions, .* but got 2.5"),
        ],
        ids=repr,
    )
    def test_options_of_another_type(
        self, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(TypeError, match=message):
            autopar.parallelize(double, **options)

    @pytest.mark.parametrize("option", ["static_argnums", "donate_argnums"])
    def test_positions_without_an_argument(self, option: str) -> None:
        message = f"`{option}` must be positions of arguments, but got 3 .* are x"
        with pytest.raises(ValueError, match=message):
            autopar.parallelize(double, **{option: 3})

    def test_an_argument_both_static_and_donated(self) -> None:
        with pytest.raises(ValueError, match="no buffer to donate, but 0 is in"):
            autopar.parallelize(double, static_argnums=0, donate_argnums=0)

    def test_what_is_not_a_function(self) -> None:
        with pytest.raises(TypeError, match="needs a function, but got 3 of type int"):
            autopar.parallelize(3)  # type: ignore[call-overload]
        unknown = "no option 'memory_budgt'; did you mean memory_budget"
        with pytest.raises(TypeError, match=unknown):
            autopar.parallelize(memory_budgt=3)  # type: ignore[call-overload]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("num_hosts = [", "must be a TOML file, but reading it failed"),
            ("name = 'mine'", "field `num_hosts` is missing"),
        ],
    )
    def test_cluster_files(self, text: str, message: str, tmp_path: Path) -> None:
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as error:
            autopar.Cluster.load(path)
        assert str(path) in str(error.value)

    def test_a_cluster_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="does not exist; for known devices use"):
            autopar.Cluster.load(tmp_path / "none.toml")

    def test_a_plan_of_another_function(self) -> None:
        plan = autopar.parallelize(lambda x: x + 1).plan(X)
        with pytest.raises(ValueError, match=r"(?s)must fit .*add.*mul.*Plan again"):
            autopar.parallelize(double, plan=plan)(X)


class TestArguments:
    def test_no_arguments_at_all(self) -> None:
        assert autopar.parallelize(lambda: jnp.arange(3).sum())() == 3
        assert autopar.parallelize(lambda empty: None)({}) is None

    @pytest.mark.parametrize(
        ("leaf", "kind"), [("train", "str"), (jnp.tanh, "PjitFunction"), ({1}, "set")]
    )
    def test_leaves_that_are_no_arrays(self, leaf: Any, kind: str) -> None:
        step = autopar.parallelize(lambda config, x: x)
        message = rf"but config\['mode'\] is .* of type {kind}; mark .*static_argnums"
        with pytest.raises(TypeError, match=message):
            step({"mode": leaf}, X)

    def test_arrays_of_what_jax_does_not_know(self) -> None:
        with pytest.raises(TypeError, match="not a valid JAX array type"):
            autopar.parallelize(double)(np.array(["a"]))

    def test_shapes_where_data_is_needed(self) -> None:
        step = autopar.parallelize(double)
        with pytest.raises(TypeError, match=r"runs on arrays, .* step.plan\(...\)"):
            step(jax.ShapeDtypeStruct((8,), jnp.float32))

    def test_static_arguments_that_cannot_be_hashed(self) -> None:
        step = autopar.parallelize(lambda x, sizes: x, static_argnums=1)
        for call in (lambda: step(X, [1]), lambda: step(X, sizes=[1])):
            with pytest.raises(
                ValueError, match=r"is \[1\] of type list; pass a tuple"
            ):
                call()

    def test_a_compiled_step_called_with_other_arguments(self) -> None:
        compiled = autopar.parallelize(double).lower(X).compile()
        with pytest.raises(TypeError, match=r"x is float32\[32,8\] .*; lower again"):
            compiled(np.ones((32, 8), np.float32))
        with pytest.raises(TypeError, match="the arguments it was lowered for"):
            compiled({"x": X})

    def test_a_donated_array_used_again(self) -> None:
        step = autopar.parallelize(lambda state, x: (state + x.sum(), x.mean()))
        first, _ = step(jnp.ones((8, 8)), X)
        step(first, X)
        message = r"Array has been deleted .* but state was .* donate_argnums=\(\)"
        with pytest.raises(RuntimeError, match=message):
            step(first, X)

    def test_a_failed_call_leaves_the_function_usable(self) -> None:
        step = autopar.parallelize(lambda state, x: (state + x.sum(), x.mean()))
        state, _ = step(jnp.zeros((8, 8)), X)
        with pytest.raises(TypeError):
            step(state, "x")
        with pytest.raises(TypeError):
            step(state)
        state, mean = step(state, X)
        assert (state[0, 0], mean) == (256, 1)


class TestState:
    """State that comes back as something else still works, untied, with a note."""

    @pytest.mark.parametrize(
        ("change", "note"),
        [
            (
                lambda state: {**state, "count": state["count"] + 1.5},
                r"state\['count'\] comes in as int32\[\] .* returned as float32\[\]",
            ),
            (
                lambda state: {**state, "w": state["w"].reshape(8, 16)},
                r"state\['w'\] comes in as float32\[16,8\] .* float32\[8,16\]",
            ),
            (
                lambda state: jax.tree.map(lambda x: x.astype(jnp.bfloat16), state),
                "state is returned otherwise; ",
            ),
            (
                lambda state: {"w": state["w"], "momentum": state["momentum"]},
                "state is returned otherwise; ",
            ),
            (
                lambda state: {**state, "extra": state["w"]},
                "state is returned otherwise; ",
            ),
            (
                lambda state: tuple(state.values()),
                "state is returned otherwise; ",
            ),
        ],
        ids=["dtype", "shape", "all dtypes", "one less", "one more", "a tuple"],
    )
    def test_it_is_named_and_planned_untied(
        self,
        change: Callable[[Any], Any],
        note: str,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def fun(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            return change({**state, "w": state["w"] + x}), x.sum()

        step = autopar.parallelize(fun)
        with caplog.at_level(logging.WARNING, "autopar"):
            actual = step(make_state(), X)
        expected = jax.jit(fun)(make_state(), X)
        assert jax.tree.all(jax.tree.map(np.array_equal, actual, expected))
        assert re.search(note, caplog.text)
        assert "planned untied and not donated. Return it" in caplog.text

    def test_state_that_is_as_it_should_be_gets_no_note(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fun(state: Any, x: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            return {**state, "w": state["w"] + x}, {"sum": x.sum(), "mean": x.mean()}

        with caplog.at_level(logging.WARNING, "autopar"):
            autopar.parallelize(fun)(make_state(), X)
        assert not caplog.records


class TestTheFunctionsOwnErrors:
    def test_they_pass_through_with_their_own_traceback(self) -> None:
        error = KeyError("mine")

        def inner() -> None:
            raise error

        def fun(x: jax.Array) -> jax.Array:
            inner()
            return x

        with pytest.raises(KeyError) as caught:
            autopar.parallelize(fun)(X)
        assert caught.value is error
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert names[-2:] == ["fun", "inner"]

    def test_errors_of_jax_point_at_the_users_line(self) -> None:
        def fun(x: jax.Array) -> jax.Array:
            return x @ x

        with pytest.raises(TypeError, match="dot_general") as caught:
            autopar.parallelize(fun)(X)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert ("fun", __file__) in [(f.name, f.filename) for f in frames]

    def test_wrong_numbers_of_arguments(self) -> None:
        step = autopar.parallelize(double)
        with pytest.raises(TypeError, match=r"double\(\) missing 1 required"):
            step()
        with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
            step(X, y=1)

    def test_concrete_values_are_not_there_while_tracing(self) -> None:
        step = autopar.parallelize(lambda x: x if x.sum() > 0 else -x)
        with pytest.raises(jax.errors.TracerBoolConversionError):
            step(X)

    def test_side_effects_that_cannot_be_planned_name_their_line(self) -> None:
        def fun(x: jax.Array) -> jax.Array:
            jax.debug.print("{}", x.sum(), ordered=True)
            return x

        message = r"test_bad_input.py:\d+.*\(.*fun\) has Ordered.*Write ordered=False"
        with pytest.raises(NotImplementedError, match=message):
            autopar.parallelize(fun)(X)
