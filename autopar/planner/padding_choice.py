"""Whether examples that the devices do not divide are padded to a number that they do.

As they are, their dim stays whole: devices repeat the work, or split another dim, which
takes collectives. So the step is planned both ways, and the quicker plan is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph
from ..graph.traced_function import Roles, TracedFunction, root_of
from ..methods.layout_rules import LayoutRules
from ..options import Options
from ..plans.plan import Padding, ShardingPlan
from ..plans.staged_plan import sharding_of
from ..sharding.mesh import parse_mesh
from .attention_choice import AttentionVariants
from .padded_trace import padded_arguments, with_padding
from .step_variants import StepVariants


@dataclass(frozen=True, eq=False)
class PaddedVariants:
    """Variants of a step as it is, and padded.

    `batch` are the graph's inputs that hold examples.
    """

    traced: TracedFunction
    graph: OpGraph
    roles: Roles
    batch: Sequence[int]

    def of_plan(self, plan: ShardingPlan) -> StepVariants:
        """Those that a plan was made of."""
        return self._padded(plan.padding).of_plan(plan)

    def to_try(self, options: Options, num_devices: int) -> Iterator[StepVariants]:
        """The step as it is, then padded; see `AttentionVariants.to_try`."""
        yield from self._padded(()).to_try(options, num_devices)
        padding = self._padding(options, num_devices)
        if padding:
            yield from self._padded(padding).to_try(options, num_devices)

    def _padding(self, options: Options, num_devices: int) -> Padding:
        """Sizes of more examples than devices, which these do not divide."""
        if options.like is not None:
            return sharding_of(options.like).padding
        if options.rules is not None or isinstance(options.method, LayoutRules):
            return ()  # a name is to split dims as they are
        if options.mesh is not None:
            num_devices = parse_mesh(options.mesh, num_devices).size
        padding: dict[int, int] = {}
        for position in self._examples():
            tensor, number = self.graph.inputs[position].tensor, num_devices
            size = self.graph.tensors[tensor].type.shape[0]
            if tensor in self.batch:
                number *= options.num_microbatches
            if size > number and size % number:
                padding[size] = ceil(size / number) * number
        return tuple(sorted(padding.items()))

    def _padded(self, padding: Padding) -> AttentionVariants:
        if not padding:
            return AttentionVariants(self.traced, self.graph, self.roles, self.batch)
        sizes, inputs = dict(padding), self.graph.inputs
        first_dims = {
            position: self.graph.tensors[inputs[position].tensor].type.shape[0]
            for position in self._examples()
        }
        padded = {i: sizes[size] for i, size in first_dims.items() if size in sizes}
        traced = with_padding(self.traced, self.graph, padded)
        graph = build_graph(traced, self.roles)
        longer = padded_arguments(graph)
        batch = [longer.get(tensor, tensor) for tensor in self.batch]
        return AttentionVariants(traced, graph, self.roles, batch, padding)

    def _examples(self) -> Iterator[int]:
        """Positions of inputs whose dim 0 may be examples, nodes or edges.

        They are the batch, and what is no state beside it: arrays that are arguments of
        their own and do not come back, and others beside some of the batch.
        """
        graph, inputs = self.graph, self.graph.inputs
        of_batch = {root_of(each.path) for each in inputs if each.tensor in self.batch}
        returned = {graph.type_of(each) for each in graph.outputs}
        for position, each in enumerate(inputs):
            kind, root = graph.tensors[each.tensor].type, root_of(each.path)
            is_own = each.path == root and bool(of_batch) and kind not in returned
            is_state = each.role in ("state", "constant")
            if (root in of_batch or is_own) and not is_state:
                if kind.rank and not kind.is_extended:
                    yield position
