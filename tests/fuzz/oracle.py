"""Runs a program split and on one device, and compares every shard with its part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from autopar.graph.build_graph import STRUCTURED
from autopar.graph.op_graph import OpGraph
from autopar.plans.plan import ShardingPlan
from autopar.rules.base import factors_of, is_inexact, rule_name, rule_of
from autopar.sharding.spec import REPLICATED, SUM
from autopar.steps.lowered_step import Compiled, Lowered
from tests.fuzz.plans import Case, Traced, lower_case, trace_program
from tests.fuzz.programs import Program

Verdict = Literal["right", "unstable", "refused"]
_DRAWS = 16  # so few that lie at a jump are missed: one draw in two moves them over it
_ROUNDING = {"float32": 1e-6, "float64": 1e-13, "bfloat16": 1e-2, "float16": 2e-3}


class WrongProgram(AssertionError):
    """A split program that differs from the reference, fails, or breaks its plan."""


@dataclass(frozen=True)
class Outcome:
    """What one case showed: strategies as (rule, factor), and fallbacks.

    `reached` are those that an operator of the program, compiled and run, had along a
    mesh axis of two or more devices; `seen` are all that rules offer its operators.
    """

    verdict: Verdict
    reached: frozenset[tuple[str, str]]
    seen: frozenset[tuple[str, str]]
    fallbacks: frozenset[str]


@dataclass(frozen=True, eq=False)
class Reference:
    """A function traced, with its values on one device.

    `values` makes its arguments, moved relatively by a noise, of which a number draws
    the direction.
    """

    values: Callable[[float, int], Sequence[Any]]
    x64: bool
    traced: Traced
    compiled: Any
    results: list[np.ndarray]
    weak: list[bool]

    def is_stable(self, position: int, tolerance: float) -> bool:
        """Whether the result hardly moves when the arguments move by their rounding."""
        for noise in (1e-13, 1e-6, 1e-2) if self.x64 else (1e-6, 1e-2):
            for draw in range(_DRAWS):
                moved = leaves_of(self.compiled(*self.values(noise, draw)))[position]
                if difference(moved, self.results[position]) > tolerance:
                    return False
            if noise >= self.rounding():
                break
        return True

    def rounding(self) -> float:
        """The relative rounding of the narrowest float in the function."""
        dtypes = {tensor.type.dtype.name for tensor in self.traced.graph.tensors}
        return max((_ROUNDING.get(name, 0.0) for name in dtypes), default=0.0)


def reference_of(program: Program) -> Reference:
    """Traces a program, and runs it on one device.

    Raises:
      NotImplementedError: it holds what is refused with a clear error, or what XLA
        cannot run on one device either.
    """
    with jax.enable_x64(program.x64):
        return reference_of_function(program.function(), program.values, program.x64)


def check_function(
    function: Callable[..., Any], args: Sequence[Any], case: Case
) -> None:
    """Holds a function under one plan against one device; raises as `check_case`."""
    x64 = bool(jax.config.values["jax_enable_x64"])
    check_case(reference_of_function(function, lambda noise, draw: args, x64), case)


def reference_of_function(
    function: Callable[..., Any],
    values: Callable[[float, int], Sequence[Any]],
    x64: bool = False,
) -> Reference:
    """As `reference_of`; `values` makes the arguments with a noise, as `Reference`."""
    args = values(0.0, 0)
    traced = trace_program(function, args)
    try:
        compiled = jax.jit(function).lower(*args).compile()
        results = jax.block_until_ready(compiled(*args))
    except jax.errors.JaxRuntimeError as error:
        raise NotImplementedError(f"XLA on one device: {error}"[:100]) from error
    weak = [is_weak(leaf) for leaf in jax.tree.leaves(results)]
    return Reference(values, x64, traced, compiled, leaves_of(results), weak)


def check_case(reference: Reference, case: Case) -> Outcome:
    """Runs one plan of a function.

    Raises:
      WrongProgram: values differ from the reference, or collectives from the plan.
    """
    with jax.enable_x64(reference.x64):
        lowered = lower_case(reference.traced, case)
        compiled = _compiled(lowered)
        audit = compiled.audit()
        verdict = _compare(
            reference,
            jax.tree.leaves(compiled(*reference.values(0.0, 0))),
            loses_infinities(reference.traced.graph, lowered.plan.sharding),
        )
    if not audit.ok:
        raise WrongProgram(f"the audit fails\n{audit}")
    return Outcome(
        verdict, *strategies_of(reference.traced.graph, lowered.plan.sharding)
    )


def _compiled(lowered: Lowered) -> Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "GlobalToLocalShape" in str(error):  # XLA, where all arguments are empty
            raise NotImplementedError("XLA refuses a program of no elements") from error
        raise


def _compare(
    reference: Reference, results: Sequence[jax.Array], may_lose_infinities: bool
) -> Verdict:
    verdict: Verdict = "right"
    assert len(results) == len(reference.results)
    for position, (array, whole, weak) in enumerate(
        zip(results, reference.results, reference.weak, strict=True)
    ):
        found = is_weak(array)
        if is_key_array(array):
            array = jax.random.key_data(array)
        if (array.shape, array.dtype, found) != (whole.shape, whole.dtype, weak):
            raise WrongProgram(
                f"result {position} is {type_text(array, found)}, but must be "
                f"{type_text(whole, weak)}"
            )
        if not whole.size:  # JAX may show the shards of an empty array as whole
            _compare_empty(position, array)
            continue
        tolerance = tolerance_of(whole, reference)
        for shard in array.addressable_shards:
            part, data = whole[shard.index], np.asarray(shard.data)
            error = difference(data, part, scale_of(whole))
            if error <= tolerance:
                continue
            if may_lose_infinities:
                with_nan = np.where(np.isinf(part) & np.isnan(data), data, part)
                if difference(data, with_nan, scale_of(whole)) <= tolerance:
                    verdict = "unstable"
                    continue
            if not reference.is_stable(position, tolerance):
                verdict = "unstable"
                break
            raise WrongProgram(
                f"result {position}, {whole.dtype}{whole.shape} with "
                f"{array.sharding}, differs by {error:.3g} on {shard.device} at "
                f"{shard.index}:\n{data}\nbut must be\n{part}"
            )
    return verdict


def _compare_empty(position: int, array: jax.Array) -> None:
    for shard in array.addressable_shards:
        if shard.data.size or shard.data.dtype != array.dtype:
            raise WrongProgram(
                f"result {position} has no elements, but on {shard.device} it is "
                f"{shard.data.dtype}{shard.data.shape}"
            )


def type_text(value: Any, weak: bool) -> str:
    """Dtype and shape, and whether the dtype gives way to others."""
    return f"{'weak ' * weak}{value.dtype}{value.shape}"


def leaves_of(tree: Any) -> list[np.ndarray]:
    """The leaves as numpy arrays, keys as their words."""
    return [
        np.asarray(jax.random.key_data(leaf) if is_key_array(leaf) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def is_weak(array: jax.Array) -> bool:
    """Whether its dtype gives way to others; that of keys never does."""
    return getattr(array, "weak_type", False)


def is_key_array(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def scale_of(whole: np.ndarray) -> float:
    """The largest finite magnitude, at least 1."""
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return 1.0
    magnitudes = np.abs(whole[np.isfinite(whole)]).astype(float)
    return max(1.0, float(magnitudes.max(initial=0.0)))


def difference(
    data: np.ndarray, whole: np.ndarray, scale: float | None = None
) -> float:
    """The largest difference relative to the scale; inf where NaN or inf differ."""
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return 0.0 if np.array_equal(data, whole) else np.inf
    wide = complex if np.iscomplexobj(whole) else float
    x, y = data.astype(wide), whole.astype(wide)
    ends = ~(np.isfinite(x) & np.isfinite(y))
    if not np.array_equal(x[ends], y[ends], equal_nan=True):
        return np.inf
    gaps = np.abs(x[~ends] - y[~ends])
    return float(gaps.max(initial=0.0)) / (scale_of(whole) if scale is None else scale)


def tolerance_of(whole: np.ndarray, reference: Reference) -> float:
    """Relative to a result's scale; small floats anywhere in the program widen it."""
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return 0.0
    widest = max(reference.rounding(), 1e-6)
    return {1e-6: 2e-4, 2e-3: 1e-2, 1e-2: 5e-2}[widest]


