"""Specs that a step itself asks for: pins, sharding constraints, borders of shard_map.

A pin and the border of a shard_map must be given as they say; a sharding constraint is
a hint for a partitioner, and is ignored with a warning where our mesh cannot give it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ..errors import FallbackWarning
from ..graph.build_graph import PINS
from ..graph.op_graph import Operator, OpGraph, TensorType
from .layouts import FREE
from .mesh import MeshShape
from .pins import Pin, parse_pin


@dataclass(frozen=True)
class Constraint:
    """A spec for one tensor at one place; None asks for nothing that we can read."""

    spec: PartitionSpec | None
    where: str
    is_hint: bool = False

    def pin(self, kind: TensorType, mesh: MeshShape) -> Pin | None:
        """The pin on `mesh`; None where a hint cannot be followed.

        Raises:
          ValueError: it is no hint, and names an unknown axis or does not divide.
        """
        if self.spec is None:
            return None
        try:
            return parse_pin(self.spec, kind, mesh, f"{self.where} of {kind}")
        except ValueError:
            if self.is_hint:
                return None
            raise

    def refusal(self, kind: TensorType, mesh: MeshShape) -> str:
        """Why a hint cannot be followed; empty if it can."""
        if self.spec is None:
            return "It is no NamedSharding, and has no axes."
        try:
            replace(self, is_hint=False).pin(kind, mesh)
        except ValueError as error:
            return str(error)
        return ""


def constraint_of(op: Operator) -> Constraint:
    """What a pin or a sharding constraint asks for."""
    if op.kind == "autopar_pin":
        where = f"autopar.pin at {op.source}"
        if "jit_shardings.py" in op.source:  # no line of the user's
            where = "out_shardings"
        return Constraint(op.params["spec"], where)
    sharding = op.params["sharding" if "sharding" in op.params else "dst_sharding"]
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    return Constraint(spec, f"{op.kind} at {op.source}", is_hint=True)


def border_constraints(op: Operator) -> tuple[list[Constraint], list[Constraint]]:
    """What a shard_map asks for its operands, and for its results."""

    def constraints(specs: Any, noun: str) -> list[Constraint]:
        return [
            Constraint(spec, f"{noun}[{position}] of shard_map at {op.source}")
            for position, spec in enumerate(specs)
        ]

    operands = constraints(op.params["in_specs"], "in_specs")
    return operands, constraints(op.params["out_specs"], "out_specs")


def check_returned_pins(
    graph: OpGraph, pins: Mapping[int, Pin], mesh: MeshShape
) -> None:
    """Does nothing if state whose home is pinned is returned as it comes in.

    `pins` are those of arguments, by tensor.

    Raises:
      ValueError: the step pins what it returns to another spec, or constrains it so.
    """
    makers = {t: op for op in graph.blocks[0].operators for t in op.results}
    for given in graph.inputs:
        pin = pins.get(given.tensor)
        if pin is None or given.output is None:
            continue
        operand = graph.outputs[given.output]
        op = makers.get(operand) if isinstance(operand, int) else None
        if op is None or op.kind not in PINS:
            continue
        constraint = constraint_of(op)
        other = constraint.pin(op.operand_types[0], mesh)
        pairs = zip(pin.axes_by_dim, other.axes_by_dim if other else (), strict=False)
        if any(None not in pair and pair[0] != pair[1] for pair in pairs):
            raise ValueError(
                f"Pinned state keeps its spec from step to step, but {given.path} "
                f"comes in as {_text(pin, mesh)} by its pin and is returned as "
                f"{constraint.spec} by {constraint.where}; leave out one of the two."
            )


def _text(pin: Pin, mesh: MeshShape) -> PartitionSpec:
    return PartitionSpec(
        *(
            FREE if axes is None else tuple(mesh.axis_names[axis] for axis in axes)
            for axes in pin.axes_by_dim
        )
    )


def warn_ignored_constraints(graph: OpGraph, mesh: MeshShape) -> None:
    """Warn once for each source line whose sharding constraint is not followed."""
    for source, reason in dict(_ignored(graph, mesh)).items():
        warnings.warn(
            f"The sharding constraint at {source} is ignored: {reason}",
            FallbackWarning,
            stacklevel=2,
        )


def _ignored(graph: OpGraph, mesh: MeshShape) -> Iterator[tuple[str, str]]:
    for op in graph.operators():
        if op.kind in PINS:
            constraint = constraint_of(op)
            reason = constraint.refusal(op.operand_types[0], mesh)
            if constraint.is_hint and reason:
                yield op.source, reason
