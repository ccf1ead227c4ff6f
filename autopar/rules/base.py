"""The one form every rule has: which factors an operator's dims share.

A *factor* says what one mesh axis may do to an operator: for each operand and result
the state it must have along that axis. `dot_general` on `bmk,bkn->bmn` has four: b, m
and n (parallel: a dim of the result) and k (a reduction: the result is pending). A
linear operator has one more for each operand that may stay pending. A *strategy* gives
every mesh axis one factor, or REPLICATE; operand and result specs follow.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph.op_graph import Constant, Operator, TensorType
from ..jax_compat import bind
from ..sharding.mesh import MeshShape
from ..sharding.spec import MAX, REPLICATED, SUM, Spec, State, axes_of_dim, local_shape
from .host_calls import HostCalls


@dataclass(frozen=True)
class Halo:
    """What a shard shares with its neighbours along a dim that a factor splits.

    An operand's shard is read with `before` elements of the shard before it and `after`
    of the one behind it; fewer than none are its own elements that are not read. A
    result's shard (`is_result`) overhangs by as many, which its neighbours add to
    theirs. `size` is that of the whole dim.
    """

    position: int
    dim: int
    size: int
    before: int
    after: int
    is_result: bool = False


@dataclass(frozen=True)
class Factor:
    """States of operands and results along one mesh axis.

    `size`: the product of the axes on this factor must divide it (0: any product may).
    `splits`: whether the work is divided by the axis; a factor that only carries a
    pending sum through a linear operator repeats the work on every shard.
    `is_positional`: the local work depends on which part of the dim a shard holds (an
    index is shifted by its offset), so the parts must be contiguous.
    `halos`: what shards exchange with their neighbours (`halos.py`).
    `excludes`: the name of a factor that no other axis may have at once.
    """

    name: str
    operands: tuple[State, ...]
    results: tuple[State, ...]
    size: int
    splits: bool = True
    is_positional: bool = False
    halos: tuple[Halo, ...] = ()
    excludes: str = ""

    def admits(self, num_parts: int) -> bool:
        """Whether it can be cut in so many parts, with no halo wider than a part."""
        if self.size % num_parts:
            return False
        return num_parts == 1 or all(
            max(halo.before, halo.after) * num_parts <= halo.size for halo in self.halos
        )


def replicate(op: Operator) -> Factor:
    """The factor every operator has: everything whole, the work repeated."""
    return Factor(
        "-",
        (REPLICATED,) * len(op.operands),
        (REPLICATED,) * len(op.results),
        size=0,
        splits=False,
    )


def shared_dims(
    op: Operator,
    dims: Iterable[tuple[int, int]],
    *,
    num_whole: int = 0,
    letter: str = "d",
) -> list[Factor]:
    """A factor for each dim of the operands, beside the one of the results that it is.

    The last `num_whole` operands stay whole. Factors are called by `letter`.
    """
    num_split = len(op.operands) - num_whole
    return [
        Factor(
            f"{letter}{dim}",
            (dim,) * num_split + (REPLICATED,) * num_whole,
            (result_dim,) * len(op.results),
            op.operand_types[0].shape[dim],
        )
        for dim, result_dim in dims
    ]


def cuts_evenly(op: Operator, factor: Factor, number: int) -> bool:
    """Whether each dim that a factor cuts has a multiple of `number` elements."""
    types = (*op.operand_types, *op.result_types)
    pairs = zip(types, (*factor.operands, *factor.results), strict=True)
    sizes = [kind.shape[state] for kind, state in pairs if state >= 0]
    return all(size > 0 and size % number == 0 for size in sizes)


@dataclass(frozen=True)
class Shard:
    """What a rule may ask while it binds its primitive on one device's shards."""

    mesh: MeshShape
    factors: tuple[Factor, ...]  # one per mesh axis
    operand_specs: tuple[Spec, ...]
    result_specs: tuple[Spec, ...]
    # Of the program that is made; None while a function is traced again.
    host_calls: HostCalls | None = field(default=None, kw_only=True)
    is_of_program: bool = field(default=False, kw_only=True)

    @classmethod
    def of(cls, factors: Sequence[Factor], sizes: Sequence[int], *more: Any) -> Self:
        """A shard whose axes, of `sizes`, have a factor each; `more` are its own."""
        return cls(
            MeshShape(tuple(map(str, range(len(sizes)))), tuple(sizes)),
            tuple(factors),
            tuple(zip(*(factor.operands for factor in factors), strict=True)),
            tuple(zip(*(factor.results for factor in factors), strict=True)),
            *more,
        )

    def operand_shape(self, op: Operator, position: int) -> tuple[int, ...]:
        """Local shape of an operand."""
        shape = op.operand_types[position].shape
        return self.local(shape, self.operand_specs[position])

    def result_shape(self, op: Operator, position: int = 0) -> tuple[int, ...]:
        """Local shape of a result."""
        shape = op.result_types[position].shape
        return self.local(shape, self.result_specs[position])

    def local(self, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
        """The shape of the shard of a tensor."""
        return local_shape(shape, spec, self.mesh.axis_sizes)

    def block_index(self, axes: Sequence[int]) -> jax.Array:
        """This device's position along `axes` taken together, the first most major."""
        index = jnp.int32(0)
        for axis in axes:
            position = lax.axis_index(self.mesh.axis_names[axis])
            index = index * self.mesh.axis_sizes[axis] + position
        return index

    def offset(self, spec: Spec, dim: int, local_size: int) -> jax.Array:
        """Where this device's shard starts along `dim` of a tensor with `spec`."""
        return self.block_index(axes_of_dim(spec, dim)) * local_size

    def axes_with(self, name: str) -> tuple[int, ...]:
        """The mesh axes that were given the factor called `name`."""
        return tuple(i for i, factor in enumerate(self.factors) if factor.name == name)

    def is_first(self, axes: Sequence[int]) -> jax.Array:
        """Whether this device is at position 0 along all `axes`: holder of a sum."""
        return self.block_index(axes) == 0


Factors = Callable[[Operator], Sequence[Factor]]
Bind = Callable[[Operator, Sequence[Any], Shard], Sequence[Any]]


def bind_params(op: Operator, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Bind the operator's own primitive, with some of its params replaced."""
    return bind(op.eqn.primitive, operands, {**op.params, **changed})


def bind_unchanged(op: Operator, operands: Sequence[Any], shard: Shard) -> list[Any]:
    """Bind the primitive as it is: for operators whose params hold no shapes."""
    del shard
    return bind_params(op, operands)


def bind_shard(op: Operator, operands: Sequence[Any], shard: Shard) -> Sequence[Any]:
    """Bind the operator on a shard as its rule does, if it has one."""
    rule = rule_of(op)
    bind = rule.bind if rule is not None else bind_unchanged
    return bind(op, operands, shard)


def stay_whole(op: Operator) -> list[Factor]:
    """No factors: a rule for what is known to be best computed on every device."""
    del op
    return []


@dataclass(frozen=True)
class Rule:
    """Factors of an operator, and how it runs on local shards.

    `may_repeat`: every device may compute the whole of it, which is right for all but
    what has side effects.
    """

    factors: Factors
    bind: Bind = bind_unchanged
    may_repeat: bool = True


_RULES: dict[str, Rule] = {}
_COUNT = "count"  # how factors of pending sums of integers are called
# Which param of a primitive that runs kernels names the kernel.
KERNEL_NAMES = {"pallas_call": "name", "ffi_call": "target_name"}


def register(
    *kinds: str,
    bind: Bind = bind_unchanged,
    may_repeat: bool = True,
) -> Callable[[Factors], Factors]:
    """Make the decorated function the factors of the primitives named `kinds`."""

    def decorate(factors: Factors) -> Factors:
        for kind in kinds:
            assert kind not in _RULES, f"two rules for {kind}"
            _RULES[kind] = Rule(factors, bind, may_repeat)
        return factors

    return decorate


def replace_rule(kind: str, rule: Rule) -> None:
    """Give a primitive a rule, in place of the one it may have."""
    _RULES[kind] = rule


def rule_of(op: Operator) -> Rule | None:
    """The rule of an operator, or None: then it is computed whole on every device.

    One primitive runs every Pallas kernel, and one every FFI call, so that their rules
    are those of `pallas_call:name` and `ffi_call:target_name`. A Pallas kernel without
    its own has that of `pallas_call`, where that finds something to split.
    """
    own = _RULES.get(rule_name(op))
    if own is None and op.kind == "pallas_call" and _RULES[op.kind].factors(op):
        return _RULES[op.kind]
    return own


def rule_name(op: Operator) -> str:
    """What the rule of an operator is registered as: its primitive, or its kernel."""
    if op.kind not in KERNEL_NAMES:
        return op.kind
    name = op.params[KERNEL_NAMES[op.kind]]
    # A Pallas kernel that is given no name has that of its function.
    return f"{op.kind}:{name or op.params['jaxpr'].debug_info.func_name}"


def registered_kinds() -> frozenset[str]:
    """What has a rule, by the name it is registered as."""
    return frozenset(_RULES)


def registered_rules() -> Mapping[str, Rule]:
    """Every rule, by what it is registered as."""
    return MappingProxyType(_RULES)


def factors_of(op: Operator, *, counting: bool = False) -> tuple[Factor, ...]:
    """All legal factors of an operator, REPLICATE first if it may be repeated.

    Factors of size 1 are left out, as are those that would need a literal operand to be
    anything but whole, or would split a PRNG key; so are those in which sums of
    integers stay pending, unless asked for (`counting`).
    """
    rule = rule_of(op)
    found = [replicate(op)] if rule is None or rule.may_repeat else []
    seen = {(factor.operands, factor.results) for factor in found}
    offered = list(rule.factors(op)) if rule is not None else []
    for factor in offered:
        assert len(factor.operands) == len(op.operands), (op.kind, factor)
        assert len(factor.results) == len(op.results), (op.kind, factor)
        if factor.size == 1 or (factor.operands, factor.results) in seen:
            continue
        if not counting and factor.name.startswith(_COUNT):
            continue
        if any(
            state != REPLICATED and isinstance(operand, Constant)
            for state, operand in zip(factor.operands, op.operands, strict=True)
        ):
            continue
        types = (*op.operand_types, *op.result_types)
        states = (*factor.operands, *factor.results)
        if any(
            kind.is_extended and state != REPLICATED
            for kind, state in zip(types, states, strict=True)
        ):
            continue
        seen.add((factor.operands, factor.results))
        found.append(factor)
    return tuple(found)


def warn_fallback(op: Operator, moved_bytes: int) -> None:
    """Say once per source line that an operator without a rule is computed whole."""
    from ..errors import FallbackWarning

    warnings.warn(
        f"The primitive {op.kind!r} has no sharding rule, so its operands are gathered "
        f"({moved_bytes:,} bytes) and every device computes it whole ({op.source}). "
        f"Results stay right; for speed, say how it splits: "
        f"autopar.register_rule({rule_name(op)!r}, ...).",
        FallbackWarning,
        stacklevel=2,
    )


def linear(op: Operator, pending: Sequence[int], name: str = "sum") -> Factor:
    """A pending sum passes from the operands at `pending` to every result.

    The operator must be linear in those operands taken together, the others whole.
    """
    operands = [REPLICATED] * len(op.operands)
    for position in pending:
        operands[position] = SUM
    return Factor(
        f"{name}{','.join(map(str, pending))}",
        tuple(operands),
        (SUM,) * len(op.results),
        size=0,
        splits=False,
    )


def is_inexact(kind: TensorType) -> bool:
    """Whether the elements are real or complex numbers, of any width."""
    return bool(jnp.issubdtype(kind.dtype, jnp.inexact))


def neutral(reduction: State, dtype: Any) -> Any:
    """What changes no sum, maximum or minimum."""
    if reduction == SUM:
        return 0
    is_least = reduction == MAX
    if dtype == np.bool_:
        return not is_least
    if not jnp.issubdtype(dtype, jnp.floating):
        limits = jnp.iinfo(dtype)
    elif np.isinf(np.array(jnp.inf, dtype)):
        return -jnp.inf if is_least else jnp.inf
    else:
        limits = jnp.finfo(dtype)
    return limits.min if is_least else limits.max


def pending_sums(op: Operator, *groups: Sequence[int]) -> list[Factor]:
    """`linear` for each group of operands, if results are numbers.

    Integers are exact, as they wrap, but for division.
    """
    if all(is_inexact(kind) for kind in op.result_types):
        return [linear(op, group) for group in groups]
    is_count = all(jnp.issubdtype(kind.dtype, jnp.integer) for kind in op.result_types)
    if not is_count or op.kind == "div":
        return []
    return [linear(op, group, _COUNT) for group in groups]
