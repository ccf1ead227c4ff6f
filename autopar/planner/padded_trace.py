"""A step whose examples are padded to a number that the devices divide.

Arguments are padded as the step begins and results cut as it ends; between them a value
is as long as its padding, which lies behind all else and holds anything. How it passes
an operator is what the operator's rule says of shards: a dim that reaches the result is
padded there too, and where one is reduced, padding is first replaced by what changes
nothing. What no factor takes is cut to its true size. So planner and lowering see a
step like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..frontend.effects import CALLBACKS
from ..frontend.tracing import TracedFunction
from ..graph.build_graph import BARRIER, COND, PINS, SCAN, SHARD_MAP, STRUCTURED, WHILE
from ..graph.op_graph import Block, Constant, Operand, Operator, OpGraph
from ..jax_compat import (
    abstract_value,
    dead_code_eliminated,
    equation_context,
    user_context,
)
from ..lowering.blocks import as_array
from ..microbatches.microbatch_runners import WholeRunner
from ..rules.base import (
    KERNEL_NAMES,
    Factor,
    Shard,
    bind_params,
    factors_of,
    greatest,
    least,
    rule_of,
)
from ..rules.conv import BATCH_GROUPS, FEATURE_GROUPS
from ..rules.cumulative import ALONG
from ..rules.elementwise import NARY, UNARY
from ..rules.random import counts_positions
from ..rules.scatter import NEUTRAL
from ..sharding.mesh import MeshShape
from ..sharding.spec import MAX, MIN, REPLICATED, SUM

SCOPE = "padded_argument"
Shape = tuple[int, ...]


def with_padding(
    traced: TracedFunction, graph: OpGraph, padded: Mapping[int, int]
) -> TracedFunction:
    """`traced`, whose graph is `graph`, with longer arguments inside.

    `padded` are, by positions of graph inputs, the sizes that dim 0 is padded to.
    """

    def run(*leaves: Any) -> list[Any]:
        runner = _PaddedRunner(graph)
        with jax.named_scope(SCOPE):
            given = [
                _lengthened(leaf, (padded[i], *leaf.shape[1:])) if i in padded else leaf
                for i, leaf in enumerate(leaves)
            ]
        block = graph.blocks[0]
        runner.zero.update(block.inputs[position] for position in padded)
        runner.wanted[0] = [graph.type_of(each).shape for each in block.outputs]
        return runner.run_block(block, given)

    types = [abstract_value(var.aval) for var in traced.jaxpr.jaxpr.invars]
    arrays = [as_array(value) for value in traced.jaxpr.consts]
    closed = jax.make_jaxpr(lambda *leaves: run(*leaves, *arrays))(*types)
    return replace(traced, jaxpr=dead_code_eliminated(closed))


def padded_arguments(graph: OpGraph) -> dict[int, int]:
    """What a padded step makes first of its arguments: tensors by tensors."""
    return {
        op.operands[0]: op.results[0]
        for op in graph.blocks[0].operators
        if op.kind == "pad"
        and op.name.startswith(f"{SCOPE}/")
        and isinstance(op.operands[0], int)
    }


@dataclass(frozen=True)
class _Part:
    """A factor along which an operator's operands and results are padded."""

    factor: Factor
    ratio: tuple[int, int]

    def padded(self, size: int) -> int:
        whole, part = self.ratio
        return size * whole // part


@dataclass(frozen=True)
class _PaddedShard(Shard):
    """What rules take for the shard of a larger tensor: all of it, padded."""

    padded_operands: tuple[Shape, ...]
    padded_results: tuple[Shape, ...]

    def operand_shape(self, op: Operator, position: int) -> Shape:
        return self.padded_operands[position]

    def result_shape(self, op: Operator, position: int = 0) -> Shape:
        return self.padded_results[position]


