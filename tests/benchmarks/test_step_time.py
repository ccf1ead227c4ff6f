"""What steps are timed beside: the same values, and the plan's sharding everywhere."""

from collections import Counter
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import autopar
from benchmarks import suites
from benchmarks.annotated_step import AnnotatedStep, own_step, same_graph
from benchmarks.models import Workload, build
from benchmarks.result_page import page
from benchmarks.results import Machine, ResultFile
from benchmarks.step_time import BASELINES, Program, programs
from tests.marks import slow

SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden": 32,
    "num_heads": 2,
    "seq_len": 16,
    "batch_size": 8,
}


@cache
def annotated(model: str, **options: Any) -> tuple[AnnotatedStep, AnnotatedStep]:
    """The user's own step, and the one that is planned."""
    workload = build(model, **options)
    step = autopar.parallelize(workload.step, mesh="x:8", donate_argnums=())
    lowered = step.lower(*workload.abstract())
    closed = jax.jit(workload.step).trace(*workload.abstract()).jaxpr
    return own_step(lowered, closed), same_graph(lowered)


def num_annotated(step: AnnotatedStep, is_inside: bool) -> int:
    """How many tensors have an annotation, inside bodies or outside."""
    tensors = (t for t in step.graph.tensors if (t.block > 0) == is_inside)
    return sum(t.index in step.annotations for t in tensors)


def kinds(step: AnnotatedStep) -> Counter[str]:
    return Counter(op.kind for op in step.graph.operators())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {}),
        slow("gpt", SMALL),
        slow("gpt", {**SMALL, "scan_layers": True, "remat": True}),
        slow("unet", {}),
        ("lstm", {"num_layers": 1}),
    ],
    ids=["mlp", "gpt", "scan and remat", "unet", "lstm"],
)
def test_the_users_own_step_is_annotated_all_over(
    model: str, options: dict[str, Any]
) -> None:
    own, same = annotated(model, **options)
    more = kinds(own) - kinds(same)
    assert not kinds(same) - kinds(own)
    assert set(more) <= {"transpose"}
    assert own.annotated_share() > 0.9
    for is_inside in (False, True):
        count, planned = (num_annotated(step, is_inside) for step in (own, same))
        assert planned - more.total() <= count <= planned


def test_what_lies_behind_a_rewritten_product_has_the_sharding_of_the_plan() -> None:
    """New weights and moments are numbered otherwise than in the planned graph."""
    steps = annotated("mlp")
    assert kinds(steps[0])["transpose"] > kinds(steps[1])["transpose"]
    own, same = (
        [step.annotations.get(t) for t in step.graph.outputs if isinstance(t, int)]
        for step in steps
    )
    assert own == same
    assert {each.spec for each in own if each} > {PartitionSpec(), PartitionSpec("x")}


def assert_values_of_jit(workload: Workload) -> dict[str, Program]:
    """All programs of the step."""
    arguments = workload.init(jax.random.key(0)), workload.make_batch(0)
    want = jax.tree.leaves(jax.jit(workload.step)(*arguments))
    made = programs(workload, "x:8")
    assert [*made] == ["autopar", *BASELINES]
    for name, program in made.items():
        for value, expected in zip(program.step(), want, strict=True):
            np.testing.assert_allclose(
                value, expected, rtol=2e-3, atol=2e-4, err_msg=name
            )
    return made


def test_all_programs_give_the_values_of_jit() -> None:
    assert_values_of_jit(build("mlp", num_layers=2))


@pytest.mark.slow
def test_in_loops_too_the_partitioner_is_told_what_it_would_not_find() -> None:
    made = assert_values_of_jit(build("gpt", scan_layers=True, remat=True, **SMALL))
    own, alone = made["own step"], made["arguments"]
    assert own.text.count("all-gather(") != alone.text.count("all-gather(")


def test_results_have_the_time_beside_each_baseline() -> None:
    sizes = {"num_layers": 2}
    asked = suites.Request(
        targets=("mlp",), settings=sizes, meshes=("x:8",), rounds=1, is_timed=False
    )
    ours, *baselines = suites.run(["step"], asked)
    names = ["times_own_step", "times_same_graph", "times_arguments"]
    assert [name for name in ours.timed if name.startswith("times")] == names
    assert [each.case for each in baselines] == [f"mlp x:8 {n}" for n in BASELINES]
    assert all("times" not in name for each in baselines for name in each.timed)
    html = page(ResultFile(Machine.here(), (ours, *baselines)))
    assert "times_<wbr>own_<wbr>step" in html
    assert "times own step" in str(ours)
