"""What a factor of an operator says of padding along its dims.

Padding lies behind all else and may hold anything. Where a factor's dims reach the
result, it lies behind that, too; where they are reduced it must be neutral first.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..graph.effects import CALLBACKS
from ..graph.op_graph import Operator
from ..rules.base import KERNEL_NAMES, Factor, factors_of, rule_of
from ..rules.conv import BATCH_GROUPS, FEATURE_GROUPS
from ..rules.scatter import ACCUMULATING
from ..sharding.spec import REPLICATED, State

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
