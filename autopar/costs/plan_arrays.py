"""The specs of a plan as numbers, beside the columns of its graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..graph.op_graph import GraphColumns, OpGraph
from ..plans.plan import ShardingPlan
from ..sharding.spec import Spec, num_shards
from .narrow_floats import has_narrow
from .random_words import bytes_of_tensors


@dataclass(frozen=True, eq=False)
class PlanArrays:
    """A plan of a graph.

    Specs are numbered in `number_of`: `made` [tensors] is the one that a tensor is made
    in, `read` [operands] that of each entry of the graph's `columns.operands`.
    """

    graph: OpGraph
    plan: ShardingPlan
    number_of: dict[Spec, int]
    made: np.ndarray
    read: np.ndarray

    @classmethod
    def of(cls, graph: OpGraph, plan: ShardingPlan) -> PlanArrays:
        """The arrays of a plan."""
        number_of: dict[Spec, int] = {}

        def numbered(specs: Iterable[Spec]) -> np.ndarray:
            found = [number_of.setdefault(spec, len(number_of)) for spec in specs]
            return np.array(found, np.intp)

        made = numbered([tensor.spec for tensor in plan.tensors])
        read = numbered([spec for op in plan.operators for spec in op.operand_specs])
        for tensor in plan.tensors:
            for copy in tensor.conversions:
                numbered((copy.source, copy.target))
        for specs in plan.outputs:
            numbered(specs)
        return cls(graph, plan, number_of, made, read)

    @property
    def columns(self) -> GraphColumns:
        """Those of the graph."""
        return self.graph.columns

    @cached_property
    def widens(self) -> bool:
        """Whether something is narrow that its devices compute in float32."""
        return self.plan.device_kind == "CPU" and has_narrow(self.columns)

    @property
    def is_alone(self) -> bool:
        """Whether the plan is for one accelerator, which sends nothing."""
        return self.plan.device_kind not in ("CPU", "") and self.plan.mesh.size == 1

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The specs by number."""
        return tuple(self.number_of)

    def bytes_of(self, tensor: np.ndarray, spec: np.ndarray) -> np.ndarray:
        """What one device holds of tensors [n] in specs [n]."""
        sizes = self.plan.mesh.axis_sizes
        shards = np.array([num_shards(each, sizes) for each in self.specs], np.int64)
        return self._bytes[tensor] // shards[spec]

    @cached_property
    def _bytes(self) -> np.ndarray:
        return bytes_of_tensors(self.columns)

    def __str__(self) -> str:
        return f"PlanArrays: {len(self.made)} tensors in {len(self.number_of)} specs"
