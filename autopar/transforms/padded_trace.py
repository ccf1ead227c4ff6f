"""A step whose examples are padded to a number that the devices divide.

Arguments are padded as the step begins and results cut as it ends; between them a value
is as long as its padding. How padding passes an operator is what the operator's rule
says of shards; what no factor takes is cut to its true size. So planner and lowering
see a step like any other.

Padding lies behind all else and may hold anything. Where a factor's dims reach the
result, it lies behind that, too; where they are reduced it must be neutral first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..graph.blocks import as_array
from ..graph.build_graph import COND, PINS, SCAN, SHARD_MAP, WHILE
from ..graph.effects import CALLBACKS
from ..graph.op_graph import Block, Constant, Operand, Operator, OpGraph
from ..graph.traced_function import TracedFunction
from ..jax_compat import equation_context, user_context
from ..microbatches.retracing import WholeRunner
from ..rules.base import KERNEL_NAMES, Factor, Shard, factors_of, neutral, rule_of
from ..rules.conv import BATCH_GROUPS, FEATURE_GROUPS
from ..rules.scatter import ACCUMULATING
from ..sharding.spec import REPLICATED, Spec, State

_SCOPE = "padded_argument"
_PROMISES = ("indices_are_sorted", "unique_indices")  # padding does not keep them
_KEEP_ZERO = ("convert_element_type", "copy", "neg", "reshape", "squeeze", "transpose")


def with_padding(
    traced: TracedFunction, graph: OpGraph, padded: Mapping[int, int]
) -> TracedFunction:
    """`traced`, whose graph is `graph`, with longer arguments inside.

    `padded` are, by positions of graph inputs, the sizes that dim 0 is padded to.
    """
    runner = _PaddedRunner(graph, padded)
    runner.zero.update(graph.blocks[0].inputs[position] for position in padded)
    runner.wanted[0] = [graph.type_of(each).shape for each in graph.blocks[0].outputs]
    return runner.retraced(traced)


def padded_arguments(graph: OpGraph) -> dict[Operand, int]:
    """What a padded step makes first of its arguments, by them."""
    return {
        op.operands[0]: op.results[0]
        for op in graph.blocks[0].operators
        if op.kind == "pad" and op.name.startswith(f"{_SCOPE}/")
    }


@dataclass(frozen=True)
class _PaddedShard(Shard):
    """What rules take for the shard of a larger tensor: all of it, padded."""

    padded: Sequence[PaddedFactor]

    def local(self, shape: Shape, spec: Spec) -> Shape:
        sizes = list(shape)
        for each, dim in zip(self.padded, spec, strict=True):
            if dim >= 0:
                sizes[dim] = each.longer(sizes[dim])
        return tuple(sizes)


class _PaddedRunner(WholeRunner):
    """Runs a step's operators on values that may be longer than their tensors say.

    `zero` are tensors whose padding is zero; `wanted` are shapes that the outputs of a
    block must have, those behind them any.
    """

    def __init__(self, graph: OpGraph, padded: Mapping[int, int]) -> None:
        super().__init__(graph)
        self.padded = padded
        self.zero: set[int] = set()
        self.wanted: dict[int, Sequence[Shape]] = {}
        self.copies: dict[int, dict[Any, Any]] = {}  # of other shapes, or masked
        self.filled = {
            op.results[0]: op.operands[0]
            for op in graph.operators()
            if op.kind == "broadcast_in_dim" and not op.operand_types[0].rank
        }

    def write(self, tensor: int, value: Any) -> None:
        super().write(tensor, value)
        self.copies[tensor] = {}

    def run_block(self, block: Block, inputs: Sequence[Any]) -> list[Any]:
        given = list(inputs)
        with jax.named_scope(_SCOPE):
            for at, size in self.padded.items() if block.index == 0 else ():
                given[at] = _lengthened(given[at], (size, *given[at].shape[1:]))
        return super().run_block(block, given)

    def outputs(self, block: Block) -> list[Any]:
        wanted, made = self.wanted.get(block.index, ()), super().outputs(block)
        pairs = zip(block.outputs, wanted, strict=False)
        sized = [as_array(self.sized(operand, shape)) for operand, shape in pairs]
        return [*sized, *made[len(sized) :]]

    def execute(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        with equation_context(op.eqn), user_context(op.eqn):
            if op.kind in (*PINS, SHARD_MAP):
                operands = self.whole_operands(op)
            elif op.kind in (SCAN, WHILE, COND):
                operands = self.entering(op)
        return super().execute(op, operands)

    def bind(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        with equation_context(op.eqn), user_context(op.eqn):
            factors = self.factors(op)
            if factors:
                return self.bind_padded(op, factors)
            operands = self.whole_operands(op)
        return super().bind(op, operands)

    def whole_operands(self, op: Operator) -> list[Any]:
        """All operands without padding."""
        return [self.sized(each, self.true_shape(each)) for each in op.operands]

    # An operator with padding.

    def factors(self, op: Operator) -> list[PaddedFactor]:
        """The factors along which some operand is padded, and stays so."""
        found: list[PaddedFactor] = []
        for factor in padding_factors(op):
            sizes = self.padded_sizes(op, factor)
            if not sizes:
                continue
            each = PaddedFactor(factor, *max(sizes, key=lambda pair: pair[0] / pair[1]))
            if each.fits(op) and not any(map(each.meets, found)):
                found.append(each)
        return found

    def padded_sizes(self, op: Operator, factor: Factor) -> list[tuple[int, int]]:
        """The sizes of operands along a factor where they are not the true ones."""
        pairs = [
            (self.values[operand].shape[dim], self.true_shape(operand)[dim])
            for operand, dim in zip(op.operands, factor.operands, strict=True)
            if dim >= 0 and isinstance(operand, int)
        ]
        return [(size, true) for size, true in pairs if size != true]

    def bind_padded(self, op: Operator, factors: list[PaddedFactor]) -> Sequence[Any]:
        """The operator padded along factors, as its rule binds a shard."""
        own = [each.factor for each in factors]
        shard = _PaddedShard.of(own, [1] * len(own), factors)
        operands = [
            self.sized(operand, shard.operand_shape(op, position))
            for position, operand in enumerate(op.operands)
        ]
        self.mask_reduced(op, factors, operands)
        if op.operands and op.operands[0] in self.zero and op.kind in _KEEP_ZERO:
            self.zero.update(op.results)
        unsure = {name: False for name in _PROMISES if op.params.get(name)}
        rule = rule_of(op)
        assert rule is not None, op.kind
        unsorted = replace(op, params={**op.params, **unsure})
        results = rule.bind(unsorted, operands, shard)
        for position, result in enumerate(results):
            shape = shard.result_shape(op, position)
            assert result.shape == shape, f"{op.name} makes {result.shape}, not {shape}"
        return results

    def mask_reduced(
        self, op: Operator, factors: Sequence[PaddedFactor], operands: list[Any]
    ) -> None:
        """Replaces operands that are reduced along padded dims."""
        reduced: dict[tuple[int, State], list[int]] = {}
        for each in factors:
            for position, dim in each.reduced_dims(op).items():
                reduced.setdefault((position, each.reduction), []).append(dim)
        for (position, reduction), dims in reduced.items():
            tensor, value = op.operands[position], operands[position]
            assert isinstance(tensor, int), op.name
            operands[position] = self.masked(tensor, value, dims, reduction)

    def masked(
        self, tensor: int, value: Any, dims: Sequence[int], reduction: State
    ) -> Any:
        """A value with what changes nothing as padding along `dims`."""
        number = np.asarray(neutral(reduction, value.dtype), value.dtype)
        if tensor in self.zero and not number:
            return value
        copies, key = self.copies[tensor], (value.shape, tuple(dims), number.item())
        if key not in copies:
            copies[key] = value
            for dim in dims:
                places = lax.broadcasted_iota(np.int32, value.shape, dim)
                is_own = places < np.int32(self.true_shape(tensor)[dim])
                others = jnp.full_like(value, number)
                copies[key] = lax.select(is_own, copies[key], others)
        return copies[key]

    # A value, longer or shorter.

    def true_shape(self, operand: Operand) -> Shape:
        return self.graph.type_of(operand).shape

    def sized(self, operand: Operand, shape: Shape) -> Any:
        """An operand's value in its true shape, or a longer one."""
        value = self.value(operand)
        if np.shape(value) == shape:
            return value
        if isinstance(operand, Constant):
            return _lengthened(value, shape)
        copies = self.copies[operand]
        filled = self.filled.get(operand)
        if shape not in copies and filled is not None:
            copies[shape] = lax.broadcast(as_array(self.value(filled)), shape)
        if shape not in copies:
            ends = tuple(map(min, value.shape, shape))
            if ends != value.shape:
                value = lax.slice(value, (0,) * len(ends), ends)
            copies[shape] = _lengthened(value, shape)
        return copies[shape]

    # Loops and branches.

    def entering(self, op: Operator) -> list[Any]:
        """Operands of a loop or conditional; says what its blocks must return.

        A scan reads its slices whole along the dim that it goes through. What is
        carried is as long as what is beside it.
        """
        shapes, sizes = [], dict[int, int]()  # padded by true
        params, first, count = op.params, 0, 0
        if op.kind == SCAN:
            first, count = params["num_consts"], params["num_carry"]
        elif op.kind == WHILE:
            first = params["cond_nconsts"] + params["body_nconsts"]
            count = len(op.results)
        for position, operand in enumerate(op.operands):
            true, shape = self.true_shape(operand), np.shape(self.value(operand))
            if op.kind == SCAN and position >= first + count:
                shape = (*true[:1], *shape[1:])
            shapes.append(shape)
            sizes |= {t: s for t, s in zip(true, shape, strict=True) if s != t}

        def like_others(shape: Shape) -> Shape:
            return tuple(sizes.get(size, size) for size in shape)

        carried = slice(first, first + count)
        wanted = shapes[carried] = list(map(like_others, shapes[carried]))
        if op.kind == COND:
            wanted = [like_others(kind.shape) for kind in op.result_types]
        for body in op.bodies[1:] if op.kind == WHILE else op.bodies:
            self.wanted[body] = wanted
        return [self.sized(o, s) for o, s in zip(op.operands, shapes, strict=True)]


