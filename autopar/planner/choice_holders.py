"""What holds the choices of a plan, and who reads its tensors, by its graph alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..graph.build_graph import STRUCTURED
from ..graph.op_graph import Constant, Operator, OpGraph
from ..methods.restrictions import Restriction
from ..plans.plan import ShardingPlan
from ..sharding.mesh import MeshShape
from ..sharding.ports import ports_of
from ..sharding.spec import format_spec

OF_PORTS = (
    "the tensors that enter and leave it, which have one spec on both sides; ask for "
    "one of them with --tensor"
)


def held_by_ports(
    graph: OpGraph, mesh: MeshShape, tensor: int
) -> Iterator[tuple[str, Operator | None]]:
    """What leaves a tensor less choice as loops, pins and the like make it.

    With the operator that asks for its spec, if one does.
    """
    for op in graph.operators():
        if op.kind not in STRUCTURED:
            continue
        for port in ports_of(graph, op):
            if tensor not in [written for written, _ in port.writes]:
                continue
            if port.is_whole:
                yield f"{port.name}, which every device must have whole", None
            if port.pin(mesh) and port.constraint is not None:
                yield f"{port.constraint.where}: {port.constraint.spec}", op


def held_by_restrictions(
    restrictions: Sequence[Restriction], tensor: int
) -> Iterator[str]:
    """The names of the restrictions that demand something of a tensor."""
    for each in restrictions:
        demands = (each.homes, each.made, each.everywhere)
        if any(tensor in demand and any(demand[tensor]) for demand in demands):
            yield each.name


def readers_of(
    graph: OpGraph, plan: ShardingPlan, tensor: int
) -> Iterator[tuple[str, str]]:
    """Operators and outputs with the spec in which they read a tensor."""
    rank, names = len(plan.tensors[tensor].shape), plan.mesh.axis_names
    for op, planned in zip(graph.operators(), plan.operators, strict=True):
        for operand, spec in zip(op.operands, planned.operand_specs, strict=True):
            if not isinstance(operand, Constant) and operand == tensor:
                yield op.name, format_spec(spec, rank, names)
    for operand, spec, path in zip(
        graph.outputs, plan.outputs[0], graph.output_paths, strict=True
    ):
        if not isinstance(operand, Constant) and operand == tensor:
            yield f"output {path}", format_spec(spec, rank, names)


def factors_text(factors: Sequence[str], mesh: MeshShape) -> str:
    """`x m0, y -`: what each mesh axis splits."""
    names = zip(mesh.axis_names, factors, strict=False)
    return ", ".join(f"{name} {factor}" for name, factor in names)
