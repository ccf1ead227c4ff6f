"""Checks a rule against one device: every strategy must give the same values.

A test calls `check_every_strategy(function, *args)`; the rules' factors themselves are
asserted on `operators_of(function, *args)`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.sharding import AxisType, Mesh, PartitionSpec

from autopar.graph.op_graph import Constant, Operand, Operator, TensorType
from autopar.rules.base import Factor, Shard, factors_of, rule_of
from autopar.sharding.mesh import MeshShape
from autopar.sharding.spec import MAX, MIN, REPLICATED, SUM, Spec, axes_of_dim, is_legal

MESH_2X2X2 = MeshShape(("x", "y", "z"), (2, 2, 2))
MESH_2X4 = MeshShape(("x", "y"), (2, 4))
MESH_8 = MeshShape(("x",), (8,))
MOST_STRATEGIES = 48  # of an operator; fewer in each run, see conftest.py
CHUNK = 48  # strategies compiled into one program
_CALLS = "jit closed_call remat2 custom_jvp_call custom_vjp_call".split()


def random_array(*shape: int, seed: int = 0) -> np.ndarray:
    """Normal float32 numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Evaluated:
    """An operator with the values it took and gave on one device."""

    operator: Operator
    operands: tuple[Any, ...]
    results: tuple[Any, ...]


@dataclass(frozen=True)
class Strategy:
    """One factor per mesh axis."""

    factors: tuple[Factor, ...]

    def operand_specs(self) -> tuple[Spec, ...]:
        return tuple(zip(*(f.operands for f in self.factors), strict=True))

    def result_specs(self) -> tuple[Spec, ...]:
        return tuple(zip(*(f.results for f in self.factors), strict=True))

    def __str__(self) -> str:
        return "(" + " ".join(f.name for f in self.factors) + ")"


def check_every_strategy(
    function: Callable[..., Any],
    *args: Any,
    mesh: MeshShape = MESH_2X2X2,
    kinds: Collection[str] | None = None,
    max_strategies: int = 48,
) -> dict[str, set[str]]:
    """Runs every strategy of the primitives in `function(*args)`, and compares.

    Args:
      function: traced as it is; calls inside are inlined, scans are not entered.
      args: arrays (or trees of them) that it is traced and evaluated with.
      mesh: at most 8 devices.
      kinds: names of the primitives to check; all that have a rule if None. A kind that
        is named must occur.
      max_strategies: per operator, and at most `MOST_STRATEGIES`; above it a seeded
        sample that holds every factor.

    Returns:
      The names of the factors that some checked strategy used, by primitive.

    Raises:
      AssertionError: a shard differs from the same part of the reference.
    """
    reached: dict[str, set[str]] = {kind: set() for kind in kinds or ()}
    cases: list[tuple[Evaluated, Strategy]] = []
    for evaluated in evaluate(function, *args):
        op = evaluated.operator
        if rule_of(op) is None if kinds is None else op.kind not in kinds:
            continue
        assert rule_of(op) is not None, f"{op.kind} has no rule"
        for strategy in strategies_of(op, mesh, min(max_strategies, MOST_STRATEGIES)):
            cases.append((evaluated, strategy))
            names = (factor.name for factor in strategy.factors)
            reached.setdefault(op.kind, set()).update(names)
    missing = [kind for kind, names in reached.items() if not names]
    assert not missing, f"the function holds none of {missing}"
    for start in range(0, len(cases), CHUNK):
        check_cases(cases[start : start + CHUNK], mesh)
    return reached


def operators_of(function: Callable[..., Any], *args: Any) -> list[Operator]:
    """The operators of `function(*args)`, calls inlined."""
    evaluated = _evaluated(lambda f: partial(jax.eval_shape, f), function, *args)
    return [each.operator for each in evaluated]


def operator_of(kind: str, function: Callable[..., Any], *args: Any) -> Operator:
    """The only operator of that kind in `function(*args)`."""
    (op,) = (op for op in operators_of(function, *args) if op.kind == kind)
    return op


def factor_table(op: Operator) -> dict[str, tuple[tuple[int, ...], ...]]:
    """`name: (operand states, result states)` of every factor but REPLICATE."""
    return {f.name: (f.operands, f.results) for f in factors_of(op)[1:]}


def factor_sizes(op: Operator) -> dict[str, int]:
    """`name: size` of every factor but REPLICATE."""
    return {f.name: f.size for f in factors_of(op)[1:]}


def strategies_of(op: Operator, mesh: MeshShape, limit: int) -> list[Strategy]:
    """The legal strategies; above `limit`, a seeded sample that holds every factor."""
    factors = factors_of(op)
    legal = [
        strategy
        for choice in itertools.product(factors, repeat=mesh.num_axes)
        if _is_legal(op, strategy := Strategy(choice), mesh)
    ]
    if len(legal) <= limit:
        return legal
    kept, names = [], set()
    random.Random(0).shuffle(legal)
    for strategy in legal:
        fresh = {factor.name for factor in strategy.factors} - names
        if fresh:
            kept.append(strategy)
            names |= fresh
    others = (strategy for strategy in legal if strategy not in kept)
    return kept + list(itertools.islice(others, max(0, limit - len(kept))))