def _lengthened(value: Any, shape: Shape) -> Any:
    """An array with zeros behind it along the dims that are shorter than `shape`."""
    pairs = zip(np.shape(value), shape, strict=True)
    config = [(0, size - own, 0) for own, size in pairs]
    return lax.pad(value, np.zeros((), value.dtype), config)


Shape = tuple[int, ...]
_REDUCING = frozenset(
    (
        *(f"reduce_{name}" for name in ("sum", "max", "min", "or", "and")),
        *(f"scatter-{name}" for name in ("add", "sub", "max", "min")),
        *("dot_general", "conv_general_dilated"),
    )
)


@dataclass(frozen=True)
class PaddedFactor:
    """A factor along which operands and results are padded, all by one ratio."""

    factor: Factor
    padded_size: int
    true_size: int

    def longer(self, size: int) -> int:
        """What a dim of a true size is padded to."""
        return size * self.padded_size // self.true_size

    def fits(self, op: Operator) -> bool:
        """Whether all dims of the factor are padded alike, to a whole number."""
        types = (*op.operand_types, *op.result_types)
        states = (*self.factor.operands, *self.factor.results)
        sizes = [t.shape[d] for t, d in zip(types, states, strict=True) if d >= 0]
        if op.kind != "reshape":
            return all(size == self.factor.size for size in sizes)
        return all(size * self.padded_size % self.true_size == 0 for size in sizes)

    def meets(self, other: PaddedFactor) -> bool:
        """Whether both cut one dim of some operand or result."""
        own = (*self.factor.operands, *self.factor.results)
        others = (*other.factor.operands, *other.factor.results)
        return any(a == b >= 0 for a, b in zip(own, others, strict=True))

    @property
    def reduction(self) -> State:
        """How padded dims are reduced; REPLICATED where they are not."""
        return min(REPLICATED, *self.factor.results)

    def reduced_dims(self, op: Operator) -> dict[int, int]:
        """Dims that are reduced, by operand: of a scatter, those of the updates."""
        if self.reduction == REPLICATED:
            return {}
        states = enumerate(self.factor.operands)
        only = (2,) if op.kind in ACCUMULATING else range(len(op.operands))
        return {i: dim for i, dim in states if dim >= 0 and i in only}


def padding_factors(op: Operator) -> list[Factor]:
    """The factors of an operator whose dims may be padded.

    What a rule of the user's own reduces, it may reduce in any way.
    """
    rule = rule_of(op)
    if rule is None or not rule.may_repeat or op.kind in (*CALLBACKS, *KERNEL_NAMES):
        return []
    return [factor for factor in factors_of(op) if _takes_padding(op, factor)]


def _takes_padding(op: Operator, factor: Factor) -> bool:
    """Whether results are right whatever lies behind the end of a factor's dims."""
    if factor.halos or factor.is_positional or not factor.splits:
        return False
    if factor.name in (BATCH_GROUPS, FEATURE_GROUPS):  # their number is a parameter
        return False
    is_reduced = any(state < REPLICATED for state in factor.results)
    return op.kind in _REDUCING if is_reduced else True
