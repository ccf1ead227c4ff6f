"""What changes from one plan to another: complete in its sums, and short for depth."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cli import main
from autopar.plans.plan_diff import PlanDiff
from autopar.steps.parallel_plan import Plan
from tests.marks import slow
from tests.rows.fixtures import Case, f1, f3, f6
from tests.test_pin_costs import random_pins
from tests.tiny_plans import make_plan

MESH = "x:2;y:4"


def planned(case: Case, **options: Any) -> Plan:
    return autopar.parallelize(case.step, **options).plan(*case.args)


def stacked(depth: int) -> Case:
    """Layers that are a list, with momentum, so that trees mirror each other."""

    def step(state: Any, x: jax.Array) -> Any:
        layers, momentum = state

        def loss(layers: Any) -> jax.Array:
            hidden = x
            for layer in layers:
                hidden = jnp.tanh(hidden @ layer["up"]) @ layer["down"]
            return jnp.mean(hidden**2)

        value, grads = jax.value_and_grad(loss)(layers)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return (jax.tree.map(lambda p, m: p - m, layers, momentum), momentum), value

    layer = {
        "up": jax.ShapeDtypeStruct((64, 256), jnp.float32),
        "down": jax.ShapeDtypeStruct((256, 64), jnp.float32),
    }
    layers = [layer] * depth
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    return Case(step, ((layers, layers), x))


def assert_complete(diff: PlanDiff) -> None:
    """What is listed adds up to what the predicted totals change by."""
    before, after = diff.before.predicted, diff.after.predicted
    moved = sum(line.sums[1] - line.sums[0] for line in diff.collectives)
    assert moved == after.collective_bytes - before.collective_bytes
    lines = (*diff.operators, *diff.light_operators)
    worked = sum(line.sums[1] - line.sums[0] for line in lines)
    changed = after.compute_seconds - before.compute_seconds
    assert worked == pytest.approx(changed, abs=1e-9 * before.step_seconds)
    state = sum(e.bytes - e.before_bytes for e in diff.leaves if e.role == "state")
    assert state == diff.after.state_bytes - diff.before.state_bytes


@pytest.mark.parametrize(
    ("make", "seed"),
    [
        (f1, 0),
        (f1, 1),
        *(slow(*c) for c in ((f1, 2), (f3, 0))),
    ],
)
def test_what_is_listed_adds_up_to_what_the_totals_change_by(
    make: Any, seed: int
) -> None:
    case = make()
    before = planned(case, mesh=MESH)
    after = planned(case, mesh=MESH, pins=random_pins(case, seed, 3))
    diff, back = before.diff(after), after.diff(before)
    assert_complete(diff)
    assert_complete(back)
    assert [e.spec for e in diff.leaves] == [e.spec[::-1] for e in back.leaves]
    assert diff.has_same_decisions == back.has_same_decisions
    lies = {e.path for e in diff.leaves}
    inputs = zip(before.sharding.inputs, after.sharding.inputs, strict=True)
    assert lies == {a.path for a, b in inputs if a.spec != b.spec}


def test_equal_plans_say_so() -> None:
    plan = planned(f1(), mesh=MESH)
    diff = plan.diff(Plan(plan.sharding))
    assert diff.is_equal and diff.has_same_decisions
    assert str(diff).splitlines()[-1] == "the plans are equal"


def test_other_costs_of_the_same_program_are_told_apart_from_other_programs() -> None:
    plan = make_plan()
    dearer = replace(plan.predicted, step_seconds=6e-6, compute_seconds=5e-6)
    diff = Plan(plan).diff(Plan(replace(plan, predicted=dearer)))
    assert diff.has_same_decisions and not diff.is_equal
    assert "both split everything alike" in str(diff)
    assert re.search(r"step +5 us +6 us +\+1 us, \+20.0%", str(diff))


def test_another_file_or_line_is_no_difference() -> None:
    plan = make_plan()
    moved = tuple(replace(op, source="/other.py:9:1 (f)") for op in plan.operators)
    diff = Plan(plan).diff(Plan(replace(plan, operators=moved)))
    assert diff.is_equal


def test_layers_that_change_alike_are_one_row() -> None:
    case = stacked(6)
    before = planned(case, mesh="x:8")
    after = before.what_if({r"\['up'\]": P("x"), r"\['down'\]": P()})
    diff = before.diff(after)
    assert len(diff.leaves) == 24
    table = str(diff).partition("leaves that lie elsewhere")[2].splitlines()
    rows = [line for line in table if "[*]" in line]
    assert len(rows) == 2
    assert all(" 12 " in row for row in rows)  # 6 layers and their momentum
    assert len(str(diff).splitlines()) < 50
    assert_complete(diff)


def test_a_leaf_that_is_new_or_gone_is_listed() -> None:
    diff = planned(stacked(2), mesh="x:8").diff(planned(stacked(3), mesh="x:8"))
    new = {e.path for e in diff.leaves if e.spec[0] == "none"}
    assert new == {
        f"state[{tree}][2]['{name}']" for tree in (0, 1) for name in ("up", "down")
    }
    back = diff.after.decision, diff.before.decision
    gone = Plan(back[0]).diff(Plan(back[1])).leaves
    assert {e.path for e in gone if e.spec[1] == "none"} == new
    assert_complete(diff)


def test_one_program_beside_a_pipeline_and_two_pipelines() -> None:
    layers, *batch = f6().args
    case = Case(f6().step, (layers[:4], *batch))

    def staged(number: int) -> Plan:
        method = autopar.PipelineParallel(num_stages=number, num_microbatches=8)
        return planned(case, method=method)

    two, four, one = staged(2), staged(4), planned(case)
    text = str(two.diff(four))
    assert "2 stages, 8 microbatches, 1f1b" in text
    assert "4 stages, 8 microbatches, 1f1b" in text
    homes = {e.path: e.spec for e in two.diff(four).leaves}
    assert homes["layers[3]"][0].startswith("stage 1 [")
    assert homes["layers[3]"][1].startswith("stage 3 [")
    assert set(homes) <= {f"layers[{i}]" for i in range(4)} | {"x", "y"}
    assert two.diff(Plan(two.stages)).is_equal
    mixed = one.diff(four)
    assert "one program" in str(mixed) and not mixed.has_same_decisions
    assert {e.path for e in mixed.leaves} >= {f"layers[{i}]" for i in range(4)}


def test_the_command_reads_two_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = f1()
    before = planned(case, mesh=MESH)
    after = before.what_if({"params/w": P()})
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for plan, path in zip((before, after), paths, strict=True):
        plan.save(path)
    with pytest.raises(SystemExit) as caught:
        main(["diff", *paths])
    assert not caught.value.code
    printed = capsys.readouterr().out
    assert "params['w']" in printed and "peak memory" in printed
    lines = [line.rstrip() for line in printed.splitlines()]
    assert lines == str(before.diff(after)).splitlines()