def _is_legal(op: Operator, strategy: Strategy, mesh: MeshShape) -> bool:
    for factor in strategy.factors:
        pairs = zip(strategy.factors, mesh.axis_sizes, strict=True)
        if not factor.admits(prod(size for other, size in pairs if other == factor)):
            return False
    specs = (*strategy.operand_specs(), *strategy.result_specs())
    types = (*op.operand_types, *op.result_types)
    return all(
        is_legal(kind.shape, spec, mesh.axis_sizes)
        for kind, spec in zip(types, specs, strict=True)
    )


def evaluate(function: Callable[..., Any], *args: Any) -> list[Evaluated]:
    """Every operator of `function(*args)` with its values on one device."""
    return _evaluated(jax.jit, function, *args)


def _evaluated(
    transform: Callable[..., Any], function: Callable[..., Any], *args: Any
) -> list[Evaluated]:
    """In one program, where each operator alone would be one."""
    closed = jax.make_jaxpr(function)(*args)
    traced: list[Evaluated] = []

    def values(*leaves: Any) -> Any:
        _evaluate(closed.jaxpr, closed.consts, leaves, itertools.count(), traced)
        return [(each.operands, each.results) for each in traced]

    found = transform(values)(*jax.tree.leaves(args))
    return [
        Evaluated(each.operator, *both)
        for each, both in zip(traced, found, strict=True)
    ]


