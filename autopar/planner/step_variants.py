"""One step as several graphs: what is made again, and what the host holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..attention.rule import KINDS
from ..graph.build_graph import build_graph
from ..graph.dependencies import tensors_of
from ..graph.op_graph import OpGraph
from ..graph.phases import Phases
from ..graph.traced_function import Roles, TracedFunction
from ..option_values import Offload, Remat
from ..plans.plan import Padding, ShardingPlan
from ..rematerialisation.recompute_sets import recompute_sets
from ..rematerialisation.remat_trace import with_recomputation
from ..sharding.state_flow import Flow

_PLAIN = "operator by operator"


def nothing_to_offload(name: str) -> str:
    """What is wrong with `offload="optimizer_state"` of a step without such state."""
    return (
        f"`offload` moves state that only the update reads, but {name} has none: no "
        f"argument is returned again and read by nothing that a gradient needs; leave "
        f"`offload` out."
    )


@dataclass(frozen=True, eq=False)
class StepVariant:
    """A step to be planned: its trace, and its graph, which says what the host holds.

    `num_segments` is how many segments `remat` could do again; 0 if none does.
    """

    traced: TracedFunction
    graph: OpGraph
    remat: Remat | None
    num_segments: int
    padding: Padding = ()

    @property
    def num_at_host(self) -> int:
        return sum(each.memory == "host" for each in self.graph.inputs)

    def __str__(self) -> str:
        made = f"remat {self.remat}" if self.remat else "no remat"
        return f"{made}, {self.num_at_host} arguments in the host's memory"


class StepVariants:
    """Makes variants of one step; `batch` are the tensors that hold examples.

    `padding` is what the step was padded by.
    """

    def __init__(
        self,
        traced: TracedFunction,
        graph: OpGraph,
        roles: Roles,
        batch: Sequence[int],
        padding: Padding = (),
    ) -> None:
        self.traced, self.graph, self.roles = traced, graph, roles
        self.batch, self.padding = tuple(batch), padding
        self.offloadable = optimizer_state(graph)
        self.state = all_state(graph)
        self._by_remat = {"": StepVariant(traced, graph, None, 0, padding)}

    def __str__(self) -> str:
        has_attention = any(op.kind in KINDS for op in self.graph.operators())
        words = "with attention as one operator" if has_attention else _PLAIN
        return f"{words}, padded" if self.padding else words

    def asked_for(self, offload: Offload | None) -> tuple[int, ...]:
        """The inputs that a user's `offload` names; "auto" names none."""
        return {"optimizer_state": self.offloadable, "state": self.state}.get(
            offload or "", ()
        )

    def make(self, remat: Remat | None, at_host: Collection[int] = ()) -> StepVariant:
        """The variant with `remat` and the inputs at these positions on the host."""
        variant = self._with_remat(remat)
        if not at_host:
            return variant
        inputs = tuple(
            replace(each, memory="host") if position in at_host else each
            for position, each in enumerate(variant.graph.inputs)
        )
        return replace(variant, graph=replace(variant.graph, inputs=inputs))

    def of_plan(self, plan: ShardingPlan) -> StepVariant:
        """The variant that a plan was made of."""
        at_host = [i for i, each in enumerate(plan.inputs) if each.memory == "host"]
        return self.make(Remat.parse(plan.remat) if plan.remat else None, at_host)

    def _with_remat(self, remat: Remat | None) -> StepVariant:
        key = str(remat or "")
        if key not in self._by_remat:
            assert remat is not None
            sets = recompute_sets(self.graph, self.batch, remat)
            if sets.is_empty:
                plain = StepVariant(self.traced, self.graph, remat, 0, self.padding)
                self._by_remat[key] = plain
                return plain
            traced = with_recomputation(self.traced, self.graph, sets)
            graph = build_graph(traced, self.roles)
            number = sets.num_segments
            made = StepVariant(traced, graph, remat, number, self.padding)
            self._by_remat[key] = made
        return self._by_remat[key]


def all_state(graph: OpGraph) -> tuple[int, ...]:
    """Positions of the inputs that are state, but for scalars: all of a model."""
    return tuple(
        position
        for position, each in enumerate(graph.inputs)
        if each.role == "state" and is_movable(graph, each.tensor)
    )


def is_movable(graph: OpGraph, tensor: int) -> bool:
    """Whether the host's memory may hold an argument: scalars are no gain."""
    kind = graph.tensors[tensor].type
    return bool(kind.rank) and not kind.is_extended


def optimizer_state(graph: OpGraph) -> tuple[int, ...]:
    """Positions of the inputs that are state which only the update reads.

    The one whose first use is furthest in the future comes first (Belady 1966): it is
    what memory is best without. Scalars are no gain and left out.
    """
    phases = [Phases.of(block) for block in graph.blocks]
    backward = [op for each in phases for op in each.backward]
    read = {t for op in backward for t in (*tensors_of(op.operands), *op.results)}
    needed = Flow(graph).makers_of(read)
    first_use: dict[int, int] = {}
    for position, op in enumerate(graph.blocks[0].operators):
        for tensor in tensors_of(op.operands):
            first_use.setdefault(tensor, position)
    found = [
        position
        for position, each in enumerate(graph.inputs)
        if each.role == "state"
        and backward
        and each.tensor not in needed
        and each.tensor in first_use
        and is_movable(graph, each.tensor)
    ]
    return tuple(sorted(found, key=lambda p: -first_use[graph.inputs[p].tensor]))
