"""What operators read, and which of them lead to a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .op_graph import Operand, Operator


def tensors_of(operands: Iterable[Operand]) -> list[int]:
    """The operands that are no literals."""
    return [operand for operand in operands if isinstance(operand, int)]


def read_by(operators: Iterable[Operator]) -> list[int]:
    """What operators read, in their order; once for each reading."""
    return [tensor for op in operators for tensor in tensors_of(op.operands)]


def leading_to(
    tensors: Iterable[int], operators: Sequence[Operator]
) -> tuple[Operator, ...]:
    """Those of `operators`, in their order, that make some tensors or what these need.

    `operators` are in executed order; what is made elsewhere ends the way.
    """
    needed, found = set(tensors), list[Operator]()
    for op in reversed(operators):
        if not needed.isdisjoint(op.results):
            found.append(op)
            needed.update(tensors_of(op.operands))
    return tuple(reversed(found))


def made_from(tensors: Iterable[int], operators: Iterable[Operator]) -> set[int]:
    """The tensors, and all results of what reads them, in executed order."""
    found = set(tensors)
    for op in operators:
        if not found.isdisjoint(tensors_of(op.operands)):
            found.update(op.results)
    return found


def updates_of(operators: Iterable[Operator]) -> frozenset[int]:
    """Indices of what is done with gradients, but for their casts and derivatives."""
    gradients, updated, found = set[int](), set[int](), set[int]()
    for op in operators:
        reads = tensors_of(op.operands)
        is_later = not updated.isdisjoint(reads)
        is_read = is_later or not gradients.isdisjoint(reads)
        is_cast = op.kind == "convert_element_type" and not is_later
        if "transpose(" in op.name or (is_read and is_cast):
            gradients.update(op.results)
        elif is_read:
            updated.update(op.results)
            found.add(op.index)
    return frozenset(found)
