"""The audit of a program for GPUs fails on each collective that is not its plan's.

Every kind of collective that plans are made of is altered, as in `tests/test_mutation`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autopar
from autopar.audit.audit import Audit, audit
from autopar.audit.compiled_collectives import (
    collectives_in_compiled,
    collectives_in_lowered,
)
from autopar.sharding.collective import Collective
from autopar.steps.lowered_step import Compiled
from tests.test_mutation import CHANGES, STEPS

pytestmark = pytest.mark.targets

ALTERED = {
    **CHANGES,
    "moved into a loop": lambda each: [replace(each, count=3 * each.count)],
}
MORE = (
    *("another kind", "other axes", "twice the size", "planned twice"),
    *("once more in the loop", "moved into a loop", "half the size", "another dtype"),
)
# What is gathered at once on CPUs is worth it on GPUs only if it is large.
LARGER = {
    "reduce_scatter in a loop": [(8192, 8192), (8, 8192)],
    "all_to_all": [(4096, 4096), (8, 64)],
}


@cache
def compiled(name: str) -> Compiled:
    step = replace(STEPS[name], shapes=LARGER.get(name, STEPS[name].shapes))
    # By H100s, as measured, more is gathered and kept than their plans are to show.
    cluster = autopar.Cluster.preset("1x8xH100" if name in LARGER else "1x8xA100")
    options = {"mesh": step.mesh, "pins": step.pins, "cluster": cluster}
    return autopar.parallelize(step.fun, **options).lower(*step.arguments()).compile()


def audit_of(
    program: Compiled,
    planned: Sequence[Collective],
    text: Sequence[Collective] | None = None,
) -> Audit:
    lowered = collectives_in_lowered(program.lowered.program.lower())
    compiled = collectives_in_compiled(program.as_text()) if text is None else text
    return audit(planned, lowered, compiled, num_devices=8)


@pytest.mark.parametrize("name", STEPS)
def test_the_unaltered_plan_is_that_of_the_program(name: str) -> None:
    program = compiled(name)
    program.audit().raise_if_wrong()
    planned = program.plan.sharding.collectives
    assert name.split()[0] in {each.kind for each in planned}
    assert {each.count for each in planned} == {3 if "loop" in name else 1}


def altered(collectives: Sequence[Collective], change: str) -> Iterator[Any]:
    """All of them with one altered, for each of them."""
    for index, collective in enumerate(collectives):
        changed = ALTERED[change](collective)
        yield *collectives[:index], *changed, *collectives[index + 1 :]


@pytest.mark.parametrize("change", ALTERED)
@pytest.mark.parametrize("name", STEPS)
def test_an_altered_plan_is_found(name: str, change: str) -> None:
    program = compiled(name)
    plans = list(altered(program.plan.sharding.collectives, change))
    assert plans
    assert not any(audit_of(program, planned).ok for planned in plans)


@pytest.mark.parametrize("change", MORE)
@pytest.mark.parametrize("name", STEPS)
def test_a_program_that_sends_what_is_not_planned_is_found(
    name: str, change: str
) -> None:
    program = compiled(name)
    texts = list(altered(collectives_in_compiled(program.as_text()), change))
    planned = program.plan.sharding.collectives
    assert texts
    assert not any(audit_of(program, planned, text).ok for text in texts)
