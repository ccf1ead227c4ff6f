"""The edges between writers and readers of a tensor; equal edges share their arrays."""

from __future__ import annotations

import numpy as np

from autopar.solver.choice_graph import EdgeType

from ..graph.op_graph import TensorType
from ..sharding.resharding import Resharder
from ..sharding.spec import is_pending
from .relay_choices import as_relayed, relay_edge, without_growth
from .spec_choices import SpecChoices

# Between any vertices; to a relay, where memory counts; from a relay, which
# nobody gathers from where memory counts (`relay_choices.py`); to what reads a tensor
# as it was made; from the relay of what lasts to its only reader.
PLAIN, TO_RELAY, FROM_RELAY, AS_MADE, TO_ONLY_READER = 0, 1, 2, 3, 4


class ReshardEdges:
    """Resharding costs on one mesh, worked out once for each pair of spec choices."""

    def __init__(self, resharder: Resharder) -> None:
        self._resharder = resharder
        self._costs: dict[object, np.ndarray | None] = {}
        self._affine: dict[object, tuple[np.ndarray, np.ndarray]] = {}
        self._relayed: dict[object, EdgeType] = {}
        self._shrinking: dict[object, np.ndarray] = {}
        self._read_alone: dict[object, np.ndarray] = {}

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

    def owed(self, choices: SpecChoices, kind: TensorType) -> np.ndarray:
        """[choices] the least seconds for what each owes of a sum; 0 if all owe one."""
        complete = [spec for spec in choices.distinct if not is_pending(spec)]
        if len(complete) in (0, len(choices.distinct)):
            return np.zeros(len(choices.classes))
        pair = choices.distinct, complete
        fixed, per_byte = self._resharder.affine_matrices(*pair)
        return (fixed + per_byte * kind.bytes).min(axis=1)[choices.classes]

    def edge_type(
        self,
        sources: SpecChoices,
        targets: SpecChoices,
        tensor_bytes: int,
        weight: float,
        kind: int,
    ) -> EdgeType | None:
        """Classes and costs of an edge, whose `kind` is one of those above."""
        if kind == AS_MADE:
            pairs = [[s == t for t in targets.distinct] for s in sources.distinct]
            return sources.classes, targets.classes, np.where(pairs, 0.0, np.inf)
        matrix = self.costs(sources, targets, tensor_bytes, weight)
        if kind == TO_RELAY:
            return self._to_relay(sources, targets, matrix)
        if kind == TO_ONLY_READER:
            matrix = self._as_relayed(sources, targets, matrix)
        if matrix is None:
            return None
        if kind == FROM_RELAY:
            matrix = self._without_growth(sources, targets, matrix)
        return sources.classes, targets.classes, matrix

    def _to_relay(
        self, sources: SpecChoices, targets: SpecChoices, costs: np.ndarray | None
    ) -> EdgeType:
        key = (id(sources), id(targets), id(costs))
        if key not in self._relayed:
            self._relayed[key] = relay_edge(sources, targets, costs)
        return self._relayed[key]

    def _as_relayed(
        self, sources: SpecChoices, targets: SpecChoices, costs: np.ndarray | None
    ) -> np.ndarray:
        key = (id(sources), id(targets), id(costs))
        if key not in self._read_alone:
            self._read_alone[key] = as_relayed(sources, targets, costs)
        return self._read_alone[key]

    def _without_growth(
        self, sources: SpecChoices, targets: SpecChoices, costs: np.ndarray
    ) -> np.ndarray:
        key = (id(sources), id(targets), id(costs))
        if key not in self._shrinking:
            self._shrinking[key] = without_growth(sources, targets, costs)
        return self._shrinking[key]