def loses_infinities(graph: OpGraph, plan: ShardingPlan) -> bool:
    """Whether a pending sum is multiplied, so that an infinity may come out as NaN.

    Where a shard's part of the sum is 0, its product with infinity is NaN, though that
    of the whole sum is infinite. What is finite on one device must still be.
    """
    for op, chosen in zip(graph.operators(), plan.operators, strict=True):
        for axis, size in enumerate(plan.mesh.axis_sizes):
            if size == 1:
                continue
            states = [spec[axis] for spec in chosen.operand_specs]
            if SUM in states and any(
                state == REPLICATED and isinstance(operand, int) and is_inexact(kind)
                for state, operand, kind in zip(
                    states, op.operands, op.operand_types, strict=True
                )
            ):
                return True
    return False


def strategies_of(
    graph: OpGraph, plan: ShardingPlan
) -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]], frozenset[str]]:
    """Strategies used, strategies possible, and primitives without a rule."""
    reached, seen, fallbacks = set(), set(), set()
    for op, chosen in zip(graph.operators(), plan.operators, strict=True):
        if op.kind in STRUCTURED:
            continue
        rule, sizes = rule_name(op), plan.mesh.axis_sizes
        axes = zip(chosen.factors, sizes, strict=True)
        reached |= {(rule, name) for name, size in axes if size > 1}
        seen |= {(rule, factor.name) for factor in factors_of(op)}
        if rule_of(op) is None:
            fallbacks.add(rule)
    return frozenset(reached), frozenset(seen), frozenset(fallbacks)
