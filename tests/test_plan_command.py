"""`autopar plan`: what it takes for a step, what it compares, and what it refuses."""

import re
import sys
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.commands.plan_targets import find_step, parse_method, parse_settings

TRAIN = """
import jax, jax.numpy as jnp
import autopar

def step(state, x):
    loss, gradients = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state)
    return state - gradients, loss

arguments = (
    jax.ShapeDtypeStruct((64, 64), jnp.float32),
    jax.ShapeDtypeStruct((128, 64), jnp.float32),
)

def for_autopar():
    return step, arguments

class Workload:
    def step(self, state, x):
        return step(state, x)

    def abstract(self):
        return arguments

workload = Workload()

def make_workload():
    return workload

def parallelized():
    return autopar.parallelize(step), arguments

def as_list():
    return step, list(arguments)
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a fresh module in the current folder."""
    name = f"planned_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(*args: str) -> int:
    """The exit code of `autopar plan`."""
    with pytest.raises(SystemExit) as caught:
        main(("plan", *args))
    return int(caught.value.code or 0)


@pytest.mark.parametrize("name", ["for_autopar", "workload", "make_workload"])
def test_a_target_is_a_step_with_its_arguments(train: str, name: str) -> None:
    found = find_step(f"{train}:{name}")
    state, x = found.args
    assert (state.shape, x.shape) == ((64, 64), (128, 64))
    assert callable(found.step)


def test_a_plan_is_printed_beside_those_of_named_methods(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{train}:workload", "--cluster", "2x4xH100", "--out", "p.json") == 0
    seen = capsys.readouterr()
    assert "plan of step, for one step" in seen.out
    _, _, table = seen.out.partition("beside named methods")
    names = [line.split("  ")[0].strip() for line in table.splitlines()]
    for name in ("this plan", "DataParallel()", "Zero(stage=3)", "Megatron(tensor=4)"):
        assert name in names
    ratios = [float(ratio) for ratio in re.findall(r"s  +(\d+\.\d\d)  ", table)]
    assert len(ratios) == 7 and min(ratios) == ratios[0] == 1.0
    assert "written to p.json" in seen.out and Path("p.json").exists()
    assert "aligned shapes; tried x:8" in seen.err


def test_a_comparison_can_be_left_out(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{train}:for_autopar", "--no-compare", "--mesh", "a:8") == 0
    assert "named methods" not in capsys.readouterr().out


def test_a_parallelized_step_keeps_its_own_options(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{train}:parallelized") == 0
    assert "plan of step" in capsys.readouterr().out
    assert run(f"{train}:parallelized", "--mesh", "a:8") == 1
    assert "parallelized with its own, and got mesh" in capsys.readouterr().err


def test_a_method_is_written_as_in_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse_method("Auto") == autopar.Auto()
    assert parse_method("autopar.Zero(3)") == autopar.Zero(3)
    method = "PipelineParallel(num_stages=2, num_microbatches=4)"
    assert run("mlp", "--cluster", "2x4xV100", "--method", method) == 0
    printed = capsys.readouterr().out
    assert "2 on 2 submeshes of cluster 2x4xV100" in printed
    assert "4, exact, 1f1b" in printed and "named methods" not in printed


def test_a_model_of_the_checkout_goes_by_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = ("--set", "scan_layers=true", "--set", "num_layers=3")
    asked = ("--cluster", "8xH100", "--mesh", "x:8", "--no-compare")
    assert run("llama", *settings, *asked) == 0
    printed = capsys.readouterr().out
    assert "[3, 64, 32]" in printed  # the keys of three layers, stacked


def test_settings_are_values_by_name() -> None:
    texts = ["num_layers=4", "scan_layers=True", "remat=false", "loss=optax", "a=1,2"]
    assert parse_settings(texts) == {
        "num_layers": 4,
        "scan_layers": True,
        "remat": False,
        "loss": "optax",
        "a": (1, 2),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gtp",), "a target is MODULE:NAME, such as train:for_autopar, or a model"),
        (("gtp",), "did you mean 'gpt'"),
        (("gpt", "--args", "a:b"), "a model has its own example arguments"),
        (("gpt", "--set", "depth"), "a setting is NAME=VALUE"),
        (("gpt", "--set", "depth=3"), "but got 'depth'"),
        (("{}:for_autopar", "--set", "a=1"), "is a step of your own; leave out a"),
        (("{}:as_list",), "must be a tuple, one item for each argument"),
        (("{}:arguments",), "is not callable"),
        (("{}:for_autopar", "--budget", "much"), "much"),
        (("{}:for_autopar", "--microbatches", "3"), "3"),
        (("gpt", "--method", "Pipeline(4)"), "did you mean PipelineParallel?"),
        (("gpt", "--method", "Zero(stage=x)"), "is written as in Python"),
        (("gpt", "--method", "Zero(stag=3)"), "argument 'stag'"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    train: str,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(*(each.format(train) for each in arguments)) == 1
    printed = capsys.readouterr().err
    assert "error: " in printed and message in printed
    assert "Traceback" not in printed


def test_a_model_by_name_without_its_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [each for each in sys.modules if each.startswith("autopar.models")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ValueError, match=r"need the package 'optax'.*\[examples\]"):
        find_step("gpt-39b")
