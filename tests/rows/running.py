"""What every row asserts of a plan that runs, and how it counts the plan's traffic."""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from autopar.api import ParallelFunction
from autopar.audit.audit import audit
from autopar.audit.compiled_collectives import (
    collectives_in_compiled,
    collectives_in_lowered,
)
from autopar.costs.collectives import wire_bytes
from autopar.lowering.programs import SpmdProgram
from autopar.plans.plan import ShardingPlan
from autopar.sharding.collective import Collective, CollectiveKind
from autopar.sharding.group_names import GroupNames
from autopar.steps.lowered_pipeline import CompiledPipeline
from autopar.steps.lowered_step import Compiled
from autopar.steps.parallel_plan import Plan


def run_as_planned(step: ParallelFunction, *args: Any) -> Compiled:
    """Asserts all that holds for any step, and returns it compiled.

    The programs hold the planned collectives; they would fail their audit if any one
    of these were altered; the values are those of `jax.jit` on one device.
    """
    compiled = cast("Compiled", step.lower(*args).compile())
    compiled.audit().raise_if_wrong()
    _assert_audit_sees_changes(compiled.plan.sharding, compiled.lowered.program)
    expected = jax.jit(inspect.unwrap(step))(*args)
    results = compiled(*jax.tree.map(jnp.copy, args))  # state is donated
    _assert_equal(results, expected)
    return compiled


def run_pipeline_as_planned(step: ParallelFunction, *args: Any) -> CompiledPipeline:
    """As `run_as_planned`, for every program of a pipeline."""
    compiled = cast("CompiledPipeline", step.lower(*args).compile())
    compiled.audit().raise_if_wrong()
    for each in compiled.lowered.step.pipeline.lowered:
        _assert_audit_sees_changes(each.planned.plan, each.program)
    expected = jax.jit(inspect.unwrap(step))(*args)
    _assert_equal(compiled(*jax.tree.map(jnp.copy, args)), expected)
    return compiled


def _assert_equal(results: Any, expected: Any) -> None:
    for got, want in zip(
        jax.tree.leaves(results), jax.tree.leaves(expected), strict=True
    ):
        scale = np.abs(np.asarray(want)).max(initial=0.0)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * scale)


def _assert_audit_sees_changes(sharding: ShardingPlan, program: SpmdProgram) -> None:
    lowered = collectives_in_lowered(program.lower())
    optimized = collectives_in_compiled(program.compile().as_text() or "")

    def is_ok(planned: Sequence[Collective]) -> bool:
        return audit(planned, lowered, optimized, num_devices=sharding.mesh.size).ok

    planned = sharding.collectives
    assert is_ok(planned)
    for i, each in enumerate(planned):
        before, after = planned[:i], planned[i + 1 :]
        assert not is_ok([*before, *after]), each
        assert not is_ok([*before, replace(each, bytes=2 * each.bytes), *after]), each


def traffic(plan: Plan) -> dict[tuple[str, str], list[int]]:
    """Result bytes of every collective, descending, by its kind and mesh axes."""
    sharding = plan.sharding
    names = GroupNames(sharding.mesh.size, sharding.mesh)
    found: dict[tuple[str, str], list[int]] = {}
    for each in sharding.collectives:
        key = (each.kind, names.name(each.kind, each.groups))
        found.setdefault(key, []).extend([each.bytes] * each.count)
    return {key: sorted(sizes, reverse=True) for key, sizes in found.items()}


def sent_bytes(plan: Plan) -> float:
    """Bytes that one device sends in a step, all collectives being rings."""
    return sum(
        wire_bytes(
            cast("CollectiveKind", each.kind), each.total_bytes, len(each.groups[0])
        )
        for each in plan.sharding.collectives
    )


def all_reduce_bytes(result_bytes: float, num_devices: int) -> float:
    """What `sent_bytes` is for one all_reduce; scattered and gathered, it is equal."""
    return wire_bytes("all_reduce", result_bytes, num_devices)


def homes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The spec in which each argument lies, by path."""
    return {each.path: each.spec for each in plan.sharding.inputs}