class _PaddedRunner(WholeRunner):
    """Runs a step's operators on values that are longer than their tensors say.

    `zero` are tensors whose padding is zero, `made_by` the operators of the others;
    `wanted` are shapes that the outputs of a block must have.
    """

    def __init__(self, graph: OpGraph) -> None:
        super().__init__(graph)
        self.zero: set[int] = set()
        self.made_by: dict[int, Operator] = {}
        self.wanted: dict[int, Sequence[Shape]] = {}
        self.copies: dict[int, dict[Any, Any]] = {}

    def write(self, tensor: int, value: Any) -> None:
        super().write(tensor, value)
        self.copies[tensor] = {}

    def run_operators(self, operators: Sequence[Operator]) -> None:
        self.made_by.update((t, op) for op in operators for t in op.results)
        super().run_operators(operators)

    def outputs(self, block: Block) -> list[Any]:
        wanted, made = self.wanted.get(block.index, ()), super().outputs(block)
        pairs = zip(block.outputs, wanted, strict=False)
        sized = [as_array(self.sized(operand, shape)) for operand, shape in pairs]
        return [*sized, *made[len(sized) :]]

    def execute(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        with equation_context(op.eqn), user_context(op.eqn):
            if op.kind in (*PINS, SHARD_MAP):
                operands = [self.sized(o, self.shape_of(o)) for o in op.operands]
            elif op.kind in (SCAN, WHILE, COND):
                operands = self.entering(op)
        return super().execute(op, operands)

    def bind(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        parts = self.parts(op)
        with equation_context(op.eqn), user_context(op.eqn):
            if parts:
                return self.bind_padded(op, parts)
            whole = [self.sized(o, self.shape_of(o)) for o in op.operands]
        return super().bind(op, whole)

    # How an operator takes padding.

    def parts(self, op: Operator) -> list[_Part]:
        """The factors along which some operand is padded, and can stay so."""
        rule = rule_of(op)
        if rule is None or not rule.may_repeat or op.kind in (*CALLBACKS, *KERNEL_NAMES):
            return []
        found: list[_Part] = []
        for factor in factors_of(op):
            ratios = self.ratios(op, factor)
            if not ratios or not _takes_padding(op, factor):
                continue
            part = _Part(factor, max(ratios, key=lambda each: each[0] / each[1]))
            if _is_whole(op, part) and not any(_meet(part, each) for each in found):
                found.append(part)
        return found

    def ratios(self, op: Operator, factor: Factor) -> list[tuple[int, int]]:
        """By how much operands are padded along a factor: sizes, and true sizes."""
        found = []
        for operand, dim in zip(op.operands, factor.operands, strict=True):
            if dim >= 0 and isinstance(operand, int):
                true, size = self.shape_of(operand)[dim], self.values[operand].shape[dim]
                found += [(size, true)] if size != true else []
        return found

    def bind_padded(self, op: Operator, parts: Sequence[_Part]) -> Sequence[Any]:
        shapes = [list(kind.shape) for kind in op.operand_types]
        made = [list(kind.shape) for kind in op.result_types]
        for part in parts:
            states = part.factor.operands, part.factor.results
            for sides, own in zip((shapes, made), states, strict=True):
                for shape, dim in zip(sides, own, strict=True):
                    if dim >= 0:
                        shape[dim] = part.padded(shape[dim])
        operands = [
            self.sized(operand, tuple(shape))
            for operand, shape in zip(op.operands, shapes, strict=True)
        ]
        neutral, reduced = None, dict[int, list[int]]()  # dims by position
        for part in parts:
            found = _neutral(op, part.factor)
            for position in _masked(op, part.factor) if found else ():
                neutral = found
                dims = reduced.setdefault(position, [])
                dims.append(part.factor.operands[position])
        for position, dims in reduced.items():
            assert neutral is not None
            given = op.operands[position], operands[position]
            operands[position] = self.masked(*given, tuple(dims), neutral)
        if op.kind in _KEEP_ZERO and op.operands[0] in self.zero:
            self.zero.update(op.results)
        return self.bound(op, parts, operands, shapes, made)

    def bound(
        self,
        op: Operator,
        parts: Sequence[_Part],
        operands: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        made: Sequence[Sequence[int]],
    ) -> Sequence[Any]:
        """The operator on operands of these shapes, as its rule binds a shard."""
        shapes, made = (tuple(map(tuple, sides)) for sides in (shapes, made))
        if op.kind in ("iota", "random_bits"):  # the rule's would count from an offset
            return bind_params(op, operands, shape=made[0])
        rule = rule_of(op)
        assert rule is not None, op.kind
        unsure = {name: False for name in _PROMISES if op.params.get(name)}
        names = tuple(f"padding{i}" for i in range(len(parts)))
        factors = tuple(part.factor for part in parts)
        shard = _PaddedShard(
            MeshShape(names, (1,) * len(parts)),
            factors,
            tuple(zip(*(f.operands for f in factors), strict=True)),
            tuple(zip(*(f.results for f in factors), strict=True)),
            shapes,
            made,
        )
        results = rule.bind(replace(op, params={**op.params, **unsure}), operands, shard)
        for result, shape in zip(results, made, strict=True):
            assert result.shape == shape, f"{op.name} makes {result.shape}, not {shape}"
        return results

    # One value, longer or shorter.

    def shape_of(self, operand: Operand) -> Shape:
        """The true shape of an operand."""
        return self.graph.type_of(operand).shape

    def sized(self, operand: Operand, shape: Shape) -> Any:
        """An operand's value, in a shape between its true one and any longer one."""
        value = self.value(operand)
        if isinstance(operand, Constant) or value.shape == shape:
            return value if value.shape == shape else _lengthened(value, shape)
        copies = self.copies[operand]
        if shape not in copies:
            copies[shape] = self.resized(operand, value, shape)
        return copies[shape]

    def resized(self, tensor: int, value: Any, shape: Shape) -> Any:
        longer = [d for d, size in enumerate(shape) if size > value.shape[d]]
        if value.shape == self.shape_of(tensor) and longer:
            if all(self.is_free(tensor, dim) for dim in longer):
                return self.made_longer(tensor, shape)
        ends = tuple(map(min, value.shape, shape))
        if ends != value.shape:
            value = lax.slice(value, (0,) * len(ends), ends)
        return _lengthened(value, shape) if longer else value

    def is_free(self, tensor: int, dim: int) -> bool:
        """Whether the operator that made a tensor could have made it longer."""
        op = self.made_by.get(tensor)
        if op is None or op.kind not in _FREE:
            return False
        if op.kind == "random_bits":
            return counts_positions(as_array(self.value(op.operands[0]))) and all(
                size == 1 for size in self.shape_of(tensor)[:dim]
            )
        factor = _along(op, dim)
        return factor is not None and all(
            state < 0 or isinstance(operand, int) and self.is_free(operand, state)
            for operand, state in zip(op.operands, factor.operands, strict=True)
        )

    def made_longer(self, tensor: int, shape: Shape) -> Any:
        """A tensor as its operator makes it of longer operands."""
        op = self.made_by[tensor]
        parts = []
        for dim, (size, true) in enumerate(
            zip(shape, self.shape_of(tensor), strict=True)
        ):
            factor = _along(op, dim)
            if size != true:
                assert factor is not None, op.name
                parts.append(_Part(factor, (size, true)))
        shapes = [list(kind.shape) for kind in op.operand_types]
        for part in parts:
            for own, dim in zip(shapes, part.factor.operands, strict=True):
                if dim >= 0:
                    own[dim] = part.padded(own[dim])
        operands = [
            self.sized(operand, tuple(own))
            for operand, own in zip(op.operands, shapes, strict=True)
        ]
        with equation_context(op.eqn), user_context(op.eqn):
            return self.bound(op, parts, operands, shapes, [shape])[0]

    def masked(
        self,
        operand: Operand,
        value: Any,
        dims: tuple[int, ...],
        neutral: Callable[[Any], Any],
    ) -> Any:
        """A value with what changes nothing as padding along `dims`."""
        number = np.asarray(neutral(value.dtype), value.dtype)
        if operand in self.zero and not number:
            return value
        assert isinstance(operand, int)
        copies, key = self.copies[operand], (value.shape, dims, number.item())
        if key not in copies:
            filled = value
            for dim in dims:
                places = lax.broadcasted_iota(np.int32, value.shape, dim)
                is_own = places < np.int32(self.shape_of(operand)[dim])
                filled = lax.select(is_own, filled, jnp.full_like(value, number))
            copies[key] = filled
        return copies[key]

    # Loops and branches.

    def entering(self, op: Operator) -> list[Any]:
        """Operands of a loop or conditional; says what its blocks must return.

        A scan takes its slices whole along the dim that it goes through. What is carried
        stays as long as it begins; what could begin longer does, like its neighbours.
        """
        sizes: dict[int, int] = {}
        shapes = []
        for position, operand in enumerate(op.operands):
            true, shape = self.shape_of(operand), np.shape(self.value(operand))
            if op.kind == SCAN and position >= _first_slice(op):
                shape = (*true[:1], *shape[1:])
            shapes.append(shape)
            sizes.update(
                {t: s for t, s in zip(true, shape, strict=True) if s != t}
            )

        def like_others(shape: Shape) -> Shape:
            return tuple(sizes.get(size, size) for size in shape)

        if op.kind == COND:
            kept = [like_others(kind.shape) for kind in op.result_types]
            self.wanted.update(dict.fromkeys(op.bodies, kept))
        else:
            first = op.params["num_consts"] if op.kind == SCAN else _first_carry(op)
            count = op.params["num_carry"] if op.kind == SCAN else len(op.results)
            for position in range(first, first + count):
                operand = op.operands[position]
                if self.could_be(operand, longer := like_others(shapes[position])):
                    shapes[position] = longer
            self.wanted[op.bodies[-1]] = shapes[first : first + count]
        return [self.sized(o, s) for o, s in zip(op.operands, shapes, strict=True)]

    def could_be(self, operand: Operand, shape: Shape) -> bool:
        """Whether an operand that is not padded could as well be made longer."""
        true = self.shape_of(operand)
        if isinstance(operand, Constant) or self.values[operand].shape != true:
            return False
        longer = [d for d, size in enumerate(shape) if size != true[d]]
        return all(self.is_free(operand, dim) for dim in longer)


_PROMISES = ("indices_are_sorted", "unique_indices")  # padding does not keep them
_FREE = frozenset((*UNARY, *NARY, "iota", "broadcast_in_dim", "random_bits"))
_KEEP_ZERO = ("convert_element_type", "copy", "neg", "reshape", "squeeze", "transpose")
_REDUCING = frozenset(
    (
        *(f"reduce_{name}" for name in ("sum", "max", "min", "or", "and")),
        *(f"scatter-{name}" for name in ("add", "sub", "max", "min")),
        *("dot_general", "conv_general_dilated"),
    )
)
_NEUTRAL: dict[int, Callable[[Any], Any]] = {
    SUM: lambda dtype: 0,
    MAX: least,
    MIN: greatest,
}
_ACCUMULATED: dict[str, Callable[[Any], Any]] = {
    "cumsum": lambda dtype: 0,
    "cumprod": lambda dtype: 1,
    "cummax": least,
    "cummin": greatest,
    "cumlogsumexp": least,
}


def _neutral(op: Operator, factor: Factor) -> Callable[[Any], Any] | None:
    """What padding must be where it is reduced along a factor; None where it is not."""
    if factor.name == ALONG:
        return _ACCUMULATED[op.kind]
    return next((_NEUTRAL[state] for state in factor.results if state < REPLICATED), None)


def _masked(op: Operator, factor: Factor) -> list[int]:
    """The operands whose padding is replaced: of a scatter, its updates alone."""
    if op.kind in NEUTRAL:
        return [2]
    return [i for i, dim in enumerate(factor.operands) if dim >= 0]


def _takes_padding(op: Operator, factor: Factor) -> bool:
    """Whether results are right whatever lies behind the end of a factor's dims."""
    if factor.name == ALONG:
        return True
    if factor.halos or factor.is_positional or not factor.splits:
        return False
    if factor.name in (BATCH_GROUPS, FEATURE_GROUPS):  # their number is not padded
        return False
    is_reduced = any(state < REPLICATED for state in factor.results)
    return op.kind in _REDUCING if is_reduced else True


def _is_whole(op: Operator, part: _Part) -> bool:
    """Whether all dims of a factor are padded alike, to a whole number."""
    whole, true = part.ratio
    sides = (
        (op.operand_types, part.factor.operands),
        (op.result_types, part.factor.results),
    )
    sizes = [
        kind.shape[dim]
        for types, states in sides
        for kind, dim in zip(types, states, strict=True)
        if dim >= 0
    ]
    if op.kind != "reshape":
        return all(size == part.factor.size for size in sizes)
    return all(size * whole % true == 0 for size in sizes)


def _meet(part: _Part, other: _Part) -> bool:
    """Whether two factors cut one dim of some operand or result."""
    pairs = zip(
        (*part.factor.operands, *part.factor.results),
        (*other.factor.operands, *other.factor.results),
        strict=True,
    )
    return any(one == another >= 0 for one, another in pairs)


def _along(op: Operator, dim: int) -> Factor | None:
    """The factor that cuts the first result along `dim`."""
    found = (f for f in factors_of(op) if f.results and f.results[0] == dim)
    return next(found, None)


def _first_slice(op: Operator) -> int:
    return op.params["num_consts"] + op.params["num_carry"]


def _first_carry(op: Operator) -> int:
    return op.params["cond_nconsts"] + op.params["body_nconsts"]


def _lengthened(value: Any, shape: Shape) -> Any:
    """An array with zeros behind it along the dims that are shorter than `shape`."""
    config = [(0, size - own, 0) for own, size in zip(value.shape, shape, strict=True)]
    return lax.pad(value, np.zeros((), value.dtype), config)


assert {BARRIER, *PINS, SHARD_MAP, SCAN, WHILE, COND} == set(STRUCTURED)