def _evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    args: Sequence[Any],
    numbers: Iterator[int],
    found: list[Evaluated],
) -> list[Any]:
    values: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    tensors = {var: next(numbers) for var in values}

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    def operand_of(atom: Any) -> Operand:
        if isinstance(atom, Literal):
            return Constant(atom.val, type_of(atom))
        return tensors[atom]

    for eqn in jaxpr.eqns:
        operands = tuple(value_of(atom) for atom in eqn.invars)
        tensors |= {var: next(numbers) for var in eqn.outvars}
        kind = eqn.primitive.name
        if kind in _CALLS:
            body = next(
                eqn.params[name]
                for name in ("jaxpr", "call_jaxpr", "fun_jaxpr")
                if name in eqn.params
            )
            if not isinstance(body, ClosedJaxpr):
                body = ClosedJaxpr(body, ())
            results = _evaluate(body.jaxpr, body.consts, operands, numbers, found)
        else:
            op = Operator(
                index=len(found),
                name=f"{kind}.{len(found)}",
                kind=kind,
                params=eqn.params,
                operands=tuple(operand_of(atom) for atom in eqn.invars),
                results=tuple(tensors[var] for var in eqn.outvars),
                operand_types=tuple(type_of(atom) for atom in eqn.invars),
                result_types=tuple(type_of(var) for var in eqn.outvars),
                block=0,
                eqn=eqn,
            )
            params = eqn.primitive.get_bind_params(eqn.params)
            with eqn.ctx.manager:
                results = eqn.primitive.bind(*operands, **params)
            results = results if eqn.primitive.multiple_results else [results]
            found.append(Evaluated(op, operands, tuple(results)))
        values.update(zip(eqn.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


def type_of(atom: Any) -> TensorType:
    """The type of a variable or literal of a jaxpr."""
    return TensorType(tuple(atom.aval.shape), atom.aval.dtype)


def check_cases(cases: Sequence[tuple[Evaluated, Strategy]], mesh: MeshShape) -> None:
    """Runs the cases in one program, and compares every shard of every result."""
    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
    types = (AxisType.Auto,) * mesh.num_axes
    jax_mesh = Mesh(devices, mesh.axis_names, axis_types=types)
    stacked: dict[tuple[int, int, Spec], Any] = {}
    in_specs: dict[tuple[int, int, Spec], PartitionSpec] = {}
    for evaluated, strategy in cases:
        op = evaluated.operator
        for position, spec in enumerate(strategy.operand_specs()):
            key = (op.index, position, spec)
            if not isinstance(op.operands[position], Constant) and key not in stacked:
                stacked[key], in_specs[key] = _lay_out(
                    evaluated.operands[position], spec, mesh
                )

    def run(shards: Mapping[tuple[int, int, Spec], Any]) -> list[list[Any]]:
        return [_run_case(*case, shards, mesh) for case in cases]

    every_device = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(
        run,
        mesh=jax_mesh,
        in_specs=(in_specs,),
        out_specs=every_device,
        check_vma=False,
    )
    all_shards = jax.jit(mapped)(stacked)
    for (evaluated, strategy), shards in zip(cases, all_shards, strict=True):
        assert len(shards) == len(evaluated.results), evaluated.operator.eqn
        for position, spec in enumerate(strategy.result_specs()):
            reference = evaluated.results[position]
            label = f"{evaluated.operator.eqn}\nstrategy {strategy}, result {position}"
            _compare(np.asarray(shards[position]), reference, spec, mesh, label)


def _run_case(
    evaluated: Evaluated,
    strategy: Strategy,
    shards: Mapping[tuple[int, int, Spec], Any],
    mesh: MeshShape,
) -> list[Any]:
    """Binds one operator on this device; results get a leading dim for the device."""
    op = evaluated.operator
    operand_specs, result_specs = strategy.operand_specs(), strategy.result_specs()
    operands = []
    for position, operand in enumerate(op.operands):
        if isinstance(operand, Constant):
            operands.append(operand.value)
            continue
        spec = operand_specs[position]
        num_pending = sum(state < REPLICATED for state in spec)
        shard = shards[op.index, position, spec]
        operands.append(shard[(0,) * num_pending] if num_pending else shard)
    rule = rule_of(op)
    assert rule is not None, op.kind
    shard = Shard(mesh, strategy.factors, operand_specs, result_specs)
    results = []
    for result in rule.bind(op, operands, shard):
        if _is_key(result):
            result = jax.random.key_data(result)
        results.append(result[None])
    return results


def _lay_out(value: Any, spec: Spec, mesh: MeshShape) -> tuple[Any, PartitionSpec]:
    """Stacks the parts of pending axes before the dims of `value`."""
    if not _is_key(value):
        value = np.asarray(value)  # jax would compile a program to cut its own arrays
    pending = [axis for axis, state in enumerate(spec) if state < REPLICATED]
    dims = [
        tuple(mesh.axis_names[axis] for axis in axes_of_dim(spec, dim)) or None
        for dim in range(np.ndim(value))
    ]
    for axis in reversed(pending):
        value = _parts(value, spec[axis], mesh.axis_sizes[axis])
    names = [mesh.axis_names[axis] for axis in pending]
    return value, PartitionSpec(*names, *dims)


def _parts(value: np.ndarray, state: int, count: int) -> np.ndarray:
    """Arrays that sum to `value` exactly, stacked; each element is dealt at random."""
    assert state == SUM, "only sums may stay pending through an operator"
    parts = np.zeros((count, *value.shape), value.dtype)
    with np.errstate(over="ignore"):
        twice = value + value
    is_zero, can_double = value == 0, np.isfinite(twice)
    parts[0] = np.where(is_zero, 1, np.where(can_double, twice, value))
    parts[1] = np.where(is_zero, -1, np.where(can_double, -value, 0))
    return np.random.default_rng(0).permuted(parts, axis=0)


def _compare(
    shards: np.ndarray, reference: Any, spec: Spec, mesh: MeshShape, label: str
) -> None:
    """Holds every device's shard against its part of the reference."""
    if _is_key(reference):
        reference = jax.random.key_data(reference)
    reference = np.asarray(reference)
    assert shards.dtype == reference.dtype, (label, shards.dtype)
    rtol = _tolerance(reference.dtype)
    if rtol:
        shards, reference = _widened(shards), _widened(reference)
    finite = np.abs(reference[np.isfinite(reference)]) if rtol else np.zeros(0)
    atol = rtol * max(1.0, float(finite.max(initial=0)))
    shards = _closed(shards.reshape(*mesh.axis_sizes, *shards.shape[1:]), spec)
    for coordinates in np.ndindex(*mesh.axis_sizes):
        part = reference
        for dim in range(reference.ndim):
            for axis in axes_of_dim(spec, dim):
                size = part.shape[dim] // mesh.axis_sizes[axis]
                start = coordinates[axis] * size
                part = part.take(range(start, start + size), dim)
        shard = shards[coordinates]
        assert shard.shape == part.shape, (label, shard.shape, part.shape)
        if rtol:
            np.testing.assert_allclose(shard, part, rtol, atol, err_msg=label)
        else:
            np.testing.assert_array_equal(shard, part, err_msg=label)


def _closed(shards: np.ndarray, spec: Spec) -> np.ndarray:
    """The shards, indexed by mesh coordinates, after the reductions still owed."""
    reductions = {SUM: np.add, MAX: np.maximum, MIN: np.minimum}
    for axis, state in enumerate(spec):
        if state < REPLICATED:
            reduce = reductions[state].reduce
            closed = reduce(shards, axis, dtype=shards.dtype, keepdims=True)
            shards = np.broadcast_to(closed, shards.shape)
    return shards


def _is_key(value: Any) -> bool:
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key)


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _tolerance(dtype: np.dtype) -> float:
    """Relative tolerance: 0 for integers and booleans, which must be equal."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    bits = jnp.finfo(dtype).bits
    return {64: 1e-10, 32: 1e-5}.get(bits, 3e-2)
