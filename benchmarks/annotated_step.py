"""A step for plain jit, with a planned sharding as an annotation on every result.

The step is the user's own, as JAX traced it, or as autopar rewrote it before it was
planned. What the user's own has besides (the transpose behind a weight's gradient, or
padding in front of a window) is left to the partitioner, as are pending sums, which no
annotation can say. Dead code is left out, as XLA does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from autopar.frontend.dead_code import dead_code_eliminated
from autopar.frontend.tracing import rewritten
from autopar.graph.blocks import BlockRunner
from autopar.graph.build_graph import BARRIER, build_graph
from autopar.graph.op_graph import Block, Constant, Operator, OpGraph
from autopar.planner.whole_step import roles_of
from autopar.rules.base import bind_params
from autopar.sharding.spec import is_pending, to_partition_spec

if TYPE_CHECKING:
    from autopar.steps.lowered_step import Lowered

Annotations = Mapping[int, NamedSharding]  # by tensor


@dataclass(frozen=True, eq=False)
class AnnotatedStep:
    """A step as an operator graph, and the sharding that each tensor is annotated with.

    Tensors without an annotation are the partitioner's.
    """

    graph: OpGraph
    annotations: Annotations

    def __call__(self, *inputs: Any) -> list[Any]:
        """Flat results, of leaves and the closed-over arrays behind them."""
        runner = _Annotating(self.graph, self.annotations)
        return runner.run_block(self.graph.blocks[0], inputs)

    def annotated_share(self) -> float:
        """The share of results, of all operators in all bodies, with an annotation."""
        results = [t for op in self.graph.operators() for t in op.results]
        return sum(t in self.annotations for t in results) / len(results)


def same_graph(lowered: Lowered) -> AnnotatedStep:
    """The step as it was planned."""
    sharding = lowered.plan.sharding
    mesh, names = lowered.program.mesh, sharding.mesh.axis_names
    specs = (
        (tensor, planned.spec, len(planned.shape))
        for tensor, planned in enumerate(sharding.tensors)
        if not is_pending(planned.spec)
    )
    annotations = {
        tensor: NamedSharding(mesh, to_partition_spec(spec, rank, names))
        for tensor, spec, rank in specs
    }
    return AnnotatedStep(lowered.graph, annotations)


def own_step(lowered: Lowered, closed: Any) -> AnnotatedStep:
    """The step as JAX traced it, which is `closed`, annotated as it was planned."""
    own = _graph_of(lowered, dead_code_eliminated(closed))
    planned = same_graph(lowered)
    tensor_by_name = {tensor.name: tensor for tensor in planned.graph.tensors}
    traced_again = _graph_of(lowered, rewritten(closed))
    name_by_value = {
        value: traced_again.tensors[tensor].name
        for value, tensor in _values(traced_again)
    }
    annotations: dict[int, NamedSharding] = {}
    for value, tensor in _values(own):
        same = tensor_by_name.get(name_by_value.get(value, ""))
        if same is not None and same.type == own.tensors[tensor].type:
            if same.index in planned.annotations:
                annotations[tensor] = planned.annotations[same.index]
    return AnnotatedStep(own, annotations)


def _graph_of(lowered: Lowered, closed: Any) -> OpGraph:
    traced = replace(lowered.traced, jaxpr=closed)
    return build_graph(traced, roles_of(traced))


def _values(graph: OpGraph) -> Iterator[tuple[Any, int]]:
    """Each tensor beside what it is the value of: a variable, and which run of it.

    A jaxpr that is called several times is inlined as often, in the same order.
    """
    num_runs: defaultdict[Any, int] = defaultdict(int)

    def numbered(variable: Any, tensor: int) -> tuple[Any, int]:
        num_runs[variable] += 1
        return (variable, num_runs[variable]), tensor

    for position, given in enumerate(graph.inputs):
        yield ("input", position), given.tensor
    for op in graph.operators():
        for position, tensor in enumerate(op.results):
            if op.kind == BARRIER and op.eqn.primitive.name != BARRIER:
                yield numbered((op.eqn.outvars[0], position), tensor)
            else:
                yield numbered(op.eqn.outvars[position], tensor)
        for closed, body in zip(_bodies(op), op.bodies, strict=True):
            inputs = graph.blocks[body].inputs
            for variable, tensor in zip(closed.jaxpr.invars, inputs, strict=True):
                yield numbered(variable, tensor)


def _bodies(op: Operator) -> Sequence[Any]:
    match op.kind:
        case "scan":
            return [op.params["jaxpr"]]
        case "while":
            return [op.params["cond_jaxpr"], op.params["body_jaxpr"]]
        case "cond":
            return op.params["branches"]
    return []


class _Annotating(BlockRunner):
    """Runs blocks on global arrays, and constrains what has an annotation."""

    def __init__(self, graph: OpGraph, annotations: Annotations) -> None:
        super().__init__(graph)
        self.annotations = annotations
        self.values: dict[int, Any] = {}

    def write(self, tensor: int, value: Any) -> None:
        if tensor in self.annotations:
            value = lax.with_sharding_constraint(value, self.annotations[tensor])
        self.values[tensor] = value

    def operands(self, op: Operator) -> list[Any]:
        return [
            o.value if isinstance(o, Constant) else self.values[o] for o in op.operands
        ]

    def outputs(self, block: Block) -> list[Any]:
        return [
            jnp.asarray(o.value, o.type.dtype)
            if isinstance(o, Constant)
            else self.values[o]
            for o in block.outputs
        ]

    def execute(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        if op.kind == "shard_map":
            return self.bind(op, operands)
        return super().execute(op, operands)

    def bind(self, op: Operator, operands: Sequence[Any]) -> Sequence[Any]:
        return bind_params(op, operands)
