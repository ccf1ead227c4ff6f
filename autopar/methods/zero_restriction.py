"""ZeRO as demands on tensors: what of the state, and of what it becomes, is split.

Gradients and parameters in loops need care. An iteration that hands no example to the
next, as in a loop over microbatches, is a step of its own: it reduces its gradients
(stage 2) and gathers its parameters (stage 3). Where examples pass from iteration to
iteration, as over time, a weight that all of them read is gathered and its gradient
reduced once; the slices of a loop over layers are gathered in turn. That the backward
pass gathers again is said by barriers (`gather_again.py`), whose results are split too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..graph.build_graph import SCAN, STRUCTURED, WHILE
from ..graph.op_graph import OpGraph
from ..sharding.ports import barriers_of
from ..sharding.state_flow import StateFlow
from .batch_dims import BatchDims
from .restrictions import PENDING, WHOLE, Demand, Restriction, States


def zero_restriction(
    name: str, stage: int, work: BatchDims, *, keeps: bool = False
) -> Restriction:
    """What ZeRO of a stage leaves to the solver.

    `work` is split over every mesh axis, and `name` is what errors call the method. Of
    stage 3, `keeps`: parameters are gathered once for the forward pass and all that is
    made again, and those of loops over layers before the loop.
    """
    graph, flow = work.graph, work.flow()

    def demand(states: States) -> Demand:
        return (states,) * work.mesh.num_axes

    def split(tensor: int) -> frozenset[int]:
        return frozenset(range(graph.tensors[tensor].type.rank))

    homes, preferred = {}, {}
    loops = tuple(_loops(graph))
    shapes = [tensor.type.shape for tensor in graph.tensors]
    stacked = {shapes[tensor] for loop in loops for tensor in loop.stacked_in}
    for each in graph.inputs:
        is_split = each.role == "state" and (
            each.tensor not in flow.parameters or stage == 3
        )
        states = split(each.tensor) if is_split else WHOLE
        homes[each.tensor] = demand(work.dims.get(each.tensor, states))
        # Contiguous parts are gathered and scattered without a transpose.
        shape = shapes[each.tensor]
        dims = range(shape in stacked, len(shape))
        even = (dim for dim in dims if shape[dim] % work.mesh.size == 0)
        major = next(even, None)
        if stage == 3 and is_split and major is not None:
            preferred[each.tensor] = demand(frozenset({major}))
    made: dict[int, Demand] = {}
    if stage >= 2:
        reduced = _read_with_state(graph, flow)
        for loop in loops:
            reduced |= set(loop.stacked_out)
            reduced |= set() if loop.hands_on(work.dims) else set(loop.carried_out)
        for tensor in flow.of_gradients:
            may_owe = frozenset() if tensor in reduced else PENDING
            made[tensor] = demand(split(tensor) | may_owe)
    if stage == 3:
        steady = {t for loop in loops if loop.hands_on(work.dims) for t in loop.steady}
        gathered = flow.of_parameters - steady
        if keeps:
            passed = (pair for b in graph.blocks for _, pair in barriers_of(b))
            gathered -= {behind for _, behind in passed}
        made |= {tensor: demand(split(tensor)) for tensor in gathered}
        if keeps:
            bodies = {loop.body for loop in loops if loop.hands_on(work.dims)}
            inside = (t for t in gathered if graph.tensors[t].block in bodies)
            made |= {tensor: demand(WHOLE) for tensor in inside}
    everywhere = {tensor: demand(dims) for tensor, dims in work.dims.items()}
    return Restriction(name, everywhere, made, homes, preferred)


def _read_with_state(graph: OpGraph, flow: StateFlow) -> set[int]:
    """What becomes of gradients where they meet state: there they must be reduced."""
    found = set()
    for op in graph.operators():
        reads_state = any(
            isinstance(o, int) and o in flow.of_state and graph.tensors[o].type.rank
            for o in op.operands
        )
        if reads_state and op.kind not in STRUCTURED:
            found.update(op.results)
    return found


@dataclass(frozen=True)
class _Loop:
    """A body; what it reads whole, in slices, and carried in; what is carried out and
    stacked up."""

    body: int
    steady: tuple[int, ...]
    stacked_in: tuple[int, ...]
    carried_in: tuple[int, ...]
    carried_out: tuple[int, ...]
    stacked_out: tuple[int, ...]

    def hands_on(self, per_example: Collection[int]) -> bool:
        """Whether examples pass from iteration to iteration."""
        return any(tensor in per_example for tensor in self.carried_in)


def _loops(graph: OpGraph) -> Iterator[_Loop]:
    for op in graph.operators():
        if op.kind == SCAN:
            body = graph.blocks[op.bodies[0]].inputs
            first = op.params["num_consts"]
            last = first + op.params["num_carry"]
            sliced = tuple(o for o in op.operands[last:] if isinstance(o, int))
        elif op.kind == WHILE:
            body = graph.blocks[op.bodies[1]].inputs
            first, last, sliced = op.params["body_nconsts"], len(body), ()
        else:
            continue
        outs = op.results[: last - first], op.results[last - first :]
        yield _Loop(op.bodies[-1], body[:first], sliced, body[first:last], *outs)
