"""`autopar bench`: what it runs, keeps, compares and says of mistakes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from autopar.cli import main
from benchmarks import running_suites, suites
from benchmarks.request import Case, Request
from benchmarks.results import Machine, Result, ResultFile
from benchmarks.step_time import BASELINES

ROOT = Path(__file__).parents[2]
MACHINE = Machine("here", "x86_64", 2, "3.11.0", "0.10.2")
BEFORE = Result("plan", "mlp x:8", {"peak_bytes": 1000.0}, {"plan_seconds": 1.0})

OWN = """
import jax, jax.numpy as jnp

def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"])
    return jnp.mean((hidden @ params["down"] - batch["x"]) ** 2)

def train_step(params, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

def examples():
    params = {"up": jax.ShapeDtypeStruct((32, 64), jnp.float32),
              "down": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
    return params, {"x": jax.ShapeDtypeStruct((16, 32), jnp.float32)}

def for_autopar():
    return train_step, examples()
"""


@pytest.fixture(autouse=True)
def _caches_are_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command switches caches off for its process."""
    for name, value in (
        ("AUTOPAR_CACHE_DIR", "off"),
        ("JAX_ENABLE_COMPILATION_CACHE", "true"),
    ):
        monkeypatch.setenv(name, os.environ.get(name, value))
    is_on = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009
    yield
    jax.config.update("jax_enable_compilation_cache", is_on)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, by its name."""
    (tmp_path / "own_training.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_training", raising=False)
    return "own_training"


def run(*args: str) -> int:
    """The exit code; 0 if none was raised."""
    try:
        main(args)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def file(*results: Result) -> ResultFile:
    return ResultFile(MACHINE, results)


def test_help_lists_the_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--help") == 0
    printed = capsys.readouterr().out
    for name in (*suites.SUITES, "all", "compare"):
        assert f"\n  {name}" in printed
    assert "..." not in printed.split("Commands:")[1]  # each in one line


def test_the_command_compares_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    file(BEFORE).save(paths[0])
    file(replace(BEFORE, values={"peak_bytes": 2000.0})).save(paths[1])
    assert run("bench", "compare", str(paths[0]), str(paths[0])) == 0
    assert run("bench", "compare", *map(str, paths)) == 1
    assert "REGRESSION plan mlp x:8: peak_bytes" in capsys.readouterr().out
    assert run("bench", "compare", *map(str, reversed(paths))) == 0
    assert "better: plan mlp x:8: peak_bytes" in capsys.readouterr().out


def test_planning_is_measured_kept_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("results.json", "results.html")]
    written = [f"--json={paths[0]}", f"--html={paths[1]}"]
    asked = ["mlp", "--mesh=x:8", "--mesh=x:4;y:2", "--set=num_layers=1"]
    assert run("bench", "plan", *asked, *written) == 0
    found = ResultFile.load(paths[0]).results
    assert [each.case for each in found] == ["mlp x:8", "mlp x:4;y:2"]
    for each in found:
        assert each.values["collective_bytes"] > 0
        assert 0 < each.timed["solver_seconds"] < each.timed["plan_seconds"]
        assert each.values["choices"] > each.values["nodes"] > 0
    assert "<svg" in paths[1].read_text()
    assert "plan 2/2: mlp x:4;y:2" in capsys.readouterr().err
    assert run("bench", "plan", *asked, f"--against={paths[0]}") in (0, 1)
    assert "numbers compared" in capsys.readouterr().out


def test_no_plan_is_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path))
    assert run("bench", "plan", "mlp", "--mesh=x:8", "--set=num_layers=1") == 0
    assert not list(tmp_path.iterdir())


def test_methods_and_meshes_are_planned_beside_each_other() -> None:
    asked = Request(
        targets=("mlp",),
        meshes=("x:8", "x:4;y:2"),
        methods=("Zero(stage=1)", "DataParallel()"),
        settings={"num_layers": 1},
    )
    found = list(suites.run(["plan"], asked))
    assert [each.case for each in found] == [
        f"mlp {mesh} {method}"
        for mesh in asked.meshes or ()
        for method in asked.methods
    ]
    first, second = (each.values["peak_bytes"] for each in found[:2])
    assert first < second


def test_no_case_of_quality_comes_twice() -> None:
    cases = list(suites.SUITES["quality"](Request(targets=("mlp",))))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert sum("solver" in name for name in names) == 2
    assert sum(name.endswith("Megatron") for name in names) == 1
    assert sum(name.endswith("3-D") for name in names) == 1


def test_a_pipeline_is_simulated_on_a_cluster() -> None:
    asked = Request(
        targets=("mlp",),
        settings={"num_layers": 2},
        cluster="1x4xV100",
        methods=("PipelineParallel(2, 4)", "DataParallel()"),
    )
    staged, whole = suites.run(["simulate"], asked)
    assert staged.case == "mlp 1x4xV100 PipelineParallel(2, 4)"
    assert "2 stages on" in staged.note and "1f1b" in staged.note
    assert 0 < staged.values["bubble_fraction"] < 1
    assert whole.values["bubble_fraction"] == 0
    parts = ("compute_seconds", "collective_seconds")
    assert whole.values["step_seconds"] == pytest.approx(
        sum(whole.values[name] for name in parts)
    )


@pytest.mark.parametrize("is_step", [False, True])
def test_a_step_of_ones_own_is_run_beside_jit(
    is_step: bool, own_module: str, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    named = (
        [f"{own_module}:train_step", f"--args={own_module}:examples"]
        if is_step
        else [f"{own_module}:for_autopar"]
    )
    asked = ["--mesh=x:8", "--rounds=2", f"--json={path}"]
    assert run("bench", "step", *named, *asked) == 0
    found = ResultFile.load(path).results
    cases = [f"{named[0]} x:8 {name}" for name in ("autopar", *BASELINES)]
    assert [each.case for each in found][: len(cases)] == cases
    for each in found:
        assert each.timed["median_seconds"] > 0 and "spread" in each.timed


def test_a_step_of_ones_own_is_planned_and_compiled(own_module: str) -> None:
    asked = Request(targets=(f"{own_module}:for_autopar",), methods=("Zero(stage=3)",))
    (planned,) = suites.run(["plan"], replace(asked, cluster="2x8xH100"))
    assert planned.values["modelled_seconds"] > 0
    asked = replace(asked, meshes=("x:8",))
    solver, zero = suites.run(["quality"], asked)
    for each in (solver, zero):
        assert each.values["lowered_bytes"] == each.values["collective_bytes"]


class TestWhenItGoesWrong:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("plan", "--model=gtp"), "did you mean 'gpt'"),
            (("plan", "gtp"), "did you mean 'gpt'"),
            (("plan", "mlp", "--set=num_layer=2"), "did you mean 'num_layers'"),
            (("plan", "--model=mlp", "--cluster=8x8xH10"), "did you mean"),
            (("plan", "mlp", "--mesh=x:7"), "must use every device"),
            (("plan", "mlp", "--method=Zeroo(3)"), "a method is one of"),
            (("plan", "mlp", "--devices=many"), "or 'here'"),
            (("plan", "--args=a:b"), "0 steps or models are named"),
            (("plan", "nowhere_at_all:step"), "No module named"),
            (("step", "mlp", "--rounds=0"), "--rounds must be 1 or more"),
            (("plan", "--model=mlp", "--json=nowhere/x.json"), "make it first"),
            (("plan", "--model=mlp", "--html=."), "name another"),
            (("plan", "--model=mlp", "--against=nowhere.json"), "no file nowhere.json"),
            (
                ("simulate", "nowhere.csv"),
                "must be a CSV file, but nowhere.csv is none",
            ),
            (("simulate", "nowhere.csv", "mlp"), "are simulated apart"),
        ],
    )
    def test_mistakes_name_the_remedy(
        self, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run("bench", *args) == 1
        assert message in capsys.readouterr().err

    def test_a_file_that_is_only_tried_is_not_left(self, tmp_path: Path) -> None:
        path = tmp_path / "results.json"
        assert run("bench", "plan", "gtp", f"--json={path}") == 1
        assert not path.exists()

    def test_a_case_that_fails_does_not_take_the_others_with_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails() -> Iterator[Result]:
            yield BEFORE
            raise RuntimeError("no hosts")

        cases = [Case("mlp x:8", fails), Case("b", lambda: [replace(BEFORE, case="b")])]
        monkeypatch.setattr(suites, "SUITES", {"plan": lambda _: iter(cases)})
        path = tmp_path / "results.json"
        assert run("bench", "all", f"--json={path}") == 1
        found = ResultFile.load(path).results
        assert [each.case for each in found] == ["mlp x:8", "mlp x:8", "b"]
        assert found[1].failure == "RuntimeError: no hosts"

    def test_what_was_found_is_kept_when_a_key_is_pressed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def pressed() -> Iterator[Result]:
            raise KeyboardInterrupt
            yield

        cases = [Case("a", lambda: [BEFORE]), Case("b", pressed)]
        monkeypatch.setattr(suites, "SUITES", {"plan": lambda _: iter(cases)})
        path = tmp_path / "results.json"
        assert run("bench", "all", f"--json={path}") == 130
        assert ResultFile.load(path).results == (BEFORE,)

    def test_steps_on_ray_that_hang_are_ended(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(running_suites, "RAY_SECONDS", 0.3)
        with pytest.raises(RuntimeError, match="must end within 0.3 s, but were still"):
            list(suites.run(["ray"], Request(small=True)))

    def test_an_unknown_suite_is_named(self) -> None:
        with pytest.raises(ValueError, match="did you mean 'quality'"):
            list(suites.run(["qualty"], Request()))

    def test_an_installed_package_says_where_benchmarks_are(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr("autopar.cli._CHECKOUT", tmp_path)
        with pytest.raises(SystemExit) as caught:
            main(("bench", "plan", "--small"))
        assert caught.value.code == 1
        assert "run it from a checkout" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_running_command_is_stopped_by_a_signal(
    sent: signal.Signals, tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    command = ["-m", "autopar", "bench", "plan", "mlp", "gpt-39b", "--mesh=x:2;y:4"]
    with subprocess.Popen(
        [sys.executable, *command, f"--json={path}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "2/2" in line:
                break
        process.send_signal(sent)
        assert process.wait(60) == 130
    assert [each.case for each in ResultFile.load(path).results] == ["mlp x:2;y:4"]
