"""Ports: how tensors enter and leave the blocks of a scan, while, cond or barrier.

A port is one tensor in one spec, on both sides of the border. The carry of a loop is
one port, so it has one spec before, inside and after the loop; a branch result is one
port, so every branch returns it in one spec; predicates are whole on every device.
Pins, and the operands and results of a user's shard_map, are ports with a constraint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ..graph.build_graph import BARRIER, COND, PINS, SCAN, SHARD_MAP, WHILE
from ..graph.op_graph import (
    Block,
    Constant,
    Operand,
    Operator,
    OpGraph,
    TensorType,
    is_zero,
)
from .constraints import Constraint, border_constraints, constraint_of
from .mesh import MeshShape
from .pins import Pin

Site = tuple[Literal["operand", "output"], int, int]  # operator or block, position
Write = tuple[int, int]  # tensor, leading dims it has more than the port
Read = tuple[int, int, Site]


@dataclass(frozen=True)
class Port:
    """One decision at the border: the spec of all tensors it reads and writes.

    `is_whole`: it can only be replicated, as the program itself holds the value or
    every device must take the same branch. `constraint`: what the step asks for here.
    """

    name: str
    type: TensorType
    writes: tuple[Write, ...]
    reads: tuple[Read, ...]
    is_whole: bool = False
    constraint: Constraint | None = None

    def pin(self, mesh: MeshShape) -> Pin | None:
        """The specs that the constraint leaves on `mesh`; None: all of them."""
        return self.constraint and self.constraint.pin(self.type, mesh)

    @property
    def is_stacked(self) -> bool:
        """Whether each iteration of a scan adds one to a stack of them."""
        return any(extra for _, extra in self.writes)

    def may_be_pending(self, mesh: MeshShape) -> bool:
        """A sum may stay pending across the border; a predicate or pin may not."""
        return not self.is_whole and self.pin(mesh) is None


def ports_of(graph: OpGraph, op: Operator) -> tuple[Port, ...]:
    """The ports of a structured operator."""
    blocks = [graph.blocks[body] for body in op.bodies]
    ports = {
        BARRIER: _barrier_ports,
        SCAN: _scan_ports,
        WHILE: _while_ports,
        COND: _cond_ports,
        SHARD_MAP: _shard_map_ports,
        **dict.fromkeys(PINS, _pin_ports),
    }[op.kind]
    return tuple(ports(op, blocks))


def _port(
    name: str,
    kind: TensorType,
    writes: Iterable[Write],
    sources: Iterable[tuple[Operand, int, Site]],
    *,
    whole: bool = False,
) -> Port:
    reads = []
    for operand, extra, site in sources:
        if isinstance(operand, Constant):
            whole |= bool(kind.shape) or not is_zero(operand)  # zero is a sum of zeros
        else:
            reads.append((operand, extra, site))
    return Port(name, kind, tuple(writes), tuple(reads), whole)


def barriers_of(block: Block) -> Iterator[tuple[Operator, tuple[int, int]]]:
    """(barrier, (tensor, what it is called behind it)) in the order of the block."""
    for op in block.operators:
        tensors = [each for each in op.operands if isinstance(each, int)]
        if op.kind == BARRIER and len(tensors) == len(op.results):
            for pair in zip(tensors, op.results, strict=True):
                yield op, pair


def _barrier_ports(op: Operator, blocks: Sequence[Block]) -> Iterator[Port]:
    for position, (operand, result) in enumerate(
        zip(op.operands, op.results, strict=True)
    ):
        yield _port(
            f"{op.name}:{position}",
            op.result_types[position],
            [(result, 0)],
            [(operand, 0, ("operand", op.index, position))],
        )


def _pin_ports(op: Operator, blocks: Sequence[Block]) -> Iterator[Port]:
    (port,) = _barrier_ports(op, blocks)
    yield replace(port, constraint=constraint_of(op))


def _shard_map_ports(op: Operator, blocks: Sequence[Block]) -> Iterator[Port]:
    """A port for each operand and result; none is on both sides of the border."""
    operands, results = border_constraints(op)
    for position, constraint in enumerate(operands):
        source = (op.operands[position], 0, _operand_site(op, position))
        kind, name = op.operand_types[position], f"{op.name}/in{position}"
        yield replace(_port(name, kind, [], [source]), constraint=constraint)
    for position, constraint in enumerate(results):
        kind, name = op.result_types[position], f"{op.name}/out{position}"
        writes = [(op.results[position], 0)]
        yield replace(_port(name, kind, writes, []), constraint=constraint)


def _scan_ports(op: Operator, blocks: Sequence[Block]) -> Iterator[Port]:
    """A port for each constant, carry, slice and stacked result."""
    (body,) = blocks
    num_consts, num_carry = op.params["num_consts"], op.params["num_carry"]
    for position, inner in enumerate(body.inputs):
        is_slice = position >= num_consts + num_carry
        kind = op.operand_types[position]
        if is_slice:
            kind = TensorType(kind.shape[1:], kind.dtype)
        writes = [(inner, 0)]
        sources = [
            (op.operands[position], int(is_slice), _operand_site(op, position)),
        ]
        carry = position - num_consts
        if 0 <= carry < num_carry:
            writes.append((op.results[carry], 0))
            sources.append((body.outputs[carry], 0, ("output", body.index, carry)))
        yield _port(f"{op.name}/in{position}", kind, writes, sources)
    for position in range(num_carry, len(op.results)):
        stacked = op.result_types[position]
        yield _port(
            f"{op.name}/out{position}",
            TensorType(stacked.shape[1:], stacked.dtype),
            [(op.results[position], 1)],
            [(body.outputs[position], 0, ("output", body.index, position))],
        )


def _while_ports(op: Operator, blocks: Sequence[Block]) -> Iterator[Port]:
    """A port for each constant and carry, and one for the predicate."""
    condition, body = blocks
    num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    first_carry = num_cond + num_body
    for position, operand in enumerate(op.operands):
        source = (operand, 0, _operand_site(op, position))
        kind, name = op.operand_types[position], f"{op.name}/in{position}"
        if position < num_cond:
            yield _port(name, kind, [(condition.inputs[position], 0)], [source])
        elif position < first_carry:
            inner = body.inputs[position - num_cond]
            yield _port(name, kind, [(inner, 0)], [source])
        else:
            carry = position - first_carry
            writes = [
                (condition.inputs[num_cond + carry], 0),
                (body.inputs[num_body + carry], 0),
                (op.results[carry], 0),
            ]
            site: Site = ("output", body.index, carry)
            yield _port(name, kind, writes, [source, (body.outputs[carry], 0, site)])
    yield _predicate(
        f"{op.name}/predicate",
        condition.outputs[0],
        ("output", condition.index, 0),
    )


def _cond_ports(op: Operator, blocks: Sequence[Block]) -> Iterator[Port]:
    """A port for each operand and result of the branches, and one for the index."""
    yield _predicate(f"{op.name}/index", op.operands[0], _operand_site(op, 0))
    for position in range(1, len(op.operands)):
        yield _port(
            f"{op.name}/in{position}",
            op.operand_types[position],
            [(branch.inputs[position - 1], 0) for branch in blocks],
            [(op.operands[position], 0, _operand_site(op, position))],
        )
    for position, result in enumerate(op.results):
        yield _port(
            f"{op.name}/out{position}",
            op.result_types[position],
            [(result, 0)],
            [
                (branch.outputs[position], 0, ("output", branch.index, position))
                for branch in blocks
            ],
        )


def _predicate(name: str, operand: Operand, site: Site) -> Port:
    """What every device must agree on: read whole, written nowhere."""
    kind = TensorType((), np.dtype(np.int32))
    return _port(name, kind, [], [(operand, 0, site)], whole=True)


def _operand_site(op: Operator, position: int) -> Site:
    return ("operand", op.index, position)
