"""`autopar report`: what it takes, writes and refuses."""

import sys
from pathlib import Path

import pytest

import autopar
from autopar.cli import main
from autopar.steps.parallel_plan import Plan
from tests.report.html_pages import Page
from tests.report.steps import NEEDED
from tests.tiny_plans import make_plan

pytest.importorskip("plotly", reason=NEEDED)
pytest.importorskip("jinja2", reason=NEEDED)

TRAIN = """
import jax, jax.numpy as jnp

def step(state, x):
    loss, gradients = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state)
    return state - gradients, loss

def for_autopar():
    state = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return step, (state, jax.ShapeDtypeStruct((128, 64), jnp.float32))
"""


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(("report", *args))
    return int(caught.value.code or 0)


def test_the_command_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    Plan(make_plan()).save(path)
    assert run(str(path)) == 0
    assert run(str(path), "--out", str(tmp_path / "other.html")) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"written to {tmp_path / 'plan.html'}",
        f"written to {tmp_path / 'other.html'}",
    ]
    assert (tmp_path / "plan.html").read_text() == (tmp_path / "other.html").read_text()


def test_the_command_takes_the_step_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"reported_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = f"{name}:for_autopar"
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__(name)
    made, args = module.for_autopar()
    autopar.parallelize(made, mesh="x:8").plan(*args).save("plan.json")
    assert run("plan.json", "--target", target, "--no-alternatives") == 0
    found = Page((tmp_path / "plan.html").read_text())
    assert "kernels run" in found.text_by_id["memory"]
    assert "as planned, or explained" in found.text_by_id["audit"]
    assert "with a plan that was given" in found.text_by_id["headline"]


def test_the_command_refuses_what_says_nothing_without_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    Plan(make_plan()).save(path)
    assert run(str(path), "--cluster", "8xH100") == 1
    assert "--target is not given" in capsys.readouterr().err
