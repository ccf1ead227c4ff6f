"""A plan kept beside the code as a golden test: `autopar plan --check plan.json`."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli import main
from autopar.plans.kept_plan import check_kept
from autopar.plans.plan import ShardingPlan
from autopar.steps.parallel_plan import Plan
from tests.tiny_plans import make_plan

TRAIN = """
import jax, jax.numpy as jnp

SIZE = 64

def step(state, x):
    def loss_of(state):
        return jnp.mean((jnp.tanh(x @ state["w"]) @ state["v"]) ** 2)
    loss, gradients = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda p, g: p - g, state, gradients), loss

def for_autopar():
    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)
    return step, ({"w": floats(64, SIZE), "v": floats(SIZE, 64)}, floats(128, 64))
"""
MESH = ("--cluster", "8xH100", "--mesh", "x:2;y:4")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The plan of the step, as the command writes it."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "kept_once.py").write_text(TRAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        assert run("plan", "kept_once:for_autopar", *MESH, "--out", "p.json") == 0
    return (folder / "p.json").read_text()


@pytest.fixture
def train(kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a fresh module in the current folder, whose plan is kept."""
    name = f"kept_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(TRAIN)
    (tmp_path / "p.json").write_text(kept)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def run(*args: str) -> int:
    """The exit code."""
    if args[0] == "plan":
        args = (*args, "--no-compare")
    with pytest.raises(SystemExit) as caught:
        main(args)
    return int(caught.value.code or 0)


def edited(name: str, change: str, to: str) -> str:
    """The name of a module that differs from another in one place."""
    text = Path(f"{name}.py").read_text()
    assert change in text
    Path(f"{name}_edited.py").write_text(text.replace(change, to))
    return f"{name}_edited"


