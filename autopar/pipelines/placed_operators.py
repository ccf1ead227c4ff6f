"""A step whose operators are placed one by one: a stage a device, no microbatches.

The problem has a node for each leaf and operator, with the seconds it takes on each
device. Each device is a stage; its operators run in rounds, of which one begins where
another device's values are needed. All is "apply" work: it happens once a step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import networkx as nx
import numpy as np

from autopar.solver.placement import Placed, PlacementProblem, best_placement

from ..clusters.cluster import Cluster
from ..costs.compute import operator_seconds, total_flops
from ..frontend.tracing import trace
from ..graph.build_graph import STRUCTURED, build_graph
from ..graph.dependencies import tensors_of, updates_of
from ..graph.op_graph import Operator, OpGraph
from ..graph.work import is_heavy_operator
from ..methods.place_operators import PlaceOperators
from ..microbatches.microbatch_flow import Phases
from ..microbatches.microbatches import MicrobatchedStep
from ..options import Options
from ..planner.whole_step import roles_of
from ..sharding.mesh import MeshShape
from ..transforms.chunked_step import ChunkedStep
from .cut_step import CutStep
from .pipeline_plan import PlannedPipeline, demands_of, planned_on
from .stage_cut import StageCut
from .step_parts import StepParts, graph_of
from .update_cut import ApplyCut


def operator_nodes(
    graph: OpGraph, method: PlaceOperators, cluster: Cluster, budget: int | None
) -> PlacementProblem:
    """The problem of placing a step's operators on the devices of a cluster.

    Nodes 0.. are the inputs that anything reads or returns, then the operators.

    Args:
      budget: bytes a device may hold; its memory, if None.

    Raises:
      ValueError: the method names devices that are not there, or matches nothing.
      NoPlacement: what must be together may not be.
    """
    operators = graph.blocks[0].operators
    num_devices = cluster.num_devices
    speeds = np.array(_speeds(method, num_devices))
    work = [0.0] * len(graph.inputs)
    work += [_seconds(graph, op, cluster) for op in operators]
    seconds = np.array(work)[:, None] / speeds[None, :]
    names = [i.path for i in graph.inputs] + [op.name for op in operators]
    _pin(seconds, names, method, num_devices)
    sizes = [graph.tensors[i.tensor].type.bytes for i in graph.inputs]
    sizes += [sum(kind.bytes for kind in op.result_types) for op in operators]
    memory = budget if budget is not None else cluster.device.memory_bytes
    latency, per_byte = _links(cluster)
    return PlacementProblem(
        tuple(names),
        seconds,
        _edges(graph),
        np.array(sizes, float),
        np.full(num_devices, float(memory)),
        latency,
        per_byte,
        _together(graph, names, method, np.isfinite(seconds)),
    )


def _speeds(method: PlaceOperators, num_devices: int) -> Sequence[float]:
    speeds = method.speeds or (1.0,) * num_devices
    if len(speeds) != num_devices:
        raise ValueError(
            f"`speeds` must have a number for each of {num_devices} devices, but got "
            f"{len(speeds)}: {list(speeds)}."
        )
    return speeds


def _seconds(graph: OpGraph, op: Operator, cluster: Cluster) -> float:
    """Of one execution of an operator on one device, its bodies included."""
    if op.kind in STRUCTURED:
        return sum(
            _seconds(graph, inner, cluster)
            * graph.blocks[body].weight
            / graph.blocks[op.block].weight
            for body in op.bodies
            for inner in graph.blocks[body].operators
        )
    kinds = (*op.operand_types, *op.result_types)
    dtype = op.operand_types[0].dtype if op.operand_types else op.result_types[0].dtype
    moved = sum(kind.bytes for kind in kinds)
    return operator_seconds(op.kind, total_flops(op), moved, dtype, cluster)


def _edges(graph: OpGraph) -> tuple[tuple[int, int, float], ...]:
    maker = _makers(graph)
    return tuple(
        (maker[tensor], len(graph.inputs) + position, float(size))
        for position, op in enumerate(graph.blocks[0].operators)
        for tensor in dict.fromkeys(tensors_of(op.operands))
        for size in (graph.tensors[tensor].type.bytes,)
    )


def _links(cluster: Cluster) -> tuple[np.ndarray, np.ndarray]:
    """Latency and seconds a byte between any two devices."""
    hosts = np.arange(cluster.num_devices) // cluster.devices_per_host
    is_near = hosts[:, None] == hosts[None, :]
    near, far = cluster.host_link, cluster.network_link
    latency = np.where(is_near, near.alpha_seconds, far.alpha_seconds)
    per_byte = np.where(
        is_near,
        1 / (near.bandwidth * near.efficiency),
        1 / (far.bandwidth * far.efficiency),
    )
    apart = 1.0 - np.eye(cluster.num_devices)
    return latency * apart, per_byte * apart


def _pin(
    seconds: np.ndarray, names: Sequence[str], method: PlaceOperators, num_devices: int
) -> None:
    """Makes a pinned node impossible elsewhere."""
    for pattern, device in method.devices.items():
        if not 0 <= device < num_devices:
            raise ValueError(
                f"`devices` must name devices from 0 to {num_devices - 1}, but "
                f"{pattern!r} asks for {device}."
            )
        for node in _matching(pattern, names, "devices"):
            others = [d for d in range(num_devices) if d != device]
            seconds[node, others] = np.inf


def _matching(pattern: str, names: Sequence[str], option: str) -> list[int]:
    found = [node for node, name in enumerate(names) if re.search(pattern, name)]
    if not found:
        shown = ", ".join(names[:8])
        raise ValueError(
            f"`{option}` must match a leaf's path or an operator's name, but "
            f"{pattern!r} matches none of {shown}, ...; see plan.explain()."
        )
    return found


def _together(
    graph: OpGraph, names: Sequence[str], method: PlaceOperators, is_allowed: np.ndarray
) -> tuple[tuple[int, ...], ...]:
    """Groups: what the method asks for, and what belongs together unless pinned apart.

    That is state with its update, and light operators with their only reader.
    """
    maker = _makers(graph)
    asked = [tuple(_matching(text, names, "together")) for text in method.together]
    groups = [*_updates(graph, maker), *_light_with_heavy(graph, maker)]
    joined = nx.utils.UnionFind(range(len(names)))
    allowed = {node: is_allowed[node] for node in range(len(names))}
    for number, (first, *others) in enumerate([*asked, *groups]):
        for node in others:
            both = allowed[joined[first]] & allowed[joined[node]]
            if number < len(asked) or both.any():
                joined.union(first, node)
                allowed[joined[node]] = both
    return tuple(tuple(sorted(group)) for group in joined.to_sets())


def _makers(graph: OpGraph) -> dict[int, int]:
    """The node that each tensor comes from."""
    first, operators = len(graph.inputs), graph.blocks[0].operators
    maker = {each.tensor: number for number, each in enumerate(graph.inputs)}
    maker.update((t, first + i) for i, op in enumerate(operators) for t in op.results)
    return maker


def _updates(graph: OpGraph, maker: dict[int, int]) -> Iterator[tuple[int, int]]:
    """State with its next value, and updates of arrays of a shape with each other."""
    operators, first = graph.blocks[0].operators, len(graph.inputs)
    updates = updates_of(operators)
    for node, each in enumerate(graph.inputs):
        after = None if each.output is None else graph.outputs[each.output]
        if isinstance(after, int):
            yield node, maker[after]
    for node, op in enumerate(operators, first):
        shapes = {kind.shape for kind in op.result_types if kind.shape}
        for tensor in tensors_of(op.operands) if op.index in updates else ():
            other = maker[tensor]
            if other < first:
                is_own = graph.inputs[other].output is not None
            else:
                is_own = operators[other - first].index in updates
            if is_own and graph.tensors[tensor].type.shape in shapes:
                yield node, other


def _light_with_heavy(graph: OpGraph, maker: dict[int, int]) -> list[tuple[int, ...]]:
    """A light operator with one reader is never apart from it: it would only be sent.

    Not if it makes less than it reads: then what it makes is the cheaper to send.
    """
    readers: dict[int, list[int]] = {}
    operators = graph.blocks[0].operators
    first = len(graph.inputs)
    for position, op in enumerate(operators):
        for tensor in dict.fromkeys(tensors_of(op.operands)):
            readers.setdefault(maker[tensor], []).append(first + position)
    groups = []
    for node, op in enumerate(operators, first):
        read, mine = tensors_of(op.operands), readers.get(node, [])
        if op.kind in STRUCTURED or is_heavy_operator(op) or not mine:
            continue
        made_bytes = sum(kind.bytes for kind in op.result_types)
        read_bytes = sum(graph.tensors[t].type.bytes for t in read)
        if not read or (len(mine) == 1 and made_bytes >= read_bytes):
            groups.append((node, mine[0]))
    return groups


def plan_placement(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    method: PlaceOperators,
    options: Options,
) -> PlannedPipeline:
    """Trace `fun`, place its operators and plan a program for each device and round.

    Raises:
      NoPlacement: the operators do not fit into the devices' memory.
    """
    cluster = options.cluster or Cluster.local()
    traced = trace(fun, args, kwargs)
    roles = roles_of(traced)
    graph = build_graph(traced, roles)
    problem = operator_nodes(graph, method, cluster, options.memory_budget)
    found = best_placement(problem, method.algorithm, method.seed)
    number = cluster.num_devices
    nothing: tuple[tuple[Operator, ...], ...] = ((),) * number
    made = CutStep(
        traced,
        ChunkedStep.uncut(traced, roles),
        _parts(graph),
        StageCut(number, nothing, nothing, nothing, {}, {}),
        _apply_cut(graph, found),
    )
    shapes = (MeshShape(("x",), (1,)),) * number
    leaves = jax.tree.leaves((args, kwargs))
    demands = demands_of(made, leaves, method, shapes, options)
    return planned_on(made, demands, method, shapes, options)


def _parts(graph: OpGraph) -> StepParts:
    """A step that prepares nothing, runs no microbatch, and applies everything."""
    nothing = jax.make_jaxpr(lambda: [])()
    step = MicrobatchedStep(graph, (), 1, Phases((), (), ()), (), ())
    return StepParts(
        step,
        nothing,
        graph_of(lambda: [], [], [], []),
        graph,
        held=tuple(i.path for i in graph.inputs),
        batch=(),
        prepared=(),
        sums={},
        joined={},
        fed={},
    )


def _apply_cut(graph: OpGraph, found: Placed) -> ApplyCut:
    """The placed operators by device and round.

    An argument that nothing on its device reads goes to the first device that does: it
    would be sent there all the same.
    """
    devices = found.devices[len(graph.inputs) :]
    readers: dict[int, list[int]] = {}
    for op, device in zip(graph.blocks[0].operators, devices, strict=True):
        for tensor in tensors_of(op.operands):
            readers.setdefault(tensor, []).append(device)
    home: dict[int, int] = {}
    for position, each in enumerate(graph.inputs):
        device, there = found.devices[position], readers.get(each.tensor, [])
        home[each.tensor] = device if device in there or not there else there[0]
    made_on: dict[int, tuple[int, int]] = {}
    chosen: dict[tuple[int, int], list[Operator]] = {}
    for op, device in zip(graph.blocks[0].operators, devices, strict=True):
        makers = [made_on[t] for t in tensors_of(op.operands) if t in made_on]
        number = max((r + (d != device) for d, r in makers), default=0)
        chosen.setdefault((device, number), []).append(op)
        made_on.update(dict.fromkeys(op.results, (device, number)))
    outputs = []
    for operand in graph.outputs:
        made = made_on.get(operand) if isinstance(operand, int) else None
        lives = home.get(operand, 0) if isinstance(operand, int) else 0
        outputs.append(lives if made is None else made[0])
    return ApplyCut(
        graph,
        {key: tuple(ops) for key, ops in sorted(chosen.items())},
        home,
        tuple(outputs),
        made_on,
    )
