"""What a (data, tensor) layout leaves to the solver, as a restriction."""

from __future__ import annotations

from collections.abc import Callable

from autopar.graph.build_graph import SCAN
from autopar.graph.op_graph import Operator, OpGraph
from autopar.methods.batch_dims import BatchDims, dims_by_tensor
from autopar.methods.restrictions import NOT_SPLIT, Demand, Restriction, States
from autopar.methods.tensor_parallel_dims import tensor_parallel_dims
from autopar.sharding.mesh import MeshShape
from benchmarks.published.unit_model import Unit, UnitModel, scope

EXPERT_AXIS = "expert"  # of a mesh whose axes share out the batch, and experts the last


def microbatch_loop(graph: OpGraph) -> Operator:
    """The scan over microbatches."""
    return next(op for op in graph.blocks[0].operators if op.kind == SCAN)


def layout_restriction(
    model: UnitModel, graph: OpGraph, mesh: MeshShape
) -> Restriction:
    """The batch is split over `data`, layers over `tensor` as Megatron does.

    In a model with experts, these and the batch must be split over `data`, all else
    there is the solver's choice. Where experts have an axis of their own, the batch is
    split over both axes, experts over that one, and nothing else is split by it.
    """
    loop = microbatch_loop(graph)
    behind = loop.params["num_consts"] + loop.params["num_carry"]
    batch = graph.blocks[loop.bodies[0]].inputs[behind:]
    has_expert_axis = EXPERT_AXIS in mesh.axis_names
    axes = range(2 if has_expert_axis else 1)
    work = BatchDims.of("a layout", graph, mesh, batch, axes)
    inside: dict[int, frozenset[int]] = {}
    if mesh.axis_sizes[1] > 1 and not has_expert_axis:
        parameters = work.flow().parameters
        inside = dims_by_tensor(
            tensor_parallel_dims(work.ties, mesh.axis_sizes[1], parameters, batch)
        )
    experts = _shapes(model, graph, lambda unit: unit.experts)
    words = _shapes(model, graph, lambda unit: unit.words)
    demands: dict[int, Demand] = {}
    for tensor in graph.tensors:
        data, within = work.states(tensor.index, 0), inside.get(tensor.index, NOT_SPLIT)
        shape = tensor.type.shape
        is_weight = tensor.index not in work.dims
        if is_weight and shape[-3:] in experts:
            with_experts: States = frozenset({len(shape) - 3})
        elif has_expert_axis and (is_weight or tensor.index in batch):
            with_experts = work.states(tensor.index, 1)
        else:
            with_experts = data if tensor.index in batch else None
        if has_expert_axis:
            within = with_experts
        elif model.has_experts:
            data = with_experts
        if is_weight and shape[-2:] in words:
            within = frozenset({len(shape) - 2})
        demands[tensor.index] = (data, within)
    return Restriction("a layout", demands, {}, {})


def _shapes(
    model: UnitModel, graph: OpGraph, ends_of: Callable[[Unit], tuple[str, ...]]
) -> set[tuple[int, ...]]:
    """Shapes of some parameters; their gradients and copies have them, too."""
    found = set()
    for number, unit in enumerate(model.units):
        for each in graph.inputs:
            if f"['{scope(number)}']" in each.path and each.path.endswith(
                ends_of(unit)
            ):
                stacked = model.counts[number] > 1
                found.add(graph.tensors[each.tensor].type.shape[stacked:])
    return found
