"""Whether a step's attention is planned as one operator, which may be a ring, or not.

Operator by operator, scores are tensors that every device holds its part of; as one
operator they are there block by block, and keys and values may go round a ring. So the
step is planned both ways where that could matter: where there are more devices than
examples, and more scores than queries, keys and values.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ..graph.build_graph import build_graph
from ..graph.op_graph import OpGraph
from ..graph.traced_function import Roles, TracedFunction
from ..methods.methods import Auto, ShardParallel
from ..options import Options
from ..plans.plan import Padding, ShardingPlan
from ..rules.attention import KINDS, RINGS
from .attention_finder import FoundAttention, find_attention
from .attention_trace import with_attention
from .pin_choices import ChoicePins
from .step_variants import StepVariants

_log = logging.getLogger("autopar")


@dataclass(frozen=True, eq=False)
class AttentionVariants:
    """Variants of a step as it is; those with attention as one operator are made once.

    `batch` are the tensors that hold examples, `padding` what they were padded by.
    """

    traced: TracedFunction
    graph: OpGraph
    roles: Roles
    batch: Sequence[int]
    padding: Padding = ()

    def plain(self) -> StepVariants:
        """Operator by operator."""
        own = self.traced, self.graph, self.roles
        return StepVariants(*own, self.batch, self.padding)

    def of_plan(self, plan: ShardingPlan) -> StepVariants:
        """Those that a plan was made of."""
        if not any(op.kind in KINDS for op in plan.operators):
            return self.plain()
        return self._of(find_attention(self.traced, self.graph)[0])

    def to_try(self, options: Options, num_devices: int) -> Iterator[StepVariants]:
        """Both ways, or the one that is asked for or that alone can matter.

        Raises:
          ValueError: a ring was asked for, but no attention is understood.
        """
        method = options.method
        if not isinstance(method, Auto | ShardParallel) or options.like is not None:
            yield self.plain()
            return
        asked = getattr(method, "attention", "auto")
        if asked == "ring":
            yield self._of(self._found())
            return
        if asked != "operators" and self._num_examples() < num_devices:
            found = self._logged()
            if any(map(self._is_long, found)):
                yield self._of(found)
        yield self.plain()

    def _of(self, found: Sequence[FoundAttention]) -> StepVariants:
        traced = with_attention(self.traced, self.graph, found)
        graph = build_graph(traced, self.roles)
        return StepVariants(traced, graph, self.roles, self.batch, self.padding)

    def _found(self) -> Sequence[FoundAttention]:
        found, refused = find_attention(self.traced, self.graph)
        if not found:
            looks_like = [f" At {op.source}, {why}." for op, why in refused[:3]]
            raise ValueError(
                f"A ring needs attention, a product, a softmax of it and a product, "
                f"but {self.graph.name} has none that is understood."
                f"{''.join(looks_like)} Write it so, for one with "
                f"jax.nn.dot_product_attention, or leave `attention` out."
            )
        return found

    def _logged(self) -> Sequence[FoundAttention]:
        found, refused = find_attention(self.traced, self.graph)
        for op, why in refused:
            _log.info(
                "%s: attention at %s is planned operator by operator: %s",
                *(self.graph.name, op.source, why),
            )
        return found

    def _num_examples(self) -> int:
        types = [self.graph.tensors[tensor].type for tensor in self.batch]
        return min((kind.shape[0] for kind in types if kind.rank), default=1)

    def _is_long(self, found: FoundAttention) -> bool:
        """Whether there are more scores than queries, keys and values."""
        types = [self.graph.tensors[t].type for t in (found.q, found.k, found.v)]
        sizes = found.attention.sizes(*(each.shape for each in types))
        scores = prod(sizes[label] for label in found.attention.table)
        return scores >= sum(each.size for each in types)


def ring_limits(graph: OpGraph, options: Options) -> tuple[ChoicePins, ...]:
    """What `attention="ring"` leaves of the choices."""
    if getattr(options.method, "attention", "auto") != "ring":
        return ()
    kept = {
        op.index: lambda names: any(name in RINGS for name in names)
        for op in graph.operators()
        if op.kind in KINDS
    }
    return (ChoicePins("attention='ring'", {}, kept),) if kept else ()