def test_the_same_plan_is_exit_code_0(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Path("p.json").read_bytes()
    capsys.readouterr()
    assert run("plan", f"{train}:for_autopar", *MESH, "--check", "p.json") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("the plan is as it was kept: step ")
    assert Path("p.json").read_bytes() == kept


def test_lines_may_move(train: str) -> None:
    moved = edited(train, "import jax, jax", "# a comment\n\nimport jax, jax")
    assert run("plan", f"{moved}:for_autopar", *MESH, "--check", "p.json") == 0


def test_another_plan_is_exit_code_1_with_the_difference(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Path("p.json").read_bytes()
    other = edited(train, "SIZE = 64", "SIZE = 4096")
    capsys.readouterr()
    assert run("plan", f"{other}:for_autopar", *MESH, "--check", "p.json") == 1
    printed = capsys.readouterr()
    assert "state['w']" in printed.out and "peak memory" in printed.out
    assert "error: the plan differs from the one that was kept" in printed.err
    assert "--out" in printed.err
    assert Path("p.json").read_bytes() == kept


def test_a_plan_for_another_cluster_is_told_so(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--cluster", "8xA100", "--mesh", "x:2;y:4", "--check", "p.json")
    assert run("plan", f"{train}:for_autopar", *options) == 1
    printed = capsys.readouterr().err
    assert "is for the cluster 8xH100, and this one is for 8xA100" in printed


def test_a_file_that_is_no_plan_is_refused_before_anything_is_planned(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path("p.json").read_text()
    middle = text.index('"', len(text) // 2)
    for end in (middle, middle + 1, middle + 2):  # before, at and in a string
        Path("p.json").write_text(text[:end])
        capsys.readouterr()
        assert run("plan", f"{train}:absent", *MESH, "--check", "p.json") == 1
        assert (
            "error: p.json: the file is no JSON, or truncated"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize(
    "options", [("--out", "q.json"), ("--pin", "x=[x, -]"), ("--like", "p.json")]
)
def test_a_check_writes_nothing(
    train: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{train}:for_autopar"
    assert run("plan", target, *MESH, "--check", "p.json", *options) == 1
    assert "--check compares a plan and writes nothing" in capsys.readouterr().err
    assert not Path("q.json").exists()


def costlier(plan: ShardingPlan, name: str, factor: float) -> ShardingPlan:
    value = getattr(plan.predicted, name) * factor
    kind = type(getattr(plan.predicted, name))
    return replace(plan, predicted=replace(plan.predicted, **{name: kind(value)}))


@pytest.mark.parametrize("name", ["step_seconds", "peak_bytes"])
def test_costs_may_rise_by_the_tolerance(name: str) -> None:
    kept = make_plan()
    assert check_kept(costlier(kept, name, 1.009), kept).is_kept
    assert check_kept(costlier(kept, name, 0.5), kept).is_kept
    dearer = check_kept(costlier(kept, name, 1.2), kept)
    assert not dearer.is_kept
    assert re.search(r"predicted (20.0|19.9)% above it, where 1.0% ar", str(dearer))
    assert check_kept(costlier(kept, name, 1.2), kept, tolerance=0.2).is_kept
    with pytest.raises(ValueError, match="a part from 0 up, such as 0.01"):
        check_kept(kept, kept, tolerance=-0.1)


def test_another_spec_at_no_cost_is_another_plan() -> None:
    kept = make_plan()
    inputs = (replace(kept.inputs[0], spec=(0, -1)), *kept.inputs[1:])
    found = check_kept(replace(kept, inputs=inputs), kept)
    assert str(found) == "the plan differs from the one that was kept"


def test_what_if_pins_are_printed_with_what_they_change(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    options = ("--pin", "state/w=[-, -]", "--pin", "^x$=[y, -]", "--out", "q.json")
    assert run("plan", f"{train}:for_autopar", *MESH, *options) == 0
    printed = capsys.readouterr().out
    assert "from one plan of step to another" in printed
    pinned = {e.path: e.spec for e in Plan.load("q.json").sharding.inputs}
    assert pinned["state['w']"] == (-1, -1) and pinned["x"] == (-1, 0)
    assert run("plan", f"{train}:for_autopar", *MESH, "--pin", "state/w") == 1
    assert "a pin is PATH=SPEC" in capsys.readouterr().err


def test_a_changed_step_is_planned_like_the_kept_plan(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = edited(train, "SIZE = 64", "SIZE = 128")
    options = ("--cluster", "8xH100", "--like", "p.json", "--out", "q.json")
    capsys.readouterr()
    assert run("plan", f"{other}:for_autopar", *options) == 0
    assert "from one plan of step to another" in capsys.readouterr().out
    before, after = Plan.load("p.json").sharding, Plan.load("q.json").sharding
    assert after.mesh == before.mesh
    for mine, other_input in zip(before.inputs, after.inputs, strict=True):
        assert (mine.path, mine.spec) == (other_input.path, other_input.spec)


def test_a_kept_plan_is_explained_with_its_step(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    asked = ("explain", "p.json", "--tensor", "state/w")
    assert run(*asked) == 0
    assert "--target MODULE:NAME" in capsys.readouterr().out
    assert run(*asked, "--target", f"{train}:for_autopar") == 0
    printed = capsys.readouterr().out
    assert "the runner-up" in printed and "held by" in printed
    assert run("explain", "p.json", "--op", "jvp()/tanh.0") == 0
    assert "jvp()/tanh.0, tanh" in capsys.readouterr().out
    assert run("explain", "p.json", "--cluster", "8xH100") == 1
    assert "--target is not given" in capsys.readouterr().err
    other = edited(train, "jnp.tanh(x", "jnp.sin(x")
    assert run(*asked, "--target", f"{other}:for_autopar") == 1
    assert "the plan of 'step' must fit the step it runs" in capsys.readouterr().err


def test_the_cluster_of_a_plan_may_be_a_file(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(Path("p.json").read_text())
    document["cluster"] = "my lab"
    Path("p.json").write_text(json.dumps(document))
    asked = ("explain", "p.json", "--tensor", "x", "--target", f"{train}:for_autopar")
    assert run(*asked) == 1
    assert "name its file with --cluster" in capsys.readouterr().err
    assert run(*asked, "--cluster", "8xH100") == 0
