"""Rows of GShard: a few annotations, and one program whatever the device count."""

import jax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import autopar
from tests.rows.fixtures import Case, experts_forward, mixture_of_experts
from tests.rows.running import homes, run_as_planned, traffic

# Groups of tokens and experts are split; the gate and all in between are left open.
ANNOTATED = {r"^x$": P("expert"), "up|down": P("expert")}
TRAINED = {r"\['x'\]|\['y'\]": P("expert"), "up|down": P("expert")}


def devices(number: int) -> Mesh:
    return Mesh(jax.devices()[:number], ("expert",))


def annotate(tensor: jax.Array, _: str) -> jax.Array:
    """GShard splits dim 0 of each: groups where tokens are, experts in between."""
    return autopar.pin(tensor, P("expert"))


def test_gsh_1_a_few_annotations_are_enough() -> None:
    """Two all_to_all of E G C M 4 / 8 bytes, dispatch and combine."""
    case = experts_forward()
    step = autopar.parallelize(case.step, mesh=devices(8), pins=ANNOTATED)
    plan = run_as_planned(step, *case.args).plan
    assert traffic(plan) == {("all_to_all", "expert"): [4_096, 4_096]}
    assert homes(plan)["params['gate']"] == (-1,)


def test_gsh_1_inner_annotations_change_nothing() -> None:
    case = experts_forward(annotate)
    step = autopar.parallelize(case.step, mesh=devices(8), pins=ANNOTATED)
    plan = run_as_planned(step, *case.args).plan
    assert traffic(plan) == {("all_to_all", "expert"): [4_096, 4_096]}


def test_gsh_1_training_adds_one_exchange_and_the_gate() -> None:
    """The dispatched tokens need no gradient here, only those in between."""
    case = mixture_of_experts()
    step = autopar.parallelize(case.step, mesh=devices(8), pins=TRAINED)
    assert traffic(run_as_planned(step, *case.args).plan) == {
        ("all_to_all", "expert"): [4_096] * 3,
        ("all_reduce", "expert"): [1_024, 4],  # the gate's gradient and the loss
    }


@pytest.mark.parametrize(
    ("case", "pins"),
    [(experts_forward(), ANNOTATED), (mixture_of_experts(), TRAINED)],
    ids=["forward", "trained"],
)
def test_gsh_5_one_program_whatever_the_device_count(
    case: Case, pins: dict[str, P]
) -> None:
    programs = []
    for number in (2, 4, 8):
        step = autopar.parallelize(case.step, mesh=devices(number), pins=pins)
        programs.append(step.lower(*case.args).as_text())
    assert len({len(program.splitlines()) for program in programs}) == 1
