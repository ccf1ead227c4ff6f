"""The edges between writers and readers of a tensor; equal edges share their arrays."""

from __future__ import annotations

import numpy as np

from autopar.solver.choice_graph import Edge

from ..sharding.resharding import Resharder
from .relay_choices import relay_edge, without_growth
from .spec_choices import SpecChoices


class ReshardEdges:
    """Resharding costs on one mesh, worked out once for each pair of spec choices."""

    def __init__(self, resharder: Resharder) -> None:
        self._resharder = resharder
        self._costs: dict[object, np.ndarray | None] = {}
        self._affine: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        self._relayed: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        self._shrinking: dict[object, np.ndarray] = {}

    def costs(
        self,
        sources: SpecChoices,
        targets: SpecChoices,
        tensor_bytes: int,
        weight: float,
    ) -> np.ndarray | None:
        """[source specs, target specs] seconds; None where all are 0."""
        key = (id(sources), id(targets), tensor_bytes, weight)
        if key not in self._costs:
            pair = (sources.distinct, targets.distinct)
            if pair not in self._affine:
                self._affine[pair] = self._resharder.affine_matrices(*pair)
            fixed, per_byte = self._affine[pair]
            matrix = (fixed + per_byte * tensor_bytes) * weight
            self._costs[key] = matrix if matrix.any() else None
        return self._costs[key]

    def to_lasting_relay(
        self,
        writer: int,
        relay: int,
        sources: SpecChoices,
        targets: SpecChoices,
        costs: np.ndarray | None,
    ) -> Edge:
        """The edge to a relay beside its tensor (`relay_choices.py`)."""
        key = (id(sources), id(targets), id(costs))
        if key not in self._relayed:
            edge = relay_edge(writer, relay, sources, targets, costs)
            self._relayed[key] = edge.second_class, edge.costs
        return Edge(writer, relay, sources.classes, *self._relayed[key])

    def without_growth(
        self, sources: SpecChoices, targets: SpecChoices, costs: np.ndarray
    ) -> np.ndarray:
        """`costs`, inf where a reader would gather from a relay."""
        key = (id(sources), id(targets), id(costs))
        if key not in self._shrinking:
            self._shrinking[key] = without_growth(sources, targets, costs)
        return self._shrinking[key]
