"""A plan with one collective altered is not the plan of its program: the audit says so.

Every kind of collective that plans are made of is altered in its kind, its mesh axes
and its size, and in how often it occurs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autopar
from autopar.errors import AuditError
from autopar.plans.plan import ShardingPlan
from autopar.sharding.collective import Collective
from autopar.steps.lowered_step import Compiled

P = jax.P


@dataclass(frozen=True)
class Step:
    """A function, its arguments and pins that call for one kind of collective."""

    fun: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    pins: dict[str, P]
    mesh: str = "x:2;y:4"

    def arguments(self) -> Sequence[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]


def scan_products(w: jax.Array, x: jax.Array) -> jax.Array:
    """A product with `w` summed over its split dim, three times in a loop."""
    return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0]


BOTH = ("x", "y")
STEPS = {
    "all_reduce": Step(
        lambda w, x: (x @ w).sum(), [(64, 32), (8, 64)], {"w": P("y"), "x": P("x", "y")}
    ),
    "reduce_scatter in a loop": Step(
        scan_products, [(512, 512), (8, 512)], {"w": P("y", None), "x": P("x", None)}
    ),
    "all_gather": Step(
        lambda w, x: w - x.T @ x, [(64, 64), (8, 64)], {"w": P("x"), "x": P("x")}
    ),
    "reduce_scatter": Step(
        lambda w, x: w - x.T @ x, [(64, 64), (4096, 64)], {"w": P(BOTH), "x": P(BOTH)}
    ),
    "all_to_all": Step(
        lambda w, x: jnp.sort(w, axis=0) * x.sum(),
        [(512, 512), (8, 64)],
        {"w": P("y", None), "x": P()},
    ),
    "collective_permute": Step(
        lambda w, x: w + x,
        [(64, 64), (64, 64)],
        {"w": P("x"), "x": P("y")},
        mesh="x:2;y:2;z:2",
    ),
}


@cache
def compiled(name: str) -> Compiled:
    step = STEPS[name]
    parallel = autopar.parallelize(step.fun, mesh=step.mesh, pins=step.pins)
    return parallel.lower(*step.arguments()).compile()


def audit_with(program: Compiled, sharding: ShardingPlan) -> None:
    """The audit of a program against another plan; raises what the user would see."""
    plan = replace(program.plan, decision=sharding)
    lowered = replace(program.lowered, plan=plan)
    replace(program, lowered=lowered).audit().raise_if_wrong()


HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))
PAIRS = ((0, 4), (1, 5), (2, 6), (3, 7))


def other_kind(collective: Collective) -> Collective:
    kind = "all_gather" if collective.kind != "all_gather" else "all_to_all"
    return replace(collective, kind=kind, reduction="", groups=HALVES)


def other_axes(collective: Collective) -> Collective:
    return replace(collective, groups=PAIRS if collective.groups != PAIRS else HALVES)


CHANGES: dict[str, Callable[[Collective], list[Collective]]] = {
    "another kind": lambda each: [other_kind(each)],
    "other axes": lambda each: [other_axes(each)],
    "half the size": lambda each: [replace(each, bytes=each.bytes // 2)],
    "twice the size": lambda each: [replace(each, bytes=each.bytes * 2)],
    "another dtype": lambda each: [replace(each, dtype="int32")],
    "once more in the loop": lambda each: [replace(each, count=each.count + 1)],
    "left out": lambda each: [],
    "planned twice": lambda each: [each, each],
}


@pytest.mark.parametrize("name", STEPS)
def test_the_unaltered_plan_is_that_of_the_program(name: str) -> None:
    program = compiled(name)
    kinds = {each.kind for each in program.plan.sharding.collectives}
    assert name.split()[0] in kinds
    audit_with(program, program.plan.sharding)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", STEPS)
def test_an_altered_collective_is_found(name: str, change: str) -> None:
    program = compiled(name)
    sharding = program.plan.sharding
    for index, collective in enumerate(sharding.collectives):
        altered = (
            *sharding.collectives[:index],
            *CHANGES[change](collective),
            *sharding.collectives[index + 1 :],
        )
        with pytest.raises(AuditError, match="must hold the collectives of its plan"):
            audit_with(program, replace(sharding, collectives=altered))


@pytest.mark.parametrize("name", STEPS)
def test_an_altered_plan_given_to_parallelize_is_found(name: str) -> None:
    step, sharding = STEPS[name], compiled(name).plan.sharding
    first, *rest = sharding.collectives
    altered = (replace(first, bytes=2 * first.bytes), *rest)
    plan = autopar.Plan(replace(sharding, collectives=altered))
    lowered = autopar.parallelize(step.fun, plan=plan).lower(*step.arguments())
    with pytest.raises(AuditError, match=f"(?s){first.kind}.* planned"):
        lowered.compile().audit().raise_if_wrong()


def test_the_error_names_the_collective_and_both_values() -> None:
    program = compiled("reduce_scatter in a loop")
    sharding = program.plan.sharding
    (collective,) = sharding.collectives
    altered = replace(collective, bytes=2 * collective.bytes)
    with pytest.raises(AuditError) as error:
        audit_with(program, replace(sharding, collectives=(altered,)))
    size = collective.bytes
    assert f"planned 3 x {2 * size:,} B float32" in str(error.value)
    assert f"the lowered program has 3 x {size:,} B float32" in str(error.value)
