"""Whether examples that the devices do not divide are padded to a number that they do.

As they are, their dim stays whole: devices repeat the work, or split another dim, which
takes collectives. So the step is planned both ways, and the quicker plan is taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import InfeasiblePlanError
from ..frontend.roles import Roles, root_of
from ..frontend.tracing import TracedFunction
from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph
from ..plans.plan import Padding, ShardingPlan
from .attention_choice import AttentionVariants
from .memory_search import Chosen
from .padded_trace import padded_arguments, with_padding

_log = logging.getLogger("autopar")


@dataclass(frozen=True, eq=False)
class PaddedVariants:
    """A step as it is, and padded; `batch` are the graph's inputs that hold examples."""

    traced: TracedFunction
    graph: OpGraph
    roles: Roles
    batch: Sequence[int]

    def of_plan(self, plan: ShardingPlan) -> AttentionVariants:
        """Those that a plan was made of."""
        return self._padded(plan.padding)

    def choose(
        self, padding: Padding, choose: Callable[[AttentionVariants], Chosen]
    ) -> Chosen:
        """The quicker of two plans, or the one that there is.

        Raises:
          InfeasiblePlanError, ValueError: there is none of the step as it is.
        """
        if not padding:
            return choose(self._padded(()))
        found: list[Chosen] = []
        refused: list[ValueError] = []
        for each in ((), padding):
            try:
                found.append(choose(self._padded(each)))
            except ValueError as error:  # infeasible, or a method that must split them
                refused.append(error)
        if not found:
            raise refused[0]
        for each in found:
            padded = each.plan.sharding.padding_words() or "nothing padded"
            _log.info("%s: %.4g s with %s", self.graph.name, each.seconds, padded)
        return min(found, key=lambda each: each.seconds)

    def padding(self, num_devices: int, num_microbatches: int) -> Padding:
        """Sizes of more examples than devices, which these do not divide."""
        sizes: dict[int, int] = {}
        for position in self._examples():
            size = self.graph.tensors[self.graph.inputs[position].tensor].type.shape[0]
            number = num_devices
            if self.graph.inputs[position].tensor in self.batch:
                number *= num_microbatches
            if size > number and size % number:
                sizes[size] = -(-size // number) * number
        return tuple(sorted(sizes.items()))

    def _padded(self, padding: Padding) -> AttentionVariants:
        own = self.traced, self.graph, self.roles, self.batch
        if not padding:
            return AttentionVariants(*own)
        sizes, padded = dict(padding), dict[int, int]()
        for position in self._examples():
            size = self.graph.tensors[self.graph.inputs[position].tensor].type.shape[0]
            if size in sizes:
                padded[position] = sizes[size]
        traced = with_padding(self.traced, self.graph, padded)
        graph = build_graph(traced, self.roles)
        longer = padded_arguments(graph)
        batch = [longer.get(tensor, tensor) for tensor in self.batch]
        return AttentionVariants(traced, graph, self.roles, batch, padding)

    def _examples(self) -> Iterator[int]:
        """Positions of inputs whose dim 0 may be examples, nodes or edges.

        They are the batch, and what is no state beside it: arrays that are arguments of
        their own, and others of an argument that holds some of the batch.
        """
        inputs = self.graph.inputs
        roots = [root_of(each.path) for each in inputs]
        of_batch = {
            root
            for root, each in zip(roots, inputs, strict=True)
            if each.tensor in self.batch
        }
        for position, each in enumerate(inputs):
            kind = self.graph.tensors[each.tensor].type
            is_alone = each.path == roots[position] and bool(of_batch)
            is_beside = roots[position] in of_batch or is_alone
            if each.role in ("batch", "other") and is_beside:
                if kind.rank and not kind.is_extended:
                    yield position

