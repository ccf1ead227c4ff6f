"""The forward and the backward pass of a differentiated step, and its residuals.

`jax.grad` names what it transposes; what reads a transposed value comes later, too:
the update. A residual is made in the forward pass and read in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .build_graph import SCAN
from .dependencies import read_by, tensors_of
from .op_graph import Block, Operand, Operator

_TRANSPOSED = "transpose("


@dataclass(frozen=True, eq=False)
class Phases:
    """Operators of one block: `forward`, `backward`, and what is made of both: `after`.

    Each is in traced order.
    """

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    after: tuple[Operator, ...]

    @classmethod
    def of(cls, block: Block) -> Phases:
        """The phases of a block's operators."""
        forward, backward, after = [], [], []
        later: set[int] = set()
        for op in block.operators:
            if _TRANSPOSED in op.name:
                backward.append(op)
            elif later.isdisjoint(tensors_of(op.operands)):
                forward.append(op)
                continue
            else:
                after.append(op)
            later.update(op.results)
        return cls(tuple(forward), tuple(backward), tuple(after))

    def residuals(self) -> tuple[int, ...]:
        """What forward operators make and backward operators read, in made order."""
        made = {t: None for op in self.forward for t in op.results}
        read = set(read_by(self.backward))
        return tuple(t for t in made if t in read)


@dataclass(frozen=True, eq=False)
class ScanPair:
    """A loop and the loop of its backward pass, which reads what the first stacked.

    `residuals` are (position among the stacked results of `forward`, position among
    the slices of `backward`).
    """

    forward: Operator
    backward: Operator
    residuals: tuple[tuple[int, int], ...]


def scan_pairs(phases: Phases) -> list[ScanPair]:
    """The loops of a block whose backward pass is a loop of the same length."""
    makers = {
        t: (op, position)
        for op in phases.forward
        if op.kind == SCAN
        for position, t in enumerate(stacked_results(op))
    }
    pairs = []
    for op in phases.backward:
        if op.kind != SCAN:
            continue
        found: dict[int, list[tuple[int, int]]] = {}
        forward: dict[int, Operator] = {}
        for position, operand in enumerate(sliced_operands(op)):
            if isinstance(operand, int) and operand in makers:
                maker, stacked = makers[operand]
                if maker.params["length"] == op.params["length"]:
                    forward[maker.index] = maker
                    found.setdefault(maker.index, []).append((stacked, position))
        pairs += [ScanPair(forward[i], op, tuple(found[i])) for i in found]
    return pairs


def stacked_results(scan: Operator) -> tuple[int, ...]:
    """What a scan stacks over its iterations."""
    return scan.results[scan.params["num_carry"] :]


def sliced_operands(scan: Operator) -> Sequence[Operand]:
    """What a scan reads a slice of in each iteration."""
    return scan.operands[scan.params["num_consts"] + scan.params["num_carry"] :]
