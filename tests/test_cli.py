"""The command line: what it prints, writes, and how it fails."""

import sys
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.commands.doctor import Check, check_solver, run_checks
from autopar.steps.parallel_plan import Plan

TRAIN = """
import jax, jax.numpy as jnp

def step(state, x):
    loss, gradients = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state)
    return state - gradients, loss

arguments = (
    jax.ShapeDtypeStruct((64, 64), jnp.float32),
    jax.ShapeDtypeStruct((128, 64), jnp.float32),
)

def for_autopar():
    return step, arguments

def wrong():
    return step

def broken():
    return {}["absent"]
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a fresh module in the current folder."""
    name = f"train_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(*args: str) -> int:
    """The exit code."""
    with pytest.raises(SystemExit) as caught:
        main(args)
    return int(caught.value.code or 0)


def test_help_lists_the_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    printed = capsys.readouterr().out
    for command in ("demo", "plan", "calibrate", "explain", "diff", "doctor"):
        assert f"\n  {command}" in printed


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("autopar 0.")


def test_a_plan_for_a_cluster_that_is_not_here_is_written_and_read(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--cluster", "2x8xH100", "--mesh", "data:2;model:-1")
    assert run("plan", f"{train}:for_autopar", *options, "--output", "p.json") == 0
    printed = capsys.readouterr().out
    assert "plan of step, for one step" in printed
    assert "data:2;model:8 (16 devices), cluster 2x8xH100" in printed
    for answer in ("fits  ", "speed  ", "holds  ", "by line  ", "advice  "):
        assert f"\n{answer}" in printed
    assert Plan.load("p.json").sharding.mesh.size == 16

    assert run("explain", "p.json") == 0
    # All but what takes the step's trace, and the other plans.
    again = capsys.readouterr().out
    lines, known = (map(str.rstrip, text.splitlines()) for text in (again, printed))
    assert set(lines) <= set(known)


def test_step_and_arguments_may_be_named_apart(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--args", f"{train}:arguments", "--cluster", "8xH100", "--operators")
    assert run("plan", f"{train}:step", *options) == 0
    assert "operators: the factor each axis splits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("{}:wrong", (), "must return (step, args)"),
        ("{}:absent", (), "has no 'absent'; it has"),
        ("{}:broken", (), "KeyError: 'absent'"),
        ("no_such_module:f", (), "ModuleNotFoundError: No module named"),
        ("{}", (), "a target is MODULE:NAME"),
        ("{}:step", ("--args", "{}:step"), "missing 2 required positional"),
        ("{}:for_autopar", ("--cluster", "8xQ9"), "a preset's kind must be one of"),
        ("{}:for_autopar", ("--cluster", "no.toml"), "no.toml does not exist"),
        ("{}:for_autopar", ("--mesh", "data=2"), "name:size pairs"),
    ],
)
def test_an_error_is_one_message_without_a_traceback(
    train: str,
    target: str,
    options: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [each.format(train) for each in options]
    assert run("plan", target.format(train), *filled) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and message in printed
    assert "Traceback" not in printed


def test_debug_shows_the_traceback(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", f"{train}:broken", "--debug") == 1
    assert 'return {}["absent"]' in capsys.readouterr().err


def test_a_damaged_plan_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": "autopar-plan", "version"')
    assert run("explain", str(path)) == 1
    assert f"error: {path}: the file is no JSON" in capsys.readouterr().err


def test_an_unknown_option_is_exit_code_2() -> None:
    assert run("demo", "--stpes", "3") == 2


def test_the_doctor_finds_this_installation_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert all(check.ok for check in run_checks())
    assert check_solver().ok


def test_a_failed_check_says_what_to_do() -> None:
    text = str(Check("HiGHS", False, "no solution", "reinstall it"))
    assert text.startswith("FAIL  HiGHS") and "-> reinstall it" in text
