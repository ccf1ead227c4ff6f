"""Patterns of vertices whose choices are the specs of one tensor, each made once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..graph.op_graph import TensorType
from ..graph.pins import Pin
from ..sharding.mesh import MeshShape
from ..sharding.spec import replicated
from .axis_orders import Orders, in_orders
from .reshard_edges import ReshardEdges
from .spec_choices import SpecChoices, SpecTable
from .strategies import tensor_specs
from .vertex_builder import VertexBuilder
from .vertices import Pattern, VertexKind


class SpecPatterns:
    """Those of one problem, by number in its vertices."""

    def __init__(
        self,
        mesh: MeshShape,
        orders: Orders,
        specs: SpecTable,
        vertices: VertexBuilder,
        resharding: ReshardEdges,
    ) -> None:
        self._mesh, self._orders, self._specs = mesh, orders, specs
        self._vertices, self._resharding = vertices, resharding
        self._legal: dict[object, SpecChoices] = {}
        self._known: dict[object, int] = {}
        self._zeros: dict[int, np.ndarray] = {}

    def of(
        self,
        kind: VertexKind,
        tensor_type: TensorType,
        writes: Sequence[tuple[int, int]] = (),
        reads: Sequence[int] = (),
        *,
        pending: bool,
        whole: bool = False,
        pin: Pin | None = None,
        seconds_per_byte: float = 0.0,
        sum_runs: int = 0,
    ) -> int:
        """The pattern of vertices whose choices are specs of one tensor.

        Writes are (bytes, leading dims more than `tensor_type`), reads those dims (1
        for what a scan slices or stacks). `whole`: the program itself holds the value,
        so it can only be replicated. `seconds_per_byte` are of what a device has of the
        tensor.
        `sum_runs`: what is owed of a sum is paid elsewhere, once in so many runs.
        """
        key = (
            *(kind, tensor_type, tuple(writes), tuple(reads), pending, whole, pin),
            *(seconds_per_byte, sum_runs),
        )
        if key in self._known:
            return self._known[key]
        choices = self._legal_specs(tensor_type, pending, whole)
        if pin is not None:
            specs = [s for s in choices.specs.tolist() if pin.allows(tuple(s))]
            choices = self._specs.choices(np.array(specs))
        count = len(choices.classes)
        seconds = self._zeros.setdefault(count, choices.fractions * 0.0)
        if seconds_per_byte:
            seconds = choices.fractions * (tensor_type.bytes * seconds_per_byte)
        if sum_runs:
            seconds = seconds + self._resharding.owed(choices, tensor_type) / sum_runs
        written = [
            (size, self._specs.shifted(choices, extra)) for size, extra in writes
        ]
        held = held_bytes(kind, written, count)
        pattern = Pattern(
            kind,
            seconds,
            held,
            tuple([each for _, each in written]),
            tuple([self._specs.shifted(choices, extra) for extra in reads]),
        )
        self._known[key] = self._vertices.add_pattern(pattern)
        return self._known[key]

    def _legal_specs(self, kind: TensorType, pending: bool, whole: bool) -> SpecChoices:
        key = (kind, pending, whole)
        if key not in self._legal:
            legal = tensor_specs(kind, self._mesh, pending=pending)
            legal = tuple(in_orders(legal, self._orders))
            if whole:
                legal = (replicated(self._mesh.num_axes),)
            self._legal[key] = self._specs.choices(np.array(legal))
        return self._legal[key]


def held_bytes(
    kind: VertexKind, writes: Sequence[tuple[int, SpecChoices]], count: int
) -> np.ndarray:
    """[choices] the bytes of what a vertex writes, given its tensors' bytes."""
    held = np.zeros(count)
    for whole, choices in writes:
        part = whole * choices.fractions
        # All that a port writes is one memory, inside a loop and out.
        held = np.maximum(held, part) if kind == "port" else held + part
    return held
