"""A step whose operators are placed, as a pipeline of one microbatch and no forward.

Each device is a stage; its operators run in rounds, of which one begins where another
device's values are needed. All of it is "apply" work: it happens once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autopar.solver.placement import Placed
from autopar.solver.placement_search import best_placement

from ..clusters.cluster import Cluster
from ..frontend.tracing import trace
from ..graph.build_graph import build_graph
from ..graph.dependencies import tensors_of
from ..graph.op_graph import Operator, OpGraph
from ..methods.place_operators import PlaceOperators
from ..microbatches.microbatch_flow import Phases
from ..microbatches.microbatch_step import MicrobatchedStep
from ..options import Options
from ..pipelines.piece_trace import PiecedStep
from ..pipelines.pipeline_plan import PlannedPipeline, finish_pipeline
from ..pipelines.stage_apply import ApplyCut
from ..pipelines.stage_cut import StageCut
from ..pipelines.stage_trace import StepParts, graph_of
from ..planner.planning import roles_of
from ..sharding.mesh import MeshShape
from .operator_costs import OperatorNodes, operator_nodes


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
    nodes = operator_nodes(graph, method, cluster, options.memory_budget)
    found = best_placement(nodes.problem, method.algorithm, method.seed)
    number = cluster.num_devices
    nothing: tuple[tuple[Operator, ...], ...] = ((),) * number
    return finish_pipeline(
        whole=traced,
        pieced=PiecedStep.uncut(traced, roles),
        parts=_parts(graph),
        cut=StageCut(number, nothing, nothing, nothing, {}, {}),
        apply=_apply_cut(nodes, found),
        method=method,
        cluster=cluster,
        shapes=(MeshShape(("x",), (1,)),) * number,
        options=options,
    )


def _parts(graph: OpGraph) -> StepParts:
    """A step that prepares nothing, runs no microbatch, and applies everything."""
    nothing = jax.make_jaxpr(lambda: [])()
    step = MicrobatchedStep(graph, (), 1, 1, Phases((), (), ()), (), _run_nothing)
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


def _run_nothing(*_: object) -> list[Any]:
    return []


def _apply_cut(nodes: OperatorNodes, found: Placed) -> ApplyCut:
    """The placed operators by device and round.

    An argument that nothing on its device reads goes to the first device that does: it
    would be sent there all the same.
    """
    graph = nodes.graph
    readers: dict[int, list[int]] = {}
    for position, op in enumerate(graph.blocks[0].operators):
        for tensor in tensors_of(op.operands):
            readers.setdefault(tensor, []).append(
                found.devices[nodes.node_of(position)]
            )
    home: dict[int, int] = {}
    for position, each in enumerate(graph.inputs):
        device, there = found.devices[position], readers.get(each.tensor, [])
        home[each.tensor] = device if device in there or not there else there[0]
    made_on: dict[int, tuple[int, int]] = {}
    chosen: dict[tuple[int, int], list[Operator]] = {}
    for position, op in enumerate(graph.blocks[0].operators):
        device = found.devices[nodes.node_of(position)]
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
